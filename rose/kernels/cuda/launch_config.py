"""What the driver is told of a launch beside its arguments. driver: cuda.bindings.driver, or a stand-in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rose.kernels.cuda.plan import SHARED_BYTES


def early(driver: Any) -> Any:
    """The attribute of programmatic dependent launch: brought up while the kernel in front still runs."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def clusters(driver: Any, blocks: int) -> Any:
    """The attribute of neighbouring blocks that run together and reach each other's shared memory."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = blocks, 1, 1
    return attribute


def cooperative(driver: Any) -> Any:
    """The attribute of blocks that all run at once, or are refused."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    attribute.value.cooperative = 1
    return attribute


def launch_config(
    driver: Any,
    grid: tuple[int, int],
    threads: int,
    attributes: Sequence[Any],
    stream: int,
    shared_bytes: int = SHARED_BYTES,
) -> Any:
    """The CUlaunchConfig of grid[0] x grid[1] blocks of so many threads on `stream`."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY = grid
    config.blockDimX = threads
    config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.sharedMemBytes = shared_bytes
    config.attrs, config.numAttrs = list(attributes), len(attributes)
    config.hStream = driver.CUstream(stream)
    return config

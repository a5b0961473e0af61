"""A stand-in for the driver's bindings that keeps the real structures and runs nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from cuda.bindings import driver as real

OK = real.CUresult.CUDA_SUCCESS


class FakeDriver:
    """cuda.bindings.driver, but for the calls that need a GPU: those are noted.

    read: what is to be noted of a launch's parameters, from their address.
    """

    def __init__(self, read: Callable[[int], object] = lambda parameters: None) -> None:
        self.maps: list[tuple[object, ...]] = []
        self.launches: list[SimpleNamespace] = []
        self.attributes: list[tuple[object, ...]] = []
        self.launch_result = OK
        self.read = read

    def __getattr__(self, name: str) -> object:
        return getattr(real, name)

    def cuDeviceGet(self, index):  # noqa: N802
        return OK, index

    def cuLibraryLoadFromFile(self, name, *options):  # noqa: N802
        return OK, name.decode()

    def cuLibraryGetKernel(self, library, name):  # noqa: N802
        return OK, (library, name.decode())

    def cuKernelSetAttribute(self, attribute, value, kernel, device):  # noqa: N802
        self.attributes.append((attribute, value, kernel[1], device))
        return (OK,)

    def cuTensorMapEncodeTiled(self, dtype, rank, address, sizes, strides, box, steps, *modes):  # noqa: N802
        assert len(sizes) == rank == len(strides) + 1 == len(box) == len(steps)
        self.maps.append(
            (address, *([int(value) for value in values] for values in (sizes, strides, box, steps)))
        )
        return OK, real.CUtensorMap()

    def cuLaunchKernelEx(self, config, kernel, parameters, extra):  # noqa: N802
        early, cluster, cooperative = None, None, None  # read now: the structures die with the launch
        for attribute in config.attrs:
            if attribute.id == real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
                size = attribute.value.clusterDim
                cluster = (size.x, size.y, size.z)
            elif attribute.id == real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
                cooperative = attribute.value.cooperative
            else:
                assert "PROGRAMMATIC_STREAM_SERIALIZATION" in attribute.id.name
                early = attribute.value.programmaticStreamSerializationAllowed
        self.launches.append(
            SimpleNamespace(
                kernel=kernel[1],
                grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
                block=(config.blockDimX, config.blockDimY, config.blockDimZ),
                shared=config.sharedMemBytes,
                stream=int(config.hStream),
                seen=self.read(parameters),
                early=early,
                cluster=cluster,
                cooperative=cooperative,
                count=config.numAttrs,
            )
        )
        return (self.launch_result,)

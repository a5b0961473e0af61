"""For tests of launches of products by pingpong.cuh: a driver that notes them, and a stream."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rose.kernels.cuda.library import CudaLibrary
from tests.unit.kernels.fake_driver import FakeDriver

_MAPS = 4
STREAM = 77


def driver_noting(kinds: Sequence[Any]) -> FakeDriver:
    """Notes of each launch the values of its parameters behind the tensor maps, which are of these kinds."""

    def read(parameters: int) -> list[object]:
        pointers = (ctypes.c_void_p * (_MAPS + len(kinds))).from_address(parameters)
        return [kind.from_address(at).value for kind, at in zip(kinds, pointers[_MAPS:], strict=True)]

    return FakeDriver(read)


def library_of(driver: FakeDriver) -> CudaLibrary:
    """Some cubin's kernels."""
    return CudaLibrary(Path("some.cubin"), 0, driver)


def on_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's current stream is STREAM."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))

"""Page-locked host memory, pooled by size class and handed out in slots that live as long as their views."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from cuda.bindings import runtime
from numpy.typing import DTypeLike, NDArray

from cuda_utils.errors import CudaError, check

SMALLEST_CLASS_BYTES = 4096  # a page: smaller blocks would save nothing
_CUDART_UNLOADING = 4


class PinnedExhaustedError(MemoryError):
    """The pool holds as many bytes as it may, all of them in use."""


class HostAllocator(Protocol):
    """Where the pool's blocks come from."""

    def allocate(self, nbytes: int) -> int:
        """Address of a new block of `nbytes`."""
        ...

    def free(self, pointer: int) -> None:
        """Give back the block at `pointer`."""
        ...


class CudaHostAllocator:
    """Page-locked memory: the device copies to and from it while the host goes on."""

    def allocate(self, nbytes: int) -> int:
        """See `HostAllocator`. Takes up to milliseconds and may wait for the device: not for the hot path.

        Raises:
            CudaError: no memory can be locked.
        """
        pointer: int = check(runtime.cudaHostAlloc(nbytes, runtime.cudaHostAllocDefault), "cudaHostAlloc")
        return pointer

    def free(self, pointer: int) -> None:
        """See `HostAllocator`. Raises: CudaError: the address is wrong or the device is broken."""
        error = runtime.cudaFreeHost(pointer)[0]
        if error and int(error) != _CUDART_UNLOADING:  # at exit the driver has freed everything already
            raise CudaError(error, "cudaFreeHost")


class PlainHostAllocator:
    """The CPU's stand-in: ordinary memory."""

    def __init__(self) -> None:
        self._blocks: dict[int, Any] = {}

    def allocate(self, nbytes: int) -> int:
        """See `HostAllocator`."""
        block = (ctypes.c_char * nbytes)()
        pointer = ctypes.addressof(block)
        self._blocks[pointer] = block
        return pointer

    def free(self, pointer: int) -> None:
        """See `HostAllocator`."""
        del self._blocks[pointer]

    def __len__(self) -> int:
        """How many blocks are allocated."""
        return len(self._blocks)


class PinnedSlot:
    """A block on loan. It returns to its pool when this object and every view made from it are gone.

    ptr: host address. nbytes: size asked for (the block may be larger).
    """

    __slots__ = ("_pool", "_size_class", "nbytes", "ptr")

    def __init__(self, pool: PinnedPool, ptr: int, nbytes: int, size_class: int) -> None:
        self._pool = pool
        self._size_class = size_class
        self.ptr = ptr
        self.nbytes = nbytes

    @property
    def __array_interface__(self) -> Mapping[str, object]:
        """All of it as bytes, for numpy. Made when asked for, which is when the device is done."""
        return {"version": 3, "typestr": "|u1", "shape": (self.nbytes,), "data": (self.ptr, False)}

    def view(self, dtype: DTypeLike, shape: tuple[int, ...], offset_bytes: int = 0) -> NDArray[Any]:
        """An array over part of the slot; it keeps the slot on loan, and so do arrays made from it.

        Raises:
            TypeError: it would reach past the slot.
        """
        # The chain array -> bytes -> slot, never slot -> array: a cycle would only be freed by the collector.
        return np.ndarray(shape, dtype, np.asarray(self), offset_bytes)

    def __del__(self) -> None:
        self._pool._give_back(self.ptr, self._size_class)


class PinnedPool:
    """Blocks of `block_bytes`. A slot may die in any thread: the free lists are deques, so atomic.

    max_bytes: most bytes allocated at one time, free blocks included.
    """

    def __init__(self, allocator: HostAllocator, max_bytes: int) -> None:
        self._allocator = allocator
        self._max_bytes = max_bytes
        self._free: dict[int, deque[int]] = {}
        self._allocated_bytes = 0
        self._allocations = 0
        self._acquired = 0
        self._closed = False

    def acquire(self, nbytes: int) -> PinnedSlot:
        """A slot of at least `nbytes`, its content undefined.

        Raises:
            PinnedExhaustedError: a new block would go beyond `max_bytes`.
            CudaError: no memory can be locked.
        """
        block = block_bytes(nbytes)
        free = self._free.get(block)
        pointer = free.pop() if free else self._allocate(block)
        self._acquired += 1
        return PinnedSlot(self, pointer, nbytes, block)

    def reserve(self, nbytes: int, count: int) -> None:
        """Allocate `count` blocks that hold `nbytes`, so that `acquire` finds them free.

        Raises: as `acquire`.
        """
        slots = [self.acquire(nbytes) for _ in range(count)]
        slots.clear()

    def stats(self) -> Mapping[str, int]:
        """Counters: blocks and bytes allocated, bytes free, slots handed out."""
        free_bytes = sum(size * len(blocks) for size, blocks in self._free.items())
        return {
            "allocated_bytes": self._allocated_bytes,
            "free_bytes": free_bytes,
            "in_use_bytes": self._allocated_bytes - free_bytes,
            "max_bytes": self._max_bytes,
            "allocations": self._allocations,
            "acquired": self._acquired,
        }

    def close(self) -> None:
        """Free what is not on loan; slots still out free their block when they die. May be called twice."""
        self._closed = True
        for size_class, blocks in self._free.items():
            while blocks:
                self._release(blocks.pop(), size_class)

    def _allocate(self, size_class: int) -> int:
        self._trim(self._max_bytes - size_class)
        if self._allocated_bytes + size_class > self._max_bytes:
            raise PinnedExhaustedError(
                f"results in use hold {self._allocated_bytes} bytes of page-locked memory; "
                f"{size_class} more would exceed the limit of {self._max_bytes}"
            )
        pointer = self._allocator.allocate(size_class)
        self._free.setdefault(size_class, deque())
        self._allocated_bytes += size_class
        self._allocations += 1
        return pointer

    def _trim(self, allowed_bytes: int) -> None:
        """Free unused blocks of any size until at most `allowed_bytes` are allocated, or none is unused."""
        for size_class, blocks in self._free.items():
            while blocks and self._allocated_bytes > allowed_bytes:
                self._release(blocks.pop(), size_class)

    def _give_back(self, pointer: int, size_class: int) -> None:
        if self._closed:
            self._release(pointer, size_class)
        else:
            self._free[size_class].append(pointer)

    def _release(self, pointer: int, size_class: int) -> None:
        self._allocator.free(pointer)
        self._allocated_bytes -= size_class


def block_bytes(nbytes: int) -> int:
    """Bytes of a block for so many: a power of two, or one to three quarters more than one; whole pages.

    By powers of two alone, rows of 4096 bytes and a little behind them would take twice what they need.
    """
    step = max(SMALLEST_CLASS_BYTES, 1 << max((nbytes - 1).bit_length() - 3, 0))
    return -(-nbytes // step) * step

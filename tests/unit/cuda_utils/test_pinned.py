"""A slot stays on loan while any view of it lives, and no longer; the pool is bounded."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cuda_utils.pinned import PinnedExhaustedError, PinnedPool, PlainHostAllocator, block_bytes


@pytest.fixture
def allocator() -> PlainHostAllocator:
    return PlainHostAllocator()


@pytest.fixture
def pool(allocator: PlainHostAllocator) -> PinnedPool:
    return PinnedPool(allocator, max_bytes=64 * 1024)


def test_a_dead_slot_is_used_again(pool: PinnedPool) -> None:
    slot = pool.acquire(5000)
    pointer = slot.ptr
    del slot
    assert pool.acquire(6000).ptr == pointer
    assert pool.stats()["allocations"] == 1


def test_a_view_keeps_the_slot_on_loan_without_the_collector(pool: PinnedPool) -> None:
    gc.disable()
    try:
        slot = pool.acquire(4096)
        rows = slot.view(np.float32, (4, 8), offset_bytes=64)[2:, :3]
        pointer = slot.ptr
        rows[:] = 7
        del slot
        other = pool.acquire(4096)
        assert other.ptr != pointer
        other.view(np.float32, (1024,))[:] = 0
        assert (rows == 7).all()
        del rows
        assert pool.acquire(4096).ptr == pointer
    finally:
        gc.enable()


def test_views_share_the_slots_memory(pool: PinnedPool) -> None:
    slot = pool.acquire(64)
    floats, int8 = slot.view(np.float32, (2, 4)), slot.view(np.int8, (2, 4), 32)
    assert floats.ctypes.data == slot.ptr
    assert int8.ctypes.data == slot.ptr + 32
    assert floats.flags.writeable


def test_a_view_past_the_end_is_refused(pool: PinnedPool) -> None:
    slot = pool.acquire(64)
    with pytest.raises(TypeError):
        slot.view(np.float32, (17,))


def test_a_full_pool_says_so_and_recovers(pool: PinnedPool) -> None:
    held = [pool.acquire(32 * 1024) for _ in range(2)]
    with pytest.raises(PinnedExhaustedError, match="65536 bytes"):
        pool.acquire(1)
    held.pop()
    assert pool.acquire(32 * 1024)


def test_unused_blocks_of_other_sizes_make_room(pool: PinnedPool, allocator: PlainHostAllocator) -> None:
    pool.reserve(4096, 16)
    assert pool.stats()["free_bytes"] == 64 * 1024
    slot = pool.acquire(60_000)
    assert pool.stats()["in_use_bytes"] == 64 * 1024
    assert len(allocator) == 1
    del slot


def test_reserved_blocks_serve_later_slots(pool: PinnedPool) -> None:
    pool.reserve(4096, 3)
    slots = [pool.acquire(4000) for _ in range(3)]
    assert pool.stats()["allocations"] == 3
    assert len({slot.ptr for slot in slots}) == 3


@pytest.mark.parametrize(
    ("nbytes", "block"),
    [(1, 4096), (4096, 4096), (4097, 8192), (65_536, 65_536), (65_537, 81_920), (98_305, 114_688)],
)
def test_blocks_are_at_most_a_quarter_larger_than_asked_for(nbytes: int, block: int) -> None:
    assert block_bytes(nbytes) == block
    assert nbytes <= block <= max(4096 + nbytes, 1.25 * nbytes)


def test_a_slot_may_die_in_another_thread(pool: PinnedPool) -> None:
    slots = [pool.acquire(4096)]
    thread = threading.Thread(target=slots.clear)
    thread.start()
    thread.join(10)
    assert pool.stats()["in_use_bytes"] == 0


def test_close_frees_now_what_is_free_and_later_what_is_used(
    pool: PinnedPool, allocator: PlainHostAllocator
) -> None:
    view = pool.acquire(4096).view(np.int8, (4096,))
    pool.reserve(8192, 2)
    pool.close()
    assert len(allocator) == 1
    view[:] = 1
    del view
    assert len(allocator) == 0
    pool.close()


class SlotsOfAPool(RuleBasedStateMachine):
    """However slots and views come and go, no two that live share a byte and the bound holds."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PlainHostAllocator()
        self.pool = PinnedPool(self.allocator, max_bytes=256 * 1024)
        self.stamps: dict[int, tuple[np.ndarray, int]] = {}
        self.next = 0

    @rule(target=held, nbytes=st.integers(1, 40_000))
    def acquire(self, nbytes: int) -> int:
        self.next += 1
        try:
            slot = self.pool.acquire(nbytes)
        except PinnedExhaustedError:
            assert self.pool.stats()["free_bytes"] == 0
            return 0
        view = slot.view(np.uint8, (nbytes,))
        view[:] = self.next % 251
        self.stamps[self.next] = (view[::2], self.next % 251)
        return self.next

    @rule(number=consumes(held))
    def drop(self, number: int) -> None:
        self.stamps.pop(number, None)

    @invariant()
    def nothing_is_shared(self) -> None:
        assert all((view == stamp).all() for view, stamp in self.stamps.values())

    @invariant()
    def bounded(self) -> None:
        assert self.pool.stats()["allocated_bytes"] <= 256 * 1024


SlotsOfAPool.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestSlotsOfAPool = SlotsOfAPool.TestCase

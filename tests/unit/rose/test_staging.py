"""What is staged is the batch, padded so that padding is inert; a slot is reused only behind its event."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_utils.lazy_tensor import LazyTensor
from cuda_utils.pinned import PinnedPool, PlainHostAllocator
from rose.batch import BatchResult, RaggedBatch
from rose.buckets import sequence_bucket, token_bucket
from rose.errors import StepError
from rose.staging import StagingLayout, StagingRing, StagingSlot

LAYOUT = StagingLayout(max_tokens=256, max_seqs=16, has_types=True)


def slots_of(count: int, layout: StagingLayout = LAYOUT) -> list[StagingSlot]:
    pool = PinnedPool(PlainHostAllocator(), 1 << 20)
    return [StagingSlot(index, layout, pool) for index in range(count)]


def image_of(slot: StagingSlot, nbytes: int) -> np.ndarray:
    """What a copy of nbytes from the slot would bring to the device."""
    return np.frombuffer(ctypes.string_at(slot.ptr, nbytes), np.int32)


@st.composite
def batches(draw: st.DrawFn) -> RaggedBatch:
    lengths = draw(st.lists(st.integers(1, 16), min_size=1, max_size=16))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sequences = [rng.integers(0, 1000, length, dtype=np.int32) for length in lengths]
    types = [rng.integers(0, 2, length, dtype=np.int32) for length in lengths]
    spans = None
    if draw(st.booleans()):
        spans = [np.sort(rng.integers(0, length + 1, (1, 2)), axis=1).astype(np.int32) for length in lengths]
        spans[0] = np.repeat(spans[0], draw(st.integers(1, 17 - len(lengths))), axis=0)
    return RaggedBatch.pack(sequences, types if draw(st.booleans()) else None, spans)


def assert_spans(staged: np.ndarray, batch: RaggedBatch, num_seqs: int) -> None:
    """Starts over ends, then empty ones; nothing at all of a batch without spans."""
    if batch.spans is None:
        assert len(staged) == 0
        return
    starts, ends = staged.reshape(2, num_seqs)
    count = len(batch.spans)
    assert np.stack([starts, ends], axis=1)[:count].tolist() == batch.spans.tolist()
    assert not staged.reshape(2, num_seqs)[:, count:].any()


@given(st.lists(batches(), min_size=1, max_size=4), st.booleans())
def test_the_image_is_the_batch_and_zeros_whatever_was_there_before(
    history: list[RaggedBatch], has_types: bool
) -> None:
    layout = StagingLayout(256, 16, has_types)
    (slot,) = slots_of(1, layout)
    for batch in history:
        num_tokens, num_seqs = token_bucket(batch.num_tokens), sequence_bucket(batch.num_rows)
        image = image_of(slot, slot.fill(batch, num_tokens, num_seqs))
        offsets = image[: num_seqs + 1]
        assert offsets[: batch.num_seqs + 1].tolist() == batch.cu_seqlens.tolist()
        assert (offsets[batch.num_seqs :] == batch.num_tokens).all()
        assert slot.host_cu_seqlens(num_seqs).tolist() == offsets.tolist()
        ids = image[layout.ids_at : layout.ids_at + num_tokens]
        assert ids[: batch.num_tokens].tolist() == batch.input_ids.tolist()
        assert not ids[batch.num_tokens :].any()
        types = image[layout.types_at(num_tokens) : layout.size(num_tokens)]
        assert_spans(image[layout.size(num_tokens) :], batch, num_seqs)
        if not has_types:
            assert len(types) == 0
            continue
        assert len(types) == num_tokens
        given_types = batch.token_type_ids if batch.token_type_ids is not None else np.zeros(batch.num_tokens)
        assert types[: batch.num_tokens].tolist() == given_types.tolist()
        assert not types[batch.num_tokens :].any()


def test_the_address_of_the_result_is_staged_with_the_batch_and_forgotten_with_it() -> None:
    (slot,) = slots_of(1)
    batch = RaggedBatch.pack([np.ones(3, np.int32)])
    address = 0x7F12_3456_7890
    staged = image_of(slot, slot.fill(batch, 16, 1, address))[LAYOUT.result_at : LAYOUT.ids_at]
    assert staged.view(np.int64).tolist() == [address]
    staged = image_of(slot, slot.fill(batch, 16, 1))[LAYOUT.result_at : LAYOUT.ids_at]
    assert staged.view(np.int64).tolist() == [0]


def test_every_part_is_aligned_and_apart() -> None:
    for max_seqs in (1, 61, 62, 63, 64, 256):
        layout = StagingLayout(4096, max_seqs, True)
        assert layout.ids_at % 16 == 0
        assert layout.result_at % 2 == 0
        assert layout.result_at > max_seqs
        for num_tokens in (16, 64, 4096):
            assert layout.types_at(num_tokens) % 16 == 0
            assert layout.size(num_tokens) == layout.types_at(num_tokens) + num_tokens


class Switch:
    """An event that passes when told to."""

    passed = False

    def record(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        assert self.passed

    def subscribe(self, callback: object) -> bool:
        return False


def pending_on(switch: Switch) -> LazyTensor[BatchResult]:
    return LazyTensor(switch, lambda error: BatchResult(np.zeros((1, 1), np.float32)))


def test_slots_are_used_in_turn_and_not_before_their_event() -> None:
    ring = StagingRing(slots_of(3))
    switches = [Switch() for _ in range(3)]
    for number, switch in enumerate(switches):
        assert ring.free().index == number
        assert ring.free().index == number  # asking takes nothing
        ring.launched(pending_on(switch))
    assert ring.in_flight == 3
    with pytest.raises(StepError, match="3 steps are in flight"):
        ring.free()
    switches[0].passed = True
    assert ring.free().index == 0
    assert ring.in_flight == 2


def test_a_reused_slot_has_its_result_fetched_before_its_event_is_recorded_again() -> None:
    ring = StagingRing(slots_of(1))
    switch = Switch()
    ring.free()
    lazy = pending_on(switch)
    ring.launched(lazy)
    switch.passed = True
    ring.free()
    switch.record()
    assert lazy.done
    assert lazy.result().vectors.shape == (1, 1)

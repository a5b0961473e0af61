"""Page-locked input slots: ids and offsets of one batch, packed so that one copy brings them to the device.

A slot, and the device buffer it is copied to, hold int32:

    [ offsets | room up to a multiple of 64, its last two: where on the host rows go, an int64 address
      | input_ids: T | token_type_ids: T, of models that have types
      | starts of spans: S | ends of spans: S, of batches that have spans ]

T is the token bucket, S the sequence bucket. Offsets have the room of the largest batch, so that ids start at
one address for all buckets; multiples of 64 keep every part but the spans aligned to 64 bytes, as vectorised
kernels want.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuda_utils.lazy_tensor import LazyTensor
from cuda_utils.pinned import PinnedPool
from rose.batch import BatchResult, Int32, RaggedBatch
from rose.errors import StepError

_ALIGNMENT = 64
_INT32_BYTES = 4
_ADDRESS_SIZE = 2


@dataclass(frozen=True, slots=True)
class StagingLayout:
    """Where the parts lie. max_tokens, max_seqs: the largest buckets. has_types: are token types staged?"""

    max_tokens: int
    max_seqs: int
    has_types: bool

    @property
    def ids_at(self) -> int:
        """Index of the first id; offsets start at 0."""
        return -(-(self.max_seqs + 1 + _ADDRESS_SIZE) // _ALIGNMENT) * _ALIGNMENT

    @property
    def result_at(self) -> int:
        """Index of the address that rows go to; it lies on a multiple of 8 bytes."""
        return self.ids_at - _ADDRESS_SIZE

    def types_at(self, num_tokens: int) -> int:
        """Index of the first token type in a batch padded to `num_tokens`."""
        return self.ids_at + num_tokens

    def size(self, num_tokens: int) -> int:
        """int32 elements of a batch padded to `num_tokens`; spans, if it has any, come after them."""
        return self.ids_at + num_tokens * (2 if self.has_types else 1)

    @property
    def capacity(self) -> int:
        """int32 elements of the largest batch, spans included."""
        return self.size(self.max_tokens) + 2 * self.max_seqs


class StagingSlot:
    """One page-locked image of the device's input buffer.

    index: which of the slots. ptr: host address.
    launches: forwards enqueued so far when it was last used.
    """

    def __init__(self, index: int, layout: StagingLayout, pool: PinnedPool) -> None:
        size = layout.capacity
        memory = pool.acquire(size * _INT32_BYTES)
        self.index = index
        self.ptr = memory.ptr
        self.launches = 0
        self._has_types = layout.has_types
        self._ids_at = layout.ids_at
        self._bytes_a_token = _INT32_BYTES * (2 if layout.has_types else 1)
        self._image: Int32 = memory.view(np.int32, (size,))
        # What every step writes goes through memoryviews: with cold caches these take 7 µs and
        # assignments to arrays 17. Any, as the stubs do not know that an array may be assigned.
        self._words: Any = self._image.data
        self._result_ptr = self._image[layout.result_at : layout.ids_at].view(np.int64).data
        self._zeros = np.zeros(layout.max_tokens, np.int32).data

    def fill(self, batch: RaggedBatch, num_tokens: int, num_seqs: int, result_ptr: int = 0) -> int:
        """Stage `batch`, padded to the buckets `num_tokens` and `num_seqs`; returns the bytes to copy.

        result_ptr: the host address that rows go to, if the forward delivers them; 0: nowhere.
        Padding ids are 0; offsets of sequences past the real ones repeat the last, which makes them empty. So
        are spans past the real ones.
        """
        words, ids_at = self._words, self._ids_at
        self._result_ptr[0] = result_ptr
        real_tokens, real_seqs = len(batch.input_ids), len(batch.cu_seqlens) - 1
        words[: real_seqs + 1] = batch.cu_seqlens
        if num_seqs > real_seqs:
            self._image[real_seqs + 1 : num_seqs + 1] = real_tokens
        words[ids_at : ids_at + real_tokens] = batch.input_ids
        if num_tokens > real_tokens:
            words[ids_at + real_tokens : ids_at + num_tokens] = self._zeros[: num_tokens - real_tokens]
        if self._has_types:
            self._fill_types(batch, ids_at + num_tokens, num_tokens)
        if batch.spans is not None:
            return self._fill_spans(batch.spans, num_tokens, num_seqs)
        return ids_at * _INT32_BYTES + num_tokens * self._bytes_a_token

    def host_cu_seqlens(self, num_seqs: int) -> Int32:
        """i32[num_seqs + 1], a view of what is staged."""
        return self._image[: num_seqs + 1]

    def _fill_spans(self, spans: Int32, num_tokens: int, num_seqs: int) -> int:
        """Stage spans i32[R, 2] behind everything else; returns the bytes to copy of all of it."""
        at = self._ids_at + num_tokens * self._bytes_a_token // _INT32_BYTES
        end = at + 2 * num_seqs
        staged = self._image[at:end].reshape(2, num_seqs)
        staged[:, : len(spans)] = spans.T
        staged[:, len(spans) :] = 0
        return end * _INT32_BYTES

    def _fill_types(self, batch: RaggedBatch, types_at: int, num_tokens: int) -> None:
        real_tokens = 0
        if batch.token_type_ids is not None:
            real_tokens = batch.num_tokens
            self._words[types_at : types_at + real_tokens] = batch.token_type_ids
        if num_tokens > real_tokens:
            zeros = self._zeros[: num_tokens - real_tokens]
            self._words[types_at + real_tokens : types_at + num_tokens] = zeros


class StagingRing:
    """Slots used in turn. The stream finishes steps in order, so the next slot is the first to be free."""

    def __init__(self, slots: list[StagingSlot]) -> None:
        self._slots = slots
        self._pending: list[LazyTensor[BatchResult] | None] = [None] * len(slots)
        self._next = 0

    def free(self) -> StagingSlot:
        """The next slot, which no copy reads any more. Asking again before `launched` gives the same one.

        Raises:
            StepError: all slots are in flight.
        """
        pending = self._pending[self._next]
        if pending is not None and not pending.done:
            raise StepError(f"{len(self._slots)} steps are in flight; this engine takes no more")
        return self._slots[self._next]

    def launched(self, lazy: LazyTensor[BatchResult]) -> None:
        """The slot that `free` gave is in use by the work that `lazy` waits for."""
        self._pending[self._next] = lazy
        self._next = (self._next + 1) % len(self._slots)

    def finished(self, slot: StagingSlot) -> None:
        """The work that used `slot` is done: let go of it now, not in the next step, and of its result."""
        self._pending[slot.index] = None

    @property
    def in_flight(self) -> int:
        """Slots in use. Asks the device."""
        return sum(pending is not None and not pending.done for pending in self._pending)

    def close(self) -> None:
        """Fetch every outstanding result and give up the slots, when the device is done."""
        for pending in self._pending:
            if pending is not None:
                _ = pending.done
        self._pending.clear()
        self._slots.clear()

"""Does for nothing what a step does, so that the next one need not fetch all of it from memory again."""

from __future__ import annotations

import logging
from contextlib import suppress

from cuda_utils.errors import DeviceError
from cuda_utils.lazy_tensor import LazyTensor
from cuda_utils.pinned import SMALLEST_CLASS_BYTES, HostAllocator, PinnedPool
from rose.batch import BatchResult, RaggedBatch
from rose.errors import StepError
from rose.graph_device import SideStream
from rose.graph_runner import Entry, GraphKey, GraphRunner
from rose.staging import StagingRing, StagingSlot
from rose.step_time import StepTimes

log = logging.getLogger(__name__)


class Rehearsal:
    """With a slot, page-locked memory and a stream apart: no step waits for one, or sees what it leaves.

    The first error ends rehearsals for good, and nothing else.
    """

    def __init__(
        self,
        side: SideStream,
        allocator: HostAllocator,
        slot: StagingSlot,
        runner: GraphRunner[StagingSlot],
    ) -> None:
        """slot: for this alone. runner: of the steps, whose objects are wanted too; it counts no step."""
        self._side = side
        self._runner = runner
        self._entry = Entry(GraphKey(0, 0, "none"), capturable=False, graph=side.graph)
        self._ring = StagingRing([slot])
        self._results = PinnedPool(allocator, SMALLEST_CLASS_BYTES)
        self._times: StepTimes[GraphKey] = StepTimes()
        self._failed = False

    def run(self, batch: RaggedBatch, key: GraphKey) -> None:
        """Stage `batch`, of shape `key`, and launch, unless the device is still at the one before."""
        try:
            if not (self._ring.in_flight or self._failed):
                self._launch(batch, key)
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Wait until nothing reads the slot any more, then free the memory."""
        with suppress(DeviceError):
            self._side.synchronize()
        self._ring.close()
        self._results.close()

    def _launch(self, batch: RaggedBatch, key: GraphKey) -> None:
        """The same calls as a step's, in the same order."""
        side, slot = self._side, self._ring.free()
        self._results.acquire(SMALLEST_CLASS_BYTES)
        nbytes = slot.fill(batch, key.num_tokens, key.num_seqs)
        side.memcpy.host_to_device(side.scratch_ptr, slot.ptr, nbytes)
        self._runner.run(self._entry, slot)
        side.event.record()
        self._times.finished(self._times.launched(key), steady=False)
        self._ring.launched(LazyTensor(side.event, self._finish))

    def _finish(self, error: DeviceError | None) -> BatchResult:
        if error is not None:
            self._fail(error)
        raise StepError("this work has no result") from error

    def _fail(self, error: Exception) -> None:
        self._failed = True
        log.warning("steps are not rehearsed any more: %s", error)

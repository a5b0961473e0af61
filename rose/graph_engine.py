"""The engine of a device with a stream and graphs: a step is a copy, a launch and an event. No waiting.

Knows neither CUDA nor torch: `Forward` runs a model, `GraphRunner` decides how, `StagingRing` keeps inputs
apart, and `DeviceNouns` are the device's own; the tests drive all of it on a simulated one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import get_ident

import numpy as np

from cuda_utils.errors import DeviceError
from cuda_utils.lazy_tensor import LazyTensor
from cuda_utils.pinned import PinnedPool, PinnedSlot
from rose.activation_reset import ActivationReset
from rose.batch import BatchResult, EngineInfo, RaggedBatch, TokenOutput
from rose.buckets import sequence_bucket, sequence_buckets, token_bucket
from rose.engine_options import EngineOptions
from rose.errors import EngineDeadError, EngineError, StepError
from rose.graph_device import DeviceNouns, Forward
from rose.graph_runner import Entry, Execution, GraphKey, GraphLimits, GraphRunner
from rose.inflection import inflection_point
from rose.limits import StepLimits
from rose.rehearsal import Rehearsal
from rose.result_layout import ResultLayout
from rose.staging import StagingRing, StagingSlot
from rose.step_errors import as_engine_error, marked
from rose.step_time import StepTimes
from rose.warmup import Warmup

log = logging.getLogger(__name__)

# Run once at start whatever is captured, so that no request waits for a compiler of the commonest kernels.
_WARM_TOKENS = (16, 64, 256)
_PAGE_BYTES = 4096
_REHEARSAL_S = 0.0001  # what is left to a step's own, after others'


class GraphEngine:
    """See `rose.batch.Engine`. A step beyond `max_in_flight` is refused with a StepError.

    on_near: called shortly before a step's end, if there is time, with the seconds until then; never raises.
    """

    def __init__(
        self,
        forward: Forward,
        nouns: DeviceNouns,
        info: EngineInfo,
        limits: StepLimits,
        options: EngineOptions,
    ) -> None:
        """Allocates everything, warms up, measures, and captures all graphs if asked to: takes seconds."""
        self._forward = forward
        self._nouns = nouns
        self._info = info
        self._limits = limits
        self._options = options
        self.on_near: Callable[[float], None] | None = None
        self._dead: str | None = None
        self._must_reset = 0  # rows of the activations, from the first on, in which a NaN may lie
        self._resets = self._reset_tokens = 0  # how many there were, and the rows of the last one
        self._steps = self._failed = self._tokens = self._padded = self._seqs = self._non_finite = 0
        self._times: StepTimes[GraphKey] = StepTimes()
        self._shapes: dict[tuple[int, int, int, bool, frozenset[TokenOutput]], _Shape] = {}
        self._bind_thread()
        *step_slots, spare_slot, usual, largest = self._staging_slots(options.max_in_flight + 3)
        self._ring = StagingRing(step_slots)
        self._reset = ActivationReset(forward, nouns.memcpy, info, (usual, largest))
        self._events = [nouns.new_event() for _ in step_slots]
        self._layout = ResultLayout(forward, info)
        self._results = self._result_pool()
        self._runner = self._warmed_up()
        self._buckets = self._runner.buckets(info.max_batch_tokens, info.max_batch_seqs)
        self._rehearsal: Rehearsal | None = None
        if nouns.side is not None:
            self._rehearsal = Rehearsal(nouns.side, nouns.allocator, spare_slot, self._runner)

    @property
    def info(self) -> EngineInfo:
        """See `rose.batch.Engine`."""
        return self._info

    @property
    def capture_freely(self) -> bool:
        """Whether lazy captures take what time they need; a scheduler says no while many requests wait."""
        return self._runner.capture_freely

    @capture_freely.setter
    def capture_freely(self, freely: bool) -> None:
        """Let lazy captures take their time, or a share of it."""
        self._runner.capture_freely = freely

    def step(self, batch: RaggedBatch) -> LazyTensor[BatchResult]:
        """See `rose.batch.Engine`. Some 50 µs when the shape's graph is there.

        Most of that is memory: when a step is done, others have had the processor's caches for a while. So
        nothing is done here that can be done later, while the device works; see `_meanwhile`.
        """
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        longest = self._limits.check(batch)
        if get_ident() != self._bound_thread:
            self._bind_thread()
        return self._launch(batch, longest)

    def rehearse(self, batch: RaggedBatch) -> None:
        """Do what `step` does for `batch`, which was stepped before, but for nothing. Never raises.

        When a step is about to end: the next one then finds its code and objects in the processor's caches.
        """
        if self._rehearsal is not None and self._dead is None and get_ident() == self._bound_thread:
            shape = self._shape_of(batch, self._limits.check(batch))
            self._rehearsal.run(batch, shape.key)

    def stats(self) -> Mapping[str, object]:
        """See `rose.batch.Engine`."""
        return {
            "steps": self._steps,
            "failed_steps": self._failed,
            "non_finite_sequences": self._non_finite,
            "in_flight": self._ring.in_flight,
            "tokens": self._tokens,
            "padded_tokens": self._padded,
            "sequences": self._seqs,
            "dead": self._dead,
            "pinned": dict(self._results.stats()),
            "graphs": {**self._runner.stats(), **self._buckets},
            "memory": dict(self._forward.memory()),
        }

    def close(self) -> None:
        """See `rose.batch.Engine`. Results already fetched stay valid. A dead device is left as it is."""
        if self._dead is not None:
            return
        try:
            self._nouns.synchronize()
        except DeviceError as error:
            self._dead = str(error)
            return
        self._ring.close()
        if self._rehearsal is not None:
            self._rehearsal.close()
            self._rehearsal = None  # its slot
        self._reset.close()
        self._runner.close()
        self._forward.destroy_retired(self._forward.launches)
        self._staging.close()
        self._results.close()
        self._dead = "the engine is closed"

    def _launch(self, batch: RaggedBatch, longest: int) -> LazyTensor[BatchResult]:
        shape = self._shape_of(batch, longest)
        key = shape.key
        slot = self._ring.free()
        if self._must_reset:
            self._overwrite_activations()
        step = _Step(self, batch, key, slot, self._resets)
        event = self._events[slot.index]
        try:
            step.result = result = self._results.acquire(shape.result_bytes)
            self._stage(slot, batch, key, result.ptr)
            step.execution = self._runner.run(shape.entry, slot)
            if key.tokens or not self._forward.delivers:
                self._copy_out(key, result)
            event.record()
        except Exception as error:
            raise self._launch_failed(error, slot, step) from error
        step.ticket = self._times.launched(key)
        lazy = LazyTensor(event, step.finish, outlook=step)
        slot.launches = self._forward.launches
        self._ring.launched(lazy)
        self._steps += 1
        return lazy

    def _shape_of(self, batch: RaggedBatch, longest: int) -> _Shape:
        """The shape of `batch`; one with spans or token outputs is of its own."""
        spans, outputs, num_rows = batch.spans, batch.token_outputs, len(batch.cu_seqlens) - 1
        if spans is not None:
            num_rows = max(num_rows, len(spans))
        buckets = token_bucket(len(batch.input_ids)), sequence_bucket(num_rows), sequence_bucket(longest)
        name = *buckets, spans is not None, outputs
        shape = self._shapes.get(name)
        if shape is None:
            key = self._forward.key_of(*buckets)
            key = key._replace(spans=spans is not None, tokens=tuple(sorted(outputs)))
            shape = self._shapes[name] = _Shape(key, self._runner.entry(key), self._layout.nbytes(key))
        return shape

    def _copy_out(self, key: GraphKey, result: PinnedSlot) -> None:
        """Enqueue the copy of what the forward does not deliver by itself."""
        forward, memcpy = self._forward, self._nouns.memcpy
        nbytes = forward.output_bytes(key.num_seqs)
        if not forward.delivers:
            memcpy.device_to_host(result.ptr, forward.output_ptr, nbytes)
        if key.tokens:
            at = self._layout.tokens_at(key.num_seqs)
            memcpy.device_to_host(result.ptr + at, forward.tokens_ptr, result.nbytes - at)

    def _stage(self, slot: StagingSlot, batch: RaggedBatch, key: GraphKey, result_ptr: int = 0) -> None:
        nbytes = slot.fill(batch, key.num_tokens, key.num_seqs, result_ptr)
        self._nouns.memcpy.host_to_device(self._forward.input_ptr, slot.ptr, nbytes)
        self._forward.plan(key, slot)

    def _overwrite_activations(self) -> None:
        try:
            self._reset_tokens = self._reset.enqueue(self._must_reset)
        except Exception as error:
            raise self._failure(as_engine_error(error)) from error
        self._must_reset = 0
        self._resets += 1

    def _launch_failed(self, error: Exception, slot: StagingSlot, step: _Step) -> EngineError:
        """The error to raise. What was enqueued before it may still use the slot: it counts as launched."""
        raised, event = as_engine_error(error), self._events[slot.index]
        try:
            event.record()
        except DeviceError as broken:
            raised = as_engine_error(broken)
        slot.launches = self._forward.launches
        self._ring.launched(LazyTensor(event, step.discard))
        return self._failure(raised)

    def _meanwhile(self, step: _Step) -> None:
        """All of `step` that need not come before its launch nor wait for its end."""
        batch = step.batch
        self._seqs += batch.num_seqs
        self._tokens += batch.num_tokens
        self._padded += step.key.num_tokens - batch.num_tokens
        self._forward.destroy_retired(step.launches_before)
        step.rows = self._layout.rows(step.result, batch, step.key)
        step.wrong_rows = self._limits.wrong_rows(batch)

    def _finished(self, step: _Step, error: DeviceError | None) -> BatchResult:
        if error is not None:
            raise self._failure(as_engine_error(error)) from error
        if step.execution is Execution.CAPTURED:
            self._times.forget(step.key)  # replays are faster than what was learned
        steady = step.execution in (Execution.EAGER, Execution.REPLAYED)
        self._times.finished(step.ticket, steady=steady)
        result = marked(step.rows)
        if result.non_finite:
            # What a step left that was launched before the last reset, that one overwrites, if large enough.
            tokens, overwritten = step.key.num_tokens, step.resets < self._resets
            if not overwritten or tokens > self._reset_tokens:
                self._must_reset = max(self._must_reset, tokens)
        if step.wrong_rows:
            result.vectors[step.wrong_rows] = np.nan
            result = marked(replace(step.rows, squares=None))
        self._non_finite += len(result.non_finite)
        return result

    def _failure(self, error: EngineError) -> EngineError:
        self._failed += 1
        if isinstance(error, EngineDeadError):
            self._dead = str(error)
        return error

    def _bind_thread(self) -> None:
        self._nouns.bind_thread()
        self._bound_thread = get_ident()

    def _staging_slots(self, count: int) -> list[StagingSlot]:
        layout = self._forward.layout
        # Twice, since the pool rounds up.
        nbytes = 2 * max(layout.capacity * 4, _PAGE_BYTES)
        self._staging = PinnedPool(self._nouns.allocator, count * nbytes)
        return [StagingSlot(index, layout, self._staging) for index in range(count)]

    def _result_pool(self) -> PinnedPool:
        """With slots for every number of sequences: page-locking on the hot path takes up to milliseconds."""
        options, info = self._options, self._info
        token_bytes = options.max_token_pinned_bytes if info.token_outputs else 0
        results = PinnedPool(self._nouns.allocator, options.max_pinned_bytes + token_bytes)
        for num_seqs in sequence_buckets(info.max_batch_seqs):
            results.reserve(self._layout.delivered_bytes(num_seqs), options.max_in_flight + 2)
        return results

    def _warmed_up(self) -> GraphRunner[StagingSlot]:
        """Compile what requests would wait for, measure where graphs stop to gain, capture if asked to."""
        started = time.perf_counter()
        options, most = self._options, self._info.max_batch_tokens
        warmup = Warmup(
            self._forward, self._forward.key_of, self._stage_alone, self._nouns.synchronize, self._info
        )
        for num_tokens in (*_WARM_TOKENS, most):
            warmup.run_once(min(num_tokens, most))
        limit = 0 if options.capture == "off" else options.max_capture_tokens
        if limit is None:
            limit = inflection_point(warmup.time_forward, most)
        limits = GraphLimits(options.capture, limit, options.max_graphs, options.max_graph_bytes)
        runner = GraphRunner(self._forward, limits)
        if options.capture == "all":
            runner.capture_all(warmup.keys(limit), warmup.work)
        self._nouns.synchronize()
        seconds = time.perf_counter() - started
        log.info("warmed up in %.1f s; graphs up to %d tokens (capture %s)", seconds, limit, options.capture)
        return runner

    def _stage_alone(self, batch: RaggedBatch, key: GraphKey) -> StagingSlot:
        slot = self._ring.free()
        self._stage(slot, batch, key)
        return slot


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a step of one shape need not work out again. result_bytes: of all its rows."""

    key: GraphKey
    entry: Entry
    result_bytes: int


class _Step:
    """One step until its event is passed.

    resets: of the activations, before it. launches_before: forwards that are done when `slot` is free.
    rows: views of `result`, not to be read before the event. wrong_rows: those of ids out of range.
    """

    __slots__ = (
        "_engine", "batch", "execution", "key", "launches_before", "resets", "result", "rows", "slot",
        "ticket", "waited_for", "wrong_rows",
    )  # fmt: skip

    def __init__(
        self, engine: GraphEngine, batch: RaggedBatch, key: GraphKey, slot: StagingSlot, resets: int
    ) -> None:
        self._engine = engine
        self.batch = batch
        self.key = key
        self.resets = resets
        self.slot = slot
        self.launches_before = slot.launches
        self.waited_for = False
        self.result: PinnedSlot
        self.rows: BatchResult
        self.wrong_rows: list[int]
        self.execution: Execution
        self.ticket: int

    def due_s(self) -> float | None:
        """Asked for when someone starts to wait: the loop has nothing better to do."""
        self._meanwhile()
        return self._engine._times.due_s(self.ticket)

    def near(self, left_s: float) -> None:
        """The loop would only poll now. The batch is alive anyway until the step is done."""
        if self._engine.on_near is not None:
            self._engine.on_near(left_s - _REHEARSAL_S)
        self._engine.rehearse(self.batch)

    def finish(self, error: DeviceError | None) -> BatchResult:
        self._engine._ring.finished(self.slot)
        self._meanwhile()
        return self._engine._finished(self, error)

    def discard(self, error: DeviceError | None) -> BatchResult:
        """Of work that nobody awaits: keeps the slots until the device is past them."""
        self._engine._ring.finished(self.slot)
        raise StepError("this work has no result") from error

    def _meanwhile(self) -> None:
        if not self.waited_for:
            self.waited_for = True
            self._engine._meanwhile(self)

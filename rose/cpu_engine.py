"""The engine on the CPU: one worker thread runs the steps, so the caller's loop never waits for a forward."""

from __future__ import annotations

import contextlib
from bisect import bisect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from cuda_utils.errors import DeviceError
from cuda_utils.event import CpuEvent
from cuda_utils.lazy_tensor import LazyTensor
from cuda_utils.stream import CpuStream
from rose.batch import BatchResult, EngineInfo, Int32, RaggedBatch
from rose.buckets import row_bucket, row_buckets
from rose.device_batch import DeviceBatch, Outputs
from rose.errors import EngineDeadError
from rose.layers.linear import compile_products
from rose.limits import StepLimits
from rose.step_errors import as_engine_error, marked

if TYPE_CHECKING:
    from rose.attention.base import AttentionBackend
    from rose.models.registry import Model


class CpuEngine:
    """Runs a model on the CPU behind the same contract as on a GPU.

    Batches get rows of padding, so that products see few numbers of rows: oneDNN keeps compiled code for
    each, gigabytes with the gaps that it leaves between activations (docs/reliability.md). Behind a step it
    compiles for one number that no step has had yet, until there is none below the largest: so memory is
    steady soon, not when the rarest number has come.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        info: EngineInfo,
        limits: StepLimits,
        num_threads: int,
    ) -> None:
        """num_threads: of one forward, beside the caller's thread."""
        self._model = model
        self._attention = attention
        self._info = info
        self._limits = limits
        self._launched = self._finished = self._failed = self._non_finite = 0
        self._tokens = self._padded = self._seqs = 0
        self._new_rows = list(row_buckets(info.max_batch_tokens))
        self._stream = CpuStream("rose-cpu", lambda: torch.set_num_threads(num_threads))

    @property
    def info(self) -> EngineInfo:
        """See `rose.batch.Engine`."""
        return self._info

    def step(self, batch: RaggedBatch) -> LazyTensor[BatchResult]:
        """See `rose.batch.Engine`. Any number of steps may wait; they run one at a time."""
        longest = self._limits.check(batch)
        self._limits.check_ids(batch)
        num_rows = self._rows(batch)
        step = _CpuStep(self._forward, batch, longest)
        event = CpuEvent(self._stream)
        try:
            self._stream.launch(step.run)
            event.record()
            self._compile_for_fewer(num_rows)
        except DeviceError as error:
            raise EngineDeadError(str(error)) from error
        self._launched += 1
        self._tokens += batch.num_tokens
        self._padded += num_rows - batch.num_tokens
        self._seqs += batch.num_seqs
        return LazyTensor(event, step.collect)

    def stats(self) -> Mapping[str, object]:
        """See `rose.batch.Engine`."""
        return {
            "steps": self._launched,
            "failed_steps": self._failed,
            "non_finite_sequences": self._non_finite,
            "in_flight": self._launched - self._finished,
            "tokens": self._tokens,
            "padded_tokens": self._padded,
            "sequences": self._seqs,
            "dead": self._stream.broken,
        }

    def close(self) -> None:
        """See `rose.batch.Engine`."""
        self._stream.close()

    def _rows(self, batch: RaggedBatch) -> int:
        """Tokens with padding, of which models are built to take no more than a step may have."""
        return min(row_bucket(batch.num_tokens), self._info.max_batch_tokens)

    def _compile_for_fewer(self, num_rows: int) -> None:
        """Have products compiled for the largest new number below a step's: less work than a layer of it."""
        if num_rows in self._new_rows:
            self._new_rows.remove(num_rows)
        fewer = bisect(self._new_rows, num_rows)
        if fewer:
            self._stream.launch(partial(_compile, self._new_rows.pop(fewer - 1)))

    def _forward(self, batch: RaggedBatch, longest: int) -> BatchResult:
        """Run the model and count the step; on the worker's thread only."""
        try:
            result = self._result(batch, longest)
        except Exception:
            self._failed += 1
            raise
        finally:
            self._finished += 1
        self._non_finite += len(result.non_finite)
        return result

    def _result(self, batch: RaggedBatch, longest: int) -> BatchResult:
        num_rows, shape = self._rows(batch), (batch.num_rows, self._info.dimensions)
        vectors = np.empty(shape, np.float32)
        int8 = np.empty(shape, np.int8) if self._info.has_int8 else None
        widths = self._info.token_outputs
        tokens = {kind: np.empty((num_rows, widths[kind]), np.float32) for kind in batch.token_outputs}
        outputs = Outputs(
            torch.from_numpy(vectors),
            None if int8 is None else torch.from_numpy(int8),
            {kind: torch.from_numpy(values) for kind, values in tokens.items()},
        )
        with torch.inference_mode():
            self._attention.plan(batch.cu_seqlens)
            self._model.forward(_tensors(batch, num_rows, longest, self._attention), outputs)
        real = {kind: values[: batch.num_tokens] for kind, values in tokens.items()}
        return marked(BatchResult(vectors, int8, tokens=real))


def _compile(num_rows: int) -> None:
    # Too little memory, say: a step of that size will say so, if one comes.
    with contextlib.suppress(RuntimeError), torch.inference_mode():
        compile_products(num_rows)


class _CpuStep:
    """Carries one step's outcome from the worker's thread to whoever collects it."""

    def __init__(
        self, forward: Callable[[RaggedBatch, int], BatchResult], batch: RaggedBatch, longest: int
    ) -> None:
        self._forward = forward
        self._batch: RaggedBatch | None = batch
        self._longest = longest
        self._outcome: BatchResult | Exception | None = None

    def run(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            raise RuntimeError("a step runs once")
        try:
            self._outcome = self._forward(batch, self._longest)
        except Exception as error:
            self._outcome = error

    def collect(self, error: DeviceError | None) -> BatchResult:
        outcome, self._outcome = self._outcome, None  # an error's traceback keeps `self`
        if isinstance(outcome, BatchResult):
            return outcome
        if outcome is None:
            raise EngineDeadError(f"the engine can run no further step: {error}") from error
        raise as_engine_error(outcome) from outcome


def _tensors(batch: RaggedBatch, num_rows: int, longest: int, attention: AttentionBackend) -> DeviceBatch:
    types = batch.token_type_ids
    return DeviceBatch(
        input_ids=_padded(batch.input_ids, num_rows),
        cu_seqlens=_tensor(batch.cu_seqlens),
        token_type_ids=None if types is None else _padded(types, num_rows),
        host_cu_seqlens=batch.cu_seqlens,
        max_seqlen=longest,
        attention=attention,
        spans=None if batch.spans is None else _tensor(batch.spans).t(),
    )


def _padded(array: Int32, num_rows: int) -> torch.Tensor:
    """i32[num_rows]: the array, then zeros."""
    rows = torch.zeros(num_rows, dtype=torch.int32)
    rows.numpy()[: len(array)] = array
    return rows


def _tensor(array: Int32) -> torch.Tensor:
    """Shares memory; torch warns about read-only arrays (views of bytes received), so those are copied."""
    return torch.from_numpy(np.require(array, np.int32, ("C", "W")))

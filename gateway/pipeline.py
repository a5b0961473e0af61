"""The one way from checked inputs to vectors: tokenise, fit, submit, finish. Knows no HTTP and no dialect."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gateway.deadline import Deadline
from gateway.encoding import finish
from gateway.errors import ApiError, ErrorKind
from gateway.inputs import InputLimits, Inputs, Texts, check_range, invalid
from gateway.metrics import GatewayMetrics
from gateway.options import GatewayOptions
from gateway.tokenization.base import SpecialTokens
from gateway.tokenization.pool import TokenizerPool
from rose.batch import EngineInfo, Float32, Int8, Int32
from scheduler.metrics import SchedulerMetrics
from scheduler.sequence import JobResult

_NO_TEMPLATE = SpecialTokens(np.zeros(0, np.int32), np.zeros(0, np.int32))


class Scheduler(Protocol):
    """What the gateway asks of `scheduler.batcher.Batcher`."""

    @property
    def healthy(self) -> bool:
        """Whether the engine can run further steps."""
        ...

    @property
    def metrics(self) -> SchedulerMetrics:
        """The counters as of now."""
        ...

    async def run(
        self,
        sequences: list[Int32],
        token_type_ids: list[Int32 | None] | None = None,
        deadline_s: float | None = None,
    ) -> JobResult:
        """Vectors of the sequences; see Batcher.run."""
        ...


@dataclass(frozen=True, slots=True)
class EmbedJob:
    """What a dialect wants done. dimensions: values to keep of each vector, in [1, D].

    truncate: cut inputs that are too long. max_tokens: what one may have, if less than the model takes.
    max_request_tokens: what all may have, if less than the server takes.
    keep_end: what is cut is the beginning. special_tokens: False: texts go without the tokenizer's template.
    deadline: None: the work may wait for ever.
    """

    inputs: Inputs
    dimensions: int
    normalize: bool
    truncate: bool
    deadline: Deadline | None = None
    max_tokens: int | None = None
    max_request_tokens: int | None = None
    keep_end: bool = False
    special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Embedded:
    """What became of a job: f32[n, dimensions], the tokens really processed, and the time taken, in ms.

    int8: i8[n, D] from models with their own quantiser, not cut to `dimensions`; else None.
    """

    vectors: Float32
    int8: Int8 | None
    num_tokens: int
    tokenization_ms: float
    queue_ms: float
    inference_ms: float


class Pipeline:
    """Runs jobs on one scheduler with one model's limits.

    tokenizer: None for an engine that takes token ids only.
    """

    def __init__(
        self,
        options: GatewayOptions,
        scheduler: Scheduler,
        info: EngineInfo,
        tokenizer: TokenizerPool | None,
        metrics: GatewayMetrics,
    ) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._tokenization = metrics.tokenization
        self.info = info
        self.limits = InputLimits(
            vocab_size=info.vocab_size,
            max_tokens=max_tokens(info),
            max_items=options.max_items,
            max_request_tokens=options.max_request_tokens,
        )

    async def embed(self, job: EmbedJob) -> Embedded:
        """Run `job`. Cancelling drops what of it still waits.

        Raises:
            ApiError: the inputs are too long or the vectors are not finite.
            scheduler.errors.SchedulerError: see scheduler/errors.py.
        """
        started_s = time.perf_counter()  # the loop's own clock ticks in milliseconds
        sequences = self._fit(await self._sequences(job), job)
        num_tokens = self._count(sequences, job)
        tokenization_s = time.perf_counter() - started_s
        self._tokenization.observe(tokenization_s)
        left_s = None if job.deadline is None else job.deadline.left_s()
        result = await self._scheduler.run(sequences, None, left_s)
        return Embedded(
            vectors=finish(result.vectors, job.dimensions, job.normalize),
            int8=result.int8,
            num_tokens=num_tokens,
            tokenization_ms=tokenization_s * 1e3,
            queue_ms=result.queue_ms,
            inference_ms=result.inference_ms,
        )

    def read_dimensions(self, dimensions: int | None, name: str = "dimensions") -> int:
        """A request's `dimensions`, or all of them.

        Raises:
            ApiError: INVALID_VALUE, when it is not in [1, D].
        """
        most = self.info.dimensions
        if dimensions is None:
            return most
        if not 1 <= dimensions <= most:
            raise invalid(f"{name} is {dimensions}; this model takes 1 to {most}", name)
        return dimensions

    @property
    def tokenizer(self) -> TokenizerPool:
        """What turns text into ids.

        Raises:
            ApiError: TEXT_NOT_SUPPORTED, when the server has none.
        """
        if self._tokenizer is None:
            raise ApiError(
                ErrorKind.TEXT_NOT_SUPPORTED,
                "this server has no tokenizer and takes token ids only: lists of integers, or int32 blocks",
                param="input",
            )
        return self._tokenizer

    async def _sequences(self, job: EmbedJob) -> list[Int32]:
        inputs = job.inputs
        if not isinstance(inputs, Texts):
            return inputs.sequences
        tokenizer = self.tokenizer
        sequences = await tokenizer.encode(inputs.texts)
        if not job.special_tokens:
            sequences = [tokenizer.special_tokens.strip(ids) for ids in sequences]
        if tokenizer.vocab_size > self.info.vocab_size:
            for index, ids in enumerate(sequences):
                check_range(ids, f"tokens of {inputs.place(index)}", self.info.vocab_size)
        return sequences

    def _fit(self, sequences: list[Int32], job: EmbedJob) -> list[Int32]:
        """Refuse or cut what is too long: the one rule for every route."""
        limit = self.limits.max_tokens
        if job.max_tokens is not None:
            limit = min(limit, job.max_tokens)
        if max(map(len, sequences)) <= limit:
            return sequences
        if not job.truncate:
            index = next(i for i, ids in enumerate(sequences) if len(ids) > limit)
            raise ApiError(
                ErrorKind.INPUT_TOO_LONG,
                f"{job.inputs.place(index)} has {len(sequences[index])} tokens; this model takes at most"
                f' {limit} (send "truncate": true to have it cut)',
                param=job.inputs.name,
            )
        template = _NO_TEMPLATE
        if isinstance(job.inputs, Texts) and job.special_tokens:
            template = self.tokenizer.special_tokens
        return [template.truncate(ids, limit, keep_end=job.keep_end) for ids in sequences]

    def _count(self, sequences: list[Int32], job: EmbedJob) -> int:
        inputs, limit = job.inputs, self.limits.max_request_tokens
        lengths = [len(ids) for ids in sequences]
        if not all(lengths):
            raise invalid(f"{inputs.place(lengths.index(0))} has no tokens", inputs.name)
        if job.max_request_tokens is not None:
            limit = min(limit, job.max_request_tokens)
        if sum(lengths) > limit:
            raise ApiError(
                ErrorKind.INPUT_TOO_LONG,
                f"{inputs.name} has {sum(lengths)} tokens in all; this server takes at most"
                f" {limit} a request",
                param=inputs.name,
            )
        return sum(lengths)


def max_tokens(info: EngineInfo) -> int:
    """Tokens one input may have: what the model takes, if a step takes that much."""
    return min(info.max_model_len, info.max_batch_tokens)

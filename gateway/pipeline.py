"""The one way from checked inputs to vectors: tokenise, fit, submit, finish. Knows no HTTP and no dialect."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from gateway.deadline import Deadline
from gateway.encoding import finish
from gateway.errors import ApiError, ErrorKind
from gateway.inputs import InputLimits, Inputs, Texts, check_range, invalid
from gateway.metrics import GatewayMetrics
from gateway.options import GatewayOptions
from gateway.token_outputs import Hold, TokenBudget, Tokens
from gateway.tokenization.base import SpecialTokens
from gateway.tokenization.pool import TokenizerPool
from rose.batch import NO_TOKEN_OUTPUTS, EngineInfo, Float32, Int8, Int32, RaggedIds, TokenOutput
from scheduler.errors import DeadlineExpired
from scheduler.job import JobResult
from scheduler.metrics import SchedulerMetrics

_NO_TEMPLATE = SpecialTokens(np.zeros(0, np.int32), np.zeros(0, np.int32))


DENSE = ("dense",)
# What other outputs are made of.
TOKEN_OUTPUTS: dict[str, TokenOutput] = {
    "sparse": "lexical",
    "multi_vector": "multi_vector",
    "hidden": "hidden",
}
# By what EngineInfo.outputs calls them.
_GIVES = {
    "dense": "dense vectors",
    "sparse": "sparse vectors",
    "multi_vector": "multi-vectors",
    "hidden": "vectors of tokens",
}


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
        sequences: Sequence[Int32],
        token_type_ids: Sequence[Int32 | None] | None = None,
        deadline_s: float | None = None,
        spans: Sequence[Int32 | None] | None = None,
        token_outputs: frozenset[TokenOutput] = NO_TOKEN_OUTPUTS,
    ) -> JobResult:
        """Vectors of the sequences, or of spans of them, and what tokens give; see Batcher.run."""
        ...


class EmbedJob(msgspec.Struct, frozen=True):
    """What a dialect wants done. dimensions: values to keep of each vector, in [1, D].

    truncate: cut inputs that are too long; cutting: what asks for that in the dialect's own words.
    max_tokens: what one may have, if less than the model takes.
    max_request_tokens: what all may have, if less than the server takes.
    keep_end: what is cut is the beginning. special_tokens: False: texts go without the tokenizer's template.
    deadline: None: the work may wait for ever.
    outputs: what is wanted of each input, as EngineInfo.outputs calls it.
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
    outputs: tuple[str, ...] = DENSE
    cutting: str = '"truncate": true'


class Embedded(msgspec.Struct, frozen=True):
    """What became of a job: f32[n, dimensions], the tokens really processed, and the time taken, in ms.

    int8: i8[n, D] from models with their own quantiser, not cut to `dimensions`; else None.
    tokens: what the inputs' tokens gave, if the job's outputs are made of it.
    """

    vectors: Float32
    int8: Int8 | None
    num_tokens: int
    tokenization_ms: float
    queue_ms: float
    inference_ms: float
    tokens: Tokens | None = None


class Ready(msgspec.Struct, frozen=True):
    """Sequences as the engine takes them, and what they may cost.

    token_type_ids: a row as long as its sequence, or None for zeros. started_s: when work on them began.
    spans: i32[k, 2], the parts of a sequence whose means are wanted; None: all of it.
    token_outputs: what is wanted of each token.
    """

    sequences: RaggedIds
    started_s: float
    deadline: Deadline | None
    token_type_ids: Sequence[Int32 | None] | None = None
    spans: Sequence[Int32 | None] | None = None
    token_outputs: frozenset[TokenOutput] = NO_TOKEN_OUTPUTS

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return len(self.sequences.flat)


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
        self._token_budget = TokenBudget(options.max_outstanding_token_bytes)
        self.info = info
        self._outputs = info.outputs
        self.limits = InputLimits(
            vocab_size=info.vocab_size,
            max_tokens=max_tokens(info),
            max_items=options.max_items,
            max_request_tokens=options.max_request_tokens,
        )

    async def embed(self, job: EmbedJob) -> Embedded:
        """Run `job`. Cancelling drops what of it still waits.

        Raises:
            ApiError: the model does not give the outputs, the inputs are too long, or there are too many; or
                what it gave is not finite.
            scheduler.errors.SchedulerError: see scheduler/errors.py.
        """
        self.check_outputs(job.outputs)
        started_s = time.perf_counter()  # the loop's own clock ticks in milliseconds
        sequences = self._fit(await self._sequences(job), job)
        self._check_count(sequences, job)
        ready = Ready(sequences, started_s, job.deadline, token_outputs=self._token_outputs(job))
        return await self.run(ready, lambda result: vectors_of(result, job.dimensions, job.normalize))

    def check_outputs(self, outputs: tuple[str, ...]) -> None:
        """Refuse outputs that the model does not give.

        Raises:
            ApiError: NOT_SUPPORTED.
        """
        missing = [output for output in outputs if output not in self._outputs]
        if missing:
            gives = ", ".join(_GIVES[output] for output in self._outputs)
            does = f"gives {gives}" if gives else "scores texts"
            message = f"model {self.info.model} {does}; it gives no {_GIVES[missing[0]]}"
            raise ApiError(ErrorKind.NOT_SUPPORTED, message, param="model")

    async def run(self, ready: Ready, finishing: Callable[[JobResult], Float32]) -> Embedded:
        """Run what is tokenised; `finishing` makes vectors of the scheduler's result as they are asked for.

        Raises:
            ApiError: what tokens give is too much, or not finite.
            scheduler.errors.SchedulerError: see scheduler/errors.py.
        """
        hold = self._hold(ready) if ready.token_outputs else None
        tokenization_s = time.perf_counter() - ready.started_s
        self._tokenization.observe(tokenization_s)
        left_s = None if ready.deadline is None else ready.deadline.left_s()
        try:
            result = await self._scheduler.run(
                ready.sequences, ready.token_type_ids, left_s, ready.spans, ready.token_outputs
            )
        except DeadlineExpired:
            if ready.deadline is None:
                raise
            raise ready.deadline.expired("while it waited for a batch") from None
        tokens = None
        if hold is not None:
            tokens = Tokens(ready.sequences, result.tokens, hold)
            tokens.check()
        return Embedded(
            vectors=finishing(result),
            int8=result.int8,
            num_tokens=ready.num_tokens,
            tokenization_ms=tokenization_s * 1e3,
            queue_ms=result.queue_ms,
            inference_ms=result.inference_ms,
            tokens=tokens,
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

    def check_total(self, num_tokens: int, name: str, most: int | None = None) -> None:
        """Refuse more tokens than a request may have. name: the field at fault. most: a dialect's own limit.

        Raises:
            ApiError: INPUT_TOO_LONG.
        """
        limit = self.limits.max_request_tokens
        if most is not None:
            limit = min(limit, most)
        if num_tokens > limit:
            message = f"{name} has {num_tokens} tokens in all; this server takes at most {limit} a request"
            raise ApiError(ErrorKind.INPUT_TOO_LONG, message, param=name)

    def check_ids(self, sequences: RaggedIds, place: Callable[[int], str]) -> None:
        """Refuse tokens that the tokenizer knows and the model does not. place: what a sequence is called.

        Raises:
            ApiError: INVALID_VALUE.
        """
        most = self.info.vocab_size
        if self.tokenizer.vocab_size > most and sequences.flat.max(initial=0) >= most:
            for index, ids in enumerate(sequences):
                check_range(ids, f"tokens of {place(index)}", most)

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

    def _token_outputs(self, job: EmbedJob) -> frozenset[TokenOutput]:
        """What `job` needs of each token. A SPLADE model's words are its vectors."""
        if job.outputs == DENSE or self.info.task == "sparse":
            return NO_TOKEN_OUTPUTS
        return frozenset(TOKEN_OUTPUTS[output] for output in job.outputs if output in TOKEN_OUTPUTS)

    def _hold(self, ready: Ready) -> Hold:
        """Take what the request's token outputs come to, or refuse it.

        One request may have as much as one step gives, so that each of its sequences fits one.
        """
        most = self.info.max_token_bytes
        nbytes = ready.num_tokens * self.info.bytes_a_token(ready.token_outputs)
        if nbytes > most:
            message = (
                f"what {ready.num_tokens} tokens give takes {nbytes} bytes; this server gives {most} bytes"
                " a request (--max-token-bytes)"
            )
            raise ApiError(ErrorKind.INPUT_TOO_LONG, message)
        return self._token_budget.hold(nbytes)

    async def _sequences(self, job: EmbedJob) -> RaggedIds:
        inputs = job.inputs
        if not isinstance(inputs, Texts):
            return inputs.sequences
        tokenizer, template = self.tokenizer, self.tokenizer.special_tokens
        max_tokens = None
        if job.truncate:
            around = 0 if job.special_tokens else len(template.prefix) + len(template.suffix)
            max_tokens = self._limit(job) + around
        sequences = await tokenizer.encode(inputs.texts, max_tokens, ends=job.keep_end)
        if not job.special_tokens:
            sequences = RaggedIds.of([template.strip(ids) for ids in sequences])
        self.check_ids(sequences, inputs.place)
        return sequences

    def _limit(self, job: EmbedJob) -> int:
        """Tokens that one input may have."""
        if job.max_tokens is None:
            return self.limits.max_tokens
        return min(self.limits.max_tokens, job.max_tokens)

    def _fit(self, sequences: RaggedIds, job: EmbedJob) -> RaggedIds:
        """Refuse or cut what is too long: the one rule for every route."""
        limit, lengths = self._limit(job), sequences.lengths
        if max(lengths) <= limit:
            return sequences
        if not job.truncate:
            index = next(i for i, length in enumerate(lengths) if length > limit)
            raise ApiError(
                ErrorKind.INPUT_TOO_LONG,
                f"{job.inputs.place(index)} has {lengths[index]} tokens; this model takes at most"
                f" {limit} (send {job.cutting} to have it cut)",
                param=job.inputs.field(index),
            )
        template = _NO_TEMPLATE
        if isinstance(job.inputs, Texts) and job.special_tokens:
            template = self.tokenizer.special_tokens
        return RaggedIds.of([template.truncate(ids, limit, keep_end=job.keep_end) for ids in sequences])

    def _check_count(self, sequences: RaggedIds, job: EmbedJob) -> None:
        inputs, lengths = job.inputs, sequences.lengths
        if not all(lengths):
            index = lengths.index(0)
            raise invalid(f"{inputs.place(index)} has no tokens", inputs.field(index))
        self.check_total(len(sequences.flat), inputs.name, job.max_request_tokens)


def vectors_of(result: JobResult, dimensions: int, normalize: bool) -> Float32:
    """The vectors of `result`, cut and normalised; see `gateway.encoding.finish`."""
    return finish(result.vectors, dimensions, normalize, result.squares)


def max_tokens(info: EngineInfo) -> int:
    """Tokens one input may have: what the model takes, if a step takes that much."""
    return min(info.max_model_len, info.max_batch_tokens)

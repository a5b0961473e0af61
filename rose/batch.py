"""The contract between the scheduler and the engine: numpy only, no torch.

This and `rose.errors` are all that `gateway` and `scheduler` may see of `rose`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Final, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from rose.engine_info import EngineInfo as EngineInfo
from rose.engine_info import TokenOutput as TokenOutput

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Int8 = NDArray[np.int8]

NO_TOKEN_OUTPUTS: frozenset[TokenOutput] = frozenset()


class RaggedIds(Sequence[Int32]):
    """Sequences of ids, i32[n] each, laid end to end: what is done with all of them takes one call, not n.

    flat: i32[T]. lengths: of each sequence; they add up to T. offsets: where each begins in `flat`, from 0,
    and T. As a Sequence it gives views of `flat`, each made when it is asked for. Nobody may change `flat`.
    """

    __slots__ = ("flat", "lengths", "offsets")

    def __init__(self, flat: Int32, lengths: Iterable[int]) -> None:
        self.flat: Final = flat
        self.lengths: Final = tuple(lengths)
        # Most requests have one sequence: for these the general way takes twice as long.
        self.offsets: Final = (0, len(flat)) if len(self.lengths) == 1 else (0, *accumulate(self.lengths))

    @classmethod
    def of(cls, sequences: Sequence[Int32]) -> RaggedIds:
        """`sequences`, i32[n] each, in one block: a copy, unless there is but one or they lie so already."""
        if isinstance(sequences, RaggedIds):
            return sequences
        if len(sequences) == 1:
            return cls(sequences[0], (len(sequences[0]),))
        return cls(_end_to_end(sequences), map(len, sequences))

    @classmethod
    def join(cls, parts: Sequence[RaggedIds]) -> RaggedIds:
        """The sequences of all `parts`, in their order; of one part, itself."""
        if len(parts) == 1:
            return parts[0]
        lengths = chain.from_iterable(part.lengths for part in parts)
        return cls(_end_to_end([part.flat for part in parts]), lengths)

    def part(self, start: int, stop: int) -> RaggedIds:
        """Sequences `start` to `stop`, the latter not included, without a copy. 0 <= start <= stop <= n."""
        if stop - start == len(self.lengths):
            return self
        flat = self.flat[self.offsets[start] : self.offsets[stop]]
        return RaggedIds(flat, self.lengths[start:stop])

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Int32: ...
    @overload
    def __getitem__(self, index: slice) -> RaggedIds: ...
    def __getitem__(self, index: int | slice) -> Int32 | RaggedIds:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self.flat[self.offsets[places] : self.offsets[places + 1]]
        if places.step == 1:
            return self.part(places.start, max(places.start, places.stop))
        return RaggedIds.of([self[place] for place in places])

    def __iter__(self) -> Iterator[Int32]:
        return (self.flat[start:end] for start, end in pairwise(self.offsets))

    def __repr__(self) -> str:
        return f"<RaggedIds {len(self)} sequences, {len(self.flat)} ids>"


def _end_to_end(blocks: Sequence[Int32]) -> Int32:
    """i32[T] of all `blocks`; one alone is not copied."""
    if len(blocks) == 1:
        return blocks[0]
    return np.concatenate(blocks) if len(blocks) else np.zeros(0, np.int32)


# This and BatchResult are made for every step. The `__init__` that dataclass would make stays interpreted
# when the loop is compiled, and that of a frozen class sets each field by a call.
@dataclass(init=False, slots=True)
class RaggedBatch:
    """Sequences of any lengths laid end to end, without padding.

    input_ids: i32[T], every id in [0, vocab_size). One that is not, or a type that is not the model's: on the
        CPU `step` raises a StepError; on a device it counts as 0, and when the step is done the rows of its
        sequence are made NaN and named in BatchResult.non_finite. Other rows, and the engine, are as ever.
    cu_seqlens: i32[B+1], offsets into input_ids; cu_seqlens[0] == 0, cu_seqlens[B] == T, strictly rising.
    token_type_ids: i32[T] or None (all zero), for pairs given to BERT-like models.
    spans: i32[R, 2] or None: the tokens [start, end) that each row of the result is the mean of, each within
        one sequence; an empty one gives zeros. None: the sequences. Of models that pool by mean.
    token_outputs: what the result holds for each token, of the kinds in EngineInfo.token_outputs.
    Never changes.
    """

    input_ids: Int32
    cu_seqlens: Int32
    token_type_ids: Int32 | None
    spans: Int32 | None
    token_outputs: frozenset[TokenOutput]

    def __init__(
        self,
        input_ids: Int32,
        cu_seqlens: Int32,
        token_type_ids: Int32 | None = None,
        spans: Int32 | None = None,
        token_outputs: frozenset[TokenOutput] = NO_TOKEN_OUTPUTS,
    ) -> None:
        self.input_ids = input_ids
        self.cu_seqlens = cu_seqlens
        self.token_type_ids = token_type_ids
        self.spans = spans
        self.token_outputs = token_outputs

    @classmethod
    def pack(
        cls,
        sequences: Sequence[Int32],
        token_type_ids: Sequence[Int32 | None] | None = None,
        spans: Sequence[Int32 | None] | None = None,
        token_outputs: frozenset[TokenOutput] = NO_TOKEN_OUTPUTS,
    ) -> RaggedBatch:
        """Lay `sequences` (each i32[n], n >= 1) end to end. A missing row of types counts as zeros.

        spans: i32[k, 2] of each sequence, counted from its own start; None: the whole of it.
        One sequence alone is not copied, nor is a RaggedIds.
        """
        ids = RaggedIds.of(sequences)
        types: Int32 | None = None
        if token_type_ids is not None and any(row is not None for row in token_type_ids):
            rows = zip(ids.lengths, token_type_ids, strict=True)
            types = np.concatenate([np.zeros(n, np.int32) if row is None else row for n, row in rows])
        moved = None if spans is None else _moved_spans(spans, ids.offsets)
        return cls(ids.flat, np.array(ids.offsets, np.int32), types, moved, token_outputs)

    @property
    def num_seqs(self) -> int:
        """B, the number of sequences."""
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens of all sequences."""
        return len(self.input_ids)

    @property
    def num_rows(self) -> int:
        """R, the rows of the result: spans if there are any, else sequences."""
        return self.num_seqs if self.spans is None else len(self.spans)


def _moved_spans(spans: Sequence[Int32 | None], offsets: Sequence[int]) -> Int32:
    """i32[R, 2] of all sequences, counted from the start of the batch."""
    bounds = zip(spans, pairwise(offsets), strict=True)
    rows = [
        np.array([[start, end]], np.int32) if own is None else own + np.int32(start)
        for own, (start, end) in bounds
    ]
    return np.concatenate(rows)


@dataclass(init=False, slots=True)
class BatchResult:
    """What one step gives, a row a sequence or span, in the batch's order: R rows.

    vectors: f32[R, D], pooled, neither normalised nor cut to fewer dimensions; of scorers: raw logits.
    int8: i8[R, D] = round(tanh(vectors) * 127), half to even, of models that have this quantiser; else None.
    non_finite: rows whose vector holds a NaN or an infinity; they must not be served.
    squares: f32[R], each vector's sum of squares as fp32 gives it, which may be infinite; None: not known.
    tokens: f32[T, W] of each kind that the batch asks for, a row a token; W is EngineInfo's. They may hold a
        NaN or an infinity where the vectors hold none.

    All may be views of a page-locked slot; it is reused only when the last view of it is gone. Never changes.
    """

    vectors: Float32
    int8: Int8 | None
    non_finite: tuple[int, ...]
    squares: Float32 | None
    tokens: Mapping[TokenOutput, Float32]

    def __init__(
        self,
        vectors: Float32,
        int8: Int8 | None = None,
        non_finite: tuple[int, ...] = (),
        squares: Float32 | None = None,
        tokens: Mapping[TokenOutput, Float32] | None = None,
    ) -> None:
        self.vectors = vectors
        self.int8 = int8
        self.non_finite = non_finite
        self.squares = squares
        self.tokens = {} if tokens is None else tokens

    def rows(self, start: int, end: int) -> BatchResult:
        """Views of rows [start, end), without what tokens give."""
        int8, squares = self.int8, self.squares
        return BatchResult(
            self.vectors[start:end],
            None if int8 is None else int8[start:end],
            squares=None if squares is None else squares[start:end],
        )


class LazyTensor(Protocol):
    """The result of a step that may still be running. Await it on the event loop, or block on `result`."""

    @property
    def done(self) -> bool:
        """Whether `result` returns (or raises) without waiting. Cheap: a few microseconds."""
        ...

    def result(self) -> BatchResult:
        """Block until the step is done.

        Raises:
            rose.errors.StepError: this step failed; the engine still works.
            rose.errors.EngineDeadError: the engine can run no further step.
        """
        ...

    def __await__(self) -> Generator[object, None, BatchResult]:
        """As `result`, but suspends the running asyncio task instead of blocking."""
        ...


class Engine(Protocol):
    """Runs batches. Called from one thread (the loop's); never blocks on the device."""

    @property
    def info(self) -> EngineInfo:
        """The model's limits and outputs."""
        ...

    def step(self, batch: RaggedBatch) -> LazyTensor:
        """Launch `batch` and return at once. Steps run one after another, in the order of the calls.

        Raises:
            rose.errors.StepError: this step could not be launched; the engine still works.
            rose.errors.EngineDeadError: the engine can run no further step.
        """
        ...

    def stats(self) -> Mapping[str, object]:
        """Counters and the graph coverage, as plain JSON values; see `/info`."""
        ...

    def close(self) -> None:
        """Wait for what runs, then free threads, streams and page-locked memory. May be called twice."""
        ...

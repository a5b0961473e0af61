"""What a gateway sends to a replica and gets back: all that `Scheduler.run` takes and gives, as blocks.

Texts were tokenised and cut in the gateway; vectors are neither normalised nor cut here, but there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from gateway.errors import ApiError, ErrorKind, shown
from gateway.inputs import InputLimits, check_range, invalid, read_id_blocks
from gateway.pipeline import Embedded
from rose.batch import BatchResult, EngineInfo, Int32, RaggedIds, TokenOutput
from scheduler.admission import check_spans

PATH = "/v1/sequences"
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


class SequencesRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sequences of token ids as the engine takes them: int32 little-endian blocks, in JSON as base64.

    input_ids, lengths: all ids end to end, and how many each sequence has; without `lengths` it is one.
    token_type_ids: as many as ids. spans, span_counts: places [start, end) in a sequence whose means are
    wanted, end to end, and how many of them each sequence has; 0: its own vector.
    token_outputs: what is wanted of each token, as /info calls it under `model.token_outputs`.
    """

    input_ids: memoryview
    lengths: memoryview | None = None
    token_type_ids: memoryview | None = None
    spans: memoryview | None = None
    span_counts: memoryview | None = None
    token_outputs: list[str] | None = None


class SequencesResponse(msgspec.Struct, kw_only=True):
    """What the engine gave: a row a sequence or span, as it is.

    vectors: float32 of `shape`; of scorers the raw logits. int8: of models with their own quantiser.
    tokens: float32, a row a token, of what was asked for. queue_ms, inference_ms: times of the replica's.
    """

    object: str = "sequences"
    shape: tuple[int, int]
    vectors: memoryview
    int8: memoryview | msgspec.UnsetType = msgspec.UNSET
    tokens: dict[str, memoryview] | msgspec.UnsetType = msgspec.UNSET
    queue_ms: float
    inference_ms: float


class Asked(msgspec.Struct, frozen=True):
    """A request that was read; fields as those of `Scheduler.run`."""

    sequences: RaggedIds
    token_type_ids: RaggedIds | None
    spans: list[Int32 | None] | None
    token_outputs: frozenset[TokenOutput]


_ANSWERS = msgspec.msgpack.Decoder(SequencesResponse)


def ask(
    sequences: RaggedIds,
    token_type_ids: Sequence[Int32 | None] | None,
    spans: Sequence[Int32 | None] | None,
    token_outputs: frozenset[TokenOutput],
) -> bytes:
    """The body that asks for these; see `Scheduler.run`."""
    lengths = sequences.lengths
    request = SequencesRequest(input_ids=_block(sequences), token_outputs=sorted(token_outputs) or None)
    if len(lengths) > 1:
        request.lengths = np.array(lengths, _INT32).data
    if token_type_ids is not None and any(row is not None for row in token_type_ids):
        rows = zip(token_type_ids, lengths, strict=True)
        request.token_type_ids = _block([np.zeros(n, _INT32) if row is None else row for row, n in rows])
    if spans is not None and any(own is not None for own in spans):
        request.spans = _block([own.reshape(-1) for own in spans if own is not None])
        request.span_counts = np.array([0 if own is None else len(own) for own in spans], _INT32).data
    return msgspec.msgpack.encode(request)


def read(request: SequencesRequest, limits: InputLimits, info: EngineInfo) -> Asked:
    """What `request` asks for, checked.

    Raises:
        ApiError: INVALID_VALUE, INPUT_TOO_LONG or NOT_SUPPORTED.
    """
    sequences = read_id_blocks(request.input_ids, request.lengths, limits).sequences
    longest = max(sequences.lengths)
    if longest > limits.max_tokens:
        message = f"a sequence has {longest} tokens; this model takes at most {limits.max_tokens}"
        raise ApiError(ErrorKind.INPUT_TOO_LONG, message, param="lengths")
    return Asked(
        sequences,
        _types(request.token_type_ids, sequences, info),
        _spans(request, sequences, info),
        _token_outputs(request.token_outputs or [], info),
    )


def answer(embedded: Embedded) -> SequencesResponse:
    """The answer for what the pipeline gave."""
    response = SequencesResponse(
        shape=(embedded.vectors.shape[0], embedded.vectors.shape[1]),
        vectors=np.ascontiguousarray(embedded.vectors, _FLOAT32).data,
        queue_ms=embedded.queue_ms,
        inference_ms=embedded.inference_ms,
    )
    if embedded.int8 is not None:
        response.int8 = np.ascontiguousarray(embedded.int8).data
    if embedded.tokens is not None:
        response.tokens = {
            kind: np.ascontiguousarray(values, _FLOAT32).data
            for kind, values in embedded.tokens.values.items()
        }
    return response


def read_answer(body: bytes, num_rows: int, num_tokens: int, info: EngineInfo) -> BatchResult:
    """The rows in an answer, which has `num_rows` of them, and `num_tokens` of tokens. Copies of `body`.

    Raises:
        ValueError: it is no such answer.
    """
    response = _ANSWERS.decode(body)
    shape = (num_rows, info.dimensions)
    if tuple(response.shape) != shape:
        raise ValueError(f"rows of shape {list(response.shape)}, not {list(shape)}")
    int8 = response.int8
    if (int8 is not msgspec.UNSET) != info.has_int8:
        raise ValueError("int8 rows where there should be none, or none where there should be")
    tokens = {} if response.tokens is msgspec.UNSET else response.tokens
    widths = info.token_outputs
    kinds = cast(dict[TokenOutput, memoryview], tokens)
    return BatchResult(
        np.frombuffer(bytes(response.vectors), _FLOAT32).reshape(shape),
        None if int8 is msgspec.UNSET else np.frombuffer(bytes(int8), np.int8).reshape(shape),
        tokens={
            kind: np.frombuffer(bytes(values), _FLOAT32).reshape(num_tokens, widths[kind])
            for kind, values in kinds.items()
        },
    )


def _block(rows: Sequence[Int32]) -> memoryview:
    return np.ascontiguousarray(RaggedIds.of(rows).flat, _INT32).data


def _ints(block: memoryview, count: int, name: str) -> NDArray[np.int32]:
    if block.nbytes != 4 * count:
        raise invalid(f"{name} has {block.nbytes} bytes; it must hold {count} int32 values", name)
    return np.frombuffer(bytes(block), _INT32)


def _types(block: memoryview | None, sequences: RaggedIds, info: EngineInfo) -> RaggedIds | None:
    if block is None:
        return None
    if not info.type_vocab_size:
        message = f"model {info.model} has no token types"
        raise ApiError(ErrorKind.NOT_SUPPORTED, message, param="token_type_ids")
    types = _ints(block, len(sequences.flat), "token_type_ids")
    check_range(types, "token_type_ids", info.type_vocab_size)
    return RaggedIds(types, sequences.lengths)


def _spans(request: SequencesRequest, sequences: RaggedIds, info: EngineInfo) -> list[Int32 | None] | None:
    if request.spans is None and request.span_counts is None:
        return None
    if request.spans is None or request.span_counts is None:
        missing = "spans" if request.spans is None else "span_counts"
        raise invalid(f"{missing} is missing; spans and span_counts go together", missing)
    if info.task != "embed" or info.pooling != "mean":
        message = f"model {info.model} gives no means of spans"
        raise ApiError(ErrorKind.NOT_SUPPORTED, message, param="spans")
    counts = _ints(request.span_counts, len(sequences), "span_counts").tolist()
    if min(counts) < 0:
        raise invalid(f"span_counts has {min(counts)}; it must be 0 or more", "span_counts")
    offsets = [0, *accumulate(counts)]
    places = _ints(request.spans, 2 * offsets[-1], "spans").reshape(-1, 2)
    spans = [places[start:end] if end > start else None for start, end in pairwise(offsets)]
    try:
        check_spans(sequences, spans, info.max_batch_seqs)
    except ValueError as error:
        raise invalid(str(error), "spans") from None
    return spans


def _token_outputs(names: list[str], info: EngineInfo) -> frozenset[TokenOutput]:
    unknown = [name for name in names if name not in info.token_outputs]
    if unknown:
        message = f"model {info.model} gives no {shown(unknown[0])} of a token"
        raise ApiError(ErrorKind.NOT_SUPPORTED, message, param="token_outputs")
    return frozenset(cast(list[TokenOutput], names))

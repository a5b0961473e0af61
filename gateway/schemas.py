"""What clients send and get, as msgspec Structs, and how a body becomes one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

import msgspec

from gateway.body_values import check_values
from gateway.errors import ApiError, ErrorKind
from gateway.inputs import InputValue
from gateway.media import Media

S = TypeVar("S", bound=msgspec.Struct)


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """OpenAI's embeddings request and our extra fields. Unknown fields, `user` among them, are passed over.

    input: a string, strings, token ids, or lists of token ids (all items of one kind).
    input_ids, lengths: instead of `input`: int32 little-endian blocks, all ids end to end and how many of
        them each sequence has; without `lengths` they are one sequence. In JSON a block is a base64 string.
    model: a served name; None: the first of them.
    dimensions: leading values of each vector to keep; None: all.
    encoding_format: "float", "base64" or "bytes"; None: "float" in JSON, "bytes" in msgpack.
    normalize: whether vectors are L2-normalised; None: as the model's own files say.
    truncate: cut inputs that are too long instead of refusing them. truncation: Voyage's word for it.
    truncation_direction: what is cut: "right", the end (the default), or "left", the beginning.
    truncate_prompt_tokens: cut to so many tokens; -1: to what the model takes (vLLM's).
    add_special_tokens: False: text goes without the tokenizer's template.
    prompt, prompt_name, input_type: what goes before a text: verbatim, by the model's own name, or by task.
    embed_dtype: the values' type; output_dtype, output_dimension: Voyage's words for it and for dimensions.
    endianness: vLLM's; only "little" is there, which "native" is as well.
    modality: Infinity's; only "text" is there. With it, dimensions 0 are all dimensions.
    outputs: any of "dense", "sparse" and "multi_vector", from one pass; None: dense vectors.
    """

    input: InputValue | None = None
    input_ids: memoryview | None = None
    lengths: memoryview | None = None
    model: str | None = None
    dimensions: int | None = None
    encoding_format: str | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    truncation: bool | None = None
    truncation_direction: str | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    embed_dtype: str | None = None
    output_dtype: str | None = None
    output_dimension: int | None = None
    endianness: str | None = None
    modality: str | None = None
    outputs: list[str] | None = None

    @property
    def dimensions_name(self) -> str:
        """Which of the two names of `dimensions` the request has."""
        voyage = self.dimensions is None and self.output_dimension is not None
        return "output_dimension" if voyage else "dimensions"


class Usage(msgspec.Struct):
    """Tokens really processed: special tokens included, tokens cut off excluded."""

    prompt_tokens: int
    total_tokens: int


class SparseVector(msgspec.Struct, kw_only=True):
    """The words of one text: ids of the vocabulary, rising, and what each weighs."""

    indices: list[int]
    values: list[float] | msgspec.Raw


Written: TypeAlias = memoryview | str | list[float] | msgspec.Raw


class EmbeddingItem(msgspec.Struct, kw_only=True):
    """One vector: a list of numbers, or the base64 of its little-endian bytes.

    The encoder writes a memoryview as base64 in JSON; Raw holds what is encoded already. What is not asked
    for is not there. multi_vector: a vector a token, as lists or the base64 of [tokens, dimensions], its
    shape beside it.
    """

    object: str = "embedding"
    index: int
    embedding: Written | msgspec.UnsetType = msgspec.UNSET
    sparse: SparseVector | msgspec.UnsetType = msgspec.UNSET
    multi_vector: Written | list[list[float]] | msgspec.UnsetType = msgspec.UNSET
    multi_vector_shape: tuple[int, int] | msgspec.UnsetType = msgspec.UNSET


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    """OpenAI's embeddings answer; `data` holds encoded EmbeddingItems."""

    object: str = "list"
    data: list[msgspec.Raw]
    model: str
    usage: Usage


class SparseBlock(msgspec.Struct, kw_only=True):
    """All texts' words: indices i32[k], values f32[k]; text i has those of offsets[i:i+2], i32[n+1]."""

    offsets: memoryview
    indices: memoryview
    values: memoryview


class TokenBlock(msgspec.Struct, kw_only=True):
    """Vectors of all texts' tokens, row after row; text i has those of offsets[i:i+2], i32[n+1].

    shape: (number of vectors, dimensions).
    """

    shape: tuple[int, int]
    offsets: memoryview
    vectors: memoryview


class TokenEmbeddings(msgspec.Struct, kw_only=True):
    """The msgpack answer of /embed_all."""

    object: str = "token_embeddings"
    model: str
    dtype: str = "float32"
    tokens: TokenBlock
    usage: Usage


class EmbeddingBlock(msgspec.Struct, kw_only=True):
    """The msgpack answer: all vectors in one binary block, row after row.

    embeddings: little-endian values of `dtype`, in C order. shape: (number of vectors, dimensions).
    sparse, multi_vector: where asked for; dtype is that of multi_vector, too. Without dense vectors shape and
    embeddings are not there.
    """

    object: str = "embeddings"
    model: str
    dtype: str = "float32"
    shape: tuple[int, int] | msgspec.UnsetType = msgspec.UNSET
    embeddings: memoryview | msgspec.UnsetType = msgspec.UNSET
    sparse: SparseBlock | msgspec.UnsetType = msgspec.UNSET
    multi_vector: TokenBlock | msgspec.UnsetType = msgspec.UNSET
    usage: Usage


class Model(msgspec.Struct, kw_only=True):
    """One entry of GET /v1/models. created: Unix seconds; max_model_len: tokens an input may have."""

    id: str
    object: str = "model"
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """The answer of GET /v1/models."""

    object: str = "list"
    data: list[Model]


class Status(msgspec.Struct, kw_only=True):
    """The answer of /health and /ready."""

    status: str


Encodable: TypeAlias = msgspec.Struct | Mapping[str, object] | Sequence[object]

_PAIR = rb"\ud83d\ude00"
_JSON = msgspec.json.Encoder()
_MSGPACK = msgspec.msgpack.Encoder()


@lru_cache(maxsize=64)
def _decoder(kind: type[S], media: Media) -> msgspec.json.Decoder[S] | msgspec.msgpack.Decoder[S]:
    return msgspec.json.Decoder(kind) if media is Media.JSON else msgspec.msgpack.Decoder(kind)


def decode(kind: type[S], body: bytes, media: Media) -> S:
    """Read `body` as `kind`. Blocks are views of `body`.

    Raises:
        ApiError: INVALID_BODY, with the byte or the field at fault.
    """
    check_values(body, media)
    try:
        decoded: S = _decoder(kind, media).decode(body)
        return decoded
    except msgspec.ValidationError as error:
        raise ApiError(ErrorKind.INVALID_BODY, str(error), param=_field(str(error))) from None
    except msgspec.DecodeError as error:
        raise ApiError(ErrorKind.INVALID_BODY, _told(str(error), kind, body, media)) from None
    except RecursionError:
        raise ApiError(ErrorKind.INVALID_BODY, "the body is nested too deeply") from None


def encode(value: Encodable, media: Media) -> bytes:
    """Write `value` in the codec `media`."""
    return _JSON.encode(value) if media is Media.JSON else _MSGPACK.encode(value)


def _told(message: str, kind: type[S], body: bytes, media: Media) -> str:
    """msgspec's message with a place in it."""
    if media is Media.JSON and b"\\u" in body[1 - len(_PAIR) :]:
        # Where a pair would not fit in front of the end, half of one is "truncated" for msgspec.
        try:
            _decoder(kind, media).decode(body + b" " * len(_PAIR))
        except msgspec.DecodeError as error:
            message = str(error) if "surrogate" in str(error) else message
    return message if "(byte " in message else f"{message} (in a body of {len(body)} bytes)"


def _field(message: str) -> str | None:
    """The top field that msgspec's message names: "... - at `$.input[2]`" gives "input"."""
    _, found, path = message.rpartition("`$.")
    return path.partition("`")[0].partition("[")[0].partition(".")[0] if found else None

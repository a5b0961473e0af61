"""The body of an error in each dialect, side by side: an error has the same words and code in all of them."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Literal, TypeAlias

import msgspec

from gateway.errors import ApiError, ErrorKind, ErrorShape


class OpenAIErrorBody(msgspec.Struct):
    """OpenAI's inner error object."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(msgspec.Struct):
    """OpenAI's nested error. vLLM, Infinity and our own routes use it too."""

    error: OpenAIErrorBody


class PerplexityErrorItem(msgspec.Struct):
    """One thing that is wrong: where (`["body", field]`), in words, and as a code."""

    loc: list[str]
    msg: str
    type: str


class PerplexityError(msgspec.Struct):
    """FastAPI's list of what is wrong; ours has one item."""

    detail: list[PerplexityErrorItem]


TEIErrorType: TypeAlias = Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer"]


class TEIError(msgspec.Struct):
    """TEI's flat error."""

    error: str
    error_type: TEIErrorType


class CohereError(msgspec.Struct):
    """Cohere's message."""

    message: str


class JinaError(msgspec.Struct):
    """Jina's and Voyage's message."""

    detail: str


# Where TEI has a word of its own; what else a client did wrong is "Validation", what we did "Backend".
_TEI_TYPES: dict[ErrorKind, TEIErrorType] = {
    ErrorKind.TEXT_NOT_SUPPORTED: "Tokenizer",
    ErrorKind.NOT_SUPPORTED: "Backend",
    ErrorKind.OVERLOADED: "Overloaded",
    ErrorKind.DEADLINE_EXPIRED: "Overloaded",
    ErrorKind.UNKNOWN_TRANSFER_CODING: "Validation",
    ErrorKind.UNAVAILABLE: "Unhealthy",
}


def error_body(error: ApiError, shape: ErrorShape = ErrorShape.OPENAI) -> msgspec.Struct:
    """The body of the answer for `error` in the dialect `shape`."""
    return _BODIES[shape](error)


def _openai(error: ApiError) -> OpenAIError:
    return OpenAIError(OpenAIErrorBody(error.message, error.kind.type, error.param, error.kind.code))


def _perplexity(error: ApiError) -> PerplexityError:
    loc = ["body"] if error.param is None else ["body", error.param]
    return PerplexityError([PerplexityErrorItem(loc, error.message, error.kind.code)])


def _tei(error: ApiError) -> TEIError:
    told = _TEI_TYPES.get(error.kind)
    if told is None:
        told = "Backend" if error.kind.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "Validation"
    return TEIError(error.message, told)


_BODIES: dict[ErrorShape, Callable[[ApiError], msgspec.Struct]] = {
    ErrorShape.OPENAI: _openai,
    ErrorShape.PERPLEXITY: _perplexity,
    ErrorShape.TEI: _tei,
    ErrorShape.COHERE: lambda error: CohereError(error.message),
    ErrorShape.JINA: lambda error: JinaError(error.message),
}
# What the API description lists.
ERROR_STRUCTS: dict[ErrorShape, type[msgspec.Struct]] = {
    ErrorShape.OPENAI: OpenAIError,
    ErrorShape.PERPLEXITY: PerplexityError,
    ErrorShape.TEI: TEIError,
    ErrorShape.COHERE: CohereError,
    ErrorShape.JINA: JinaError,
}

"""The body of an error in each dialect, side by side: an error has the same words and code in all of them."""

from __future__ import annotations

from collections.abc import Callable

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


class TEIError(msgspec.Struct):
    """TEI's flat error. error_type: one of TEI's words, in lower case, or our own code."""

    error: str
    error_type: str


class CohereError(msgspec.Struct):
    """Cohere's message."""

    message: str


class JinaError(msgspec.Struct):
    """Jina's and Voyage's message."""

    detail: str


# TEI's own words for what it knows; other kinds go by our code.
_TEI_TYPES = {
    ErrorKind.INVALID_BODY: "validation",
    ErrorKind.INVALID_VALUE: "validation",
    ErrorKind.INPUT_TOO_LONG: "validation",
    ErrorKind.TEXT_NOT_SUPPORTED: "tokenizer",
    ErrorKind.OVERLOADED: "overloaded",
    ErrorKind.INTERNAL: "backend",
    ErrorKind.INFERENCE_FAILED: "backend",
    ErrorKind.NON_FINITE_OUTPUT: "backend",
    ErrorKind.OUT_OF_MEMORY: "backend",
    ErrorKind.UNAVAILABLE: "unhealthy",
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
    return TEIError(error.message, _TEI_TYPES.get(error.kind, error.kind.code))


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

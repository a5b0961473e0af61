"""The closed set of errors an HTTP client can get. The only file that knows a status code."""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from scheduler.errors import (
    DeadlineExpired,
    Draining,
    EngineDead,
    NoReplica,
    QueueFull,
    StepFailed,
    StepOutOfMemory,
)

INTERNAL_MESSAGE = "internal error; the server's log has the details"
_MAX_QUOTED = 100

log = logging.getLogger(__name__)


class ErrorKind(enum.Enum):
    """What went wrong: (HTTP status, OpenAI `type`, OpenAI `code`)."""

    INVALID_HTTP = (HTTPStatus.BAD_REQUEST, "invalid_request_error", "invalid_http")
    INVALID_BODY = (HTTPStatus.BAD_REQUEST, "invalid_request_error", "invalid_body")
    INVALID_VALUE = (HTTPStatus.BAD_REQUEST, "invalid_request_error", "invalid_value")
    INPUT_TOO_LONG = (HTTPStatus.BAD_REQUEST, "invalid_request_error", "context_length_exceeded")
    TEXT_NOT_SUPPORTED = (HTTPStatus.BAD_REQUEST, "invalid_request_error", "text_not_supported")
    NOT_SUPPORTED = (HTTPStatus.BAD_REQUEST, "invalid_request_error", "not_supported")
    INVALID_API_KEY = (HTTPStatus.UNAUTHORIZED, "invalid_request_error", "invalid_api_key")
    NOT_FOUND = (HTTPStatus.NOT_FOUND, "invalid_request_error", "not_found")
    MODEL_NOT_FOUND = (HTTPStatus.NOT_FOUND, "invalid_request_error", "model_not_found")
    METHOD_NOT_ALLOWED = (HTTPStatus.METHOD_NOT_ALLOWED, "invalid_request_error", "method_not_allowed")
    HEAD_TIMEOUT = (HTTPStatus.REQUEST_TIMEOUT, "timeout_error", "head_timeout")
    BODY_TIMEOUT = (HTTPStatus.REQUEST_TIMEOUT, "timeout_error", "body_timeout")
    BODY_TOO_LARGE = (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "invalid_request_error", "body_too_large")
    UNSUPPORTED_MEDIA_TYPE = (
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        "invalid_request_error",
        "unsupported_media_type",
    )
    EXPECTATION_FAILED = (HTTPStatus.EXPECTATION_FAILED, "invalid_request_error", "expectation_failed")
    OVERLOADED = (HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", "overloaded")
    INTERNAL = (HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", "internal_error")
    UNKNOWN_TRANSFER_CODING = (
        HTTPStatus.NOT_IMPLEMENTED,
        "invalid_request_error",
        "unknown_transfer_coding",
    )
    INFERENCE_FAILED = (HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", "inference_failed")
    NON_FINITE_OUTPUT = (HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", "non_finite_output")
    OUT_OF_MEMORY = (HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "out_of_memory")
    UNAVAILABLE = (HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "unavailable")
    DEADLINE_EXPIRED = (HTTPStatus.GATEWAY_TIMEOUT, "timeout_error", "deadline_expired")

    @property
    def status(self) -> HTTPStatus:
        """The HTTP status of an answer of this kind, outside the dialects that say 422 for 400."""
        return self.value[0]

    @property
    def type(self) -> str:
        """OpenAI's `type`: who is to blame."""
        return self.value[1]

    @property
    def code(self) -> str:
        """OpenAI's `code`: what happened. No two kinds share one."""
        return self.value[2]


class ErrorShape(enum.Enum):
    """How a dialect writes an error; `gateway.error_bodies` has the bodies. The value: what docs call it."""

    OPENAI = "OpenAI"
    PERPLEXITY = "Perplexity"
    TEI = "TEI"
    COHERE = "Cohere"
    JINA = "Jina"

    def status(self, kind: ErrorKind) -> HTTPStatus:
        """The status of `kind` in this dialect: the same everywhere, but for what is wrong with a request."""
        if kind.status is HTTPStatus.BAD_REQUEST and self in _UNPROCESSABLE:
            return HTTPStatus.UNPROCESSABLE_ENTITY
        return kind.status


# The dialects whose servers answer 422 where others answer 400.
_UNPROCESSABLE = {ErrorShape.PERPLEXITY, ErrorShape.TEI}


class ApiError(Exception):
    """A refusal or failure, with the words its client reads.

    param: the request's field at fault, if one is. headers: extra headers of the answer.
    closes: the connection closes after the answer, so that a client reconnects elsewhere.
    shape: the dialect, where the request and not the route decides it; None: the route's own.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.headers = headers
        self.closes = closes
        self.shape: ErrorShape | None = None


def shown(value: str) -> str:
    """A client's own words as a message quotes them: a long value is cut."""
    return repr(value) if len(value) <= _MAX_QUOTED else f"{value[:_MAX_QUOTED]!r}..."


def _shaped(error: ApiError, shape: ErrorShape) -> ApiError:
    """`error`, told in `shape`. A name for it where it is raised would be a cycle: see Door."""
    error.shape = shape
    return error


@contextmanager
def speaking(shape: ErrorShape) -> Iterator[None]:
    """What goes wrong inside is told in `shape`, whatever the route's own dialect is."""
    try:
        yield
    except ApiError as error:
        error.shape = shape
        raise
    except Exception as error:
        raise _shaped(from_exception(error), shape) from error


def from_exception(error: Exception) -> ApiError:
    """What the client is told of `error`: the one seam between the scheduler's errors and HTTP.

    What has no place in the set is a defect of ours: it is logged with its traceback and not told.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(ErrorKind.OVERLOADED, str(error), headers=retry_headers(error.retry_after_s))
    if isinstance(error, NoReplica):
        return ApiError(ErrorKind.UNAVAILABLE, str(error), headers=retry_headers(error.retry_after_s))
    if isinstance(error, DeadlineExpired):
        return ApiError(ErrorKind.DEADLINE_EXPIRED, str(error))
    if isinstance(error, StepOutOfMemory):
        return ApiError(ErrorKind.OUT_OF_MEMORY, str(error))
    if isinstance(error, StepFailed):
        return ApiError(ErrorKind.INFERENCE_FAILED, str(error))
    if isinstance(error, EngineDead | Draining):
        return ApiError(ErrorKind.UNAVAILABLE, str(error), closes=True)
    log.error("a request failed inside the gateway", exc_info=error)
    return ApiError(ErrorKind.INTERNAL, INTERNAL_MESSAGE)


def retry_headers(retry_after_s: float) -> tuple[tuple[str, str], ...]:
    """Whole seconds as RFC 9110 wants them, and OpenAI's finer header, which its clients read first."""
    milliseconds = max(1, math.ceil(retry_after_s * 1e3))
    return (("Retry-After", str(math.ceil(milliseconds / 1e3))), ("retry-after-ms", str(milliseconds)))

"""What reaches no route, told in our words: other targets than paths, expectations, and what is no HTTP.

aiohttp answers these by itself, in plain text.
"""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11

from gateway.errors import INTERNAL_MESSAGE, ApiError, ErrorKind, ErrorShape, shown
from gateway.exchange import REQUEST_ID, SERVER, refuse, request_id
from gateway.metrics import ELSEWHERE, GatewayMetrics

_METHODS = "GET, HEAD, POST, OPTIONS"


class Strays:
    """Answers them, and counts them as elsewhere. shapes: in which dialect the errors of a path are told."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self.shapes: dict[str, ErrorShape] = {}

    def translated(self, request: web.BaseRequest, raised: web.HTTPException) -> web.Response:
        """Our answer in place of the one that aiohttp raised."""
        if request.method == hdrs.METH_OPTIONS and request.path == "*":  # asks for the server's methods
            return allowed(request, _METHODS)
        if request.method == hdrs.METH_CONNECT:  # what follows is no HTTP for us
            error = ApiError(
                ErrorKind.METHOD_NOT_ALLOWED,
                "this server is no proxy: it takes no CONNECT",
                headers=((str(hdrs.ALLOW), _METHODS),),
                closes=True,
            )
        elif raised.status == HTTPStatus.NOT_FOUND:
            error = ApiError(ErrorKind.NOT_FOUND, f"there is nothing at {request.path or 'an empty path'}")
        else:
            error = ApiError(ErrorKind.INVALID_HTTP, raised.reason)
        return self._refuse(request, error)

    async def expectation(self, request: web.Request) -> web.Response | None:
        """Do what `Expect` asks for, or refuse. aiohttp's own refusal fails on a header that is no ASCII."""
        expected = request.headers[hdrs.EXPECT]
        if request.version < HttpVersion11:  # RFC 9110, 10.1.1
            return None
        if expected.lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # nothing of the answer is sent yet
            return None
        words = f"Expect is {shown(expected)}; this server knows 100-continue"
        error = ApiError(ErrorKind.EXPECTATION_FAILED, words, closes=True)
        error.shape = self.shapes.get(request.path)
        return self._refuse(request, error)

    def broken(self, request: web.BaseRequest, status: int, message: str | None) -> web.Response:
        """The answer to what is no HTTP, or for what broke in an unforeseen place; the connection closes."""
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return self._refuse(request, ApiError(ErrorKind.INTERNAL, INTERNAL_MESSAGE, closes=True))
        if status == HTTPStatus.REQUEST_TIMEOUT:
            return self._refuse(request, ApiError(ErrorKind.HEAD_TIMEOUT, str(message), closes=True))
        words = f"this is no HTTP request: {shown(' '.join(str(message).split()))}"
        return self._refuse(request, ApiError(ErrorKind.INVALID_HTTP, words, closes=True))

    def _refuse(self, request: web.BaseRequest, error: ApiError) -> web.Response:
        self._metrics.count_error(error.kind)
        response = refuse(request, error)
        if error.closes:  # said to all: what could not be read counts as HTTP/1.0 for aiohttp
            response.headers[hdrs.CONNECTION] = "close"
        self._metrics.route(ELSEWHERE).answered(response.status, 0.0)  # nothing was waited for
        return response


def allowed(request: web.BaseRequest, methods: str) -> web.Response:
    """The answer to OPTIONS."""
    asked = request_id(request.headers.get(REQUEST_ID))
    headers = {hdrs.ALLOW: methods, REQUEST_ID: asked, hdrs.SERVER: SERVER}
    return web.Response(status=HTTPStatus.NO_CONTENT, headers=headers)


STRAYS = web.AppKey("strays", Strays)

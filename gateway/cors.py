"""Cross-origin requests from browsers. Costs nothing where it is not switched on.

Source: https://fetch.spec.whatwg.org/#http-cors-protocol
"""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import hdrs, web

ANY = "*"
# Authorization must be named: a wildcard does not cover it.
_REQUEST_HEADERS = (
    "Authorization, Content-Type, Content-Encoding, Accept, x-request-id, x-request-timeout-ms, "
    "traceparent, tracestate"
)
_ANSWER_HEADERS = (
    "x-request-id, x-total-time, x-queue-time, x-tokenization-time, x-inference-time, x-compute-tokens, "
    "x-embedding-shape, x-embedding-dtype, x-prompt-tokens, traceparent, Retry-After, retry-after-ms"
)
_PREFLIGHT_S = "86400"


def allow_origins(app: web.Application, origins: Iterable[str]) -> None:
    """Let pages of `origins` ("https://host", or "*" for all) use `app`. Keys are asked for as before."""
    allowed = frozenset(origins)

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get(hdrs.ORIGIN)
        if ANY not in allowed:
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)  # so that caches keep the answers apart
        if origin is None or not (ANY in allowed or origin in allowed):
            return
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = ANY if ANY in allowed else origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _ANSWER_HEADERS
        if request.method == hdrs.METH_OPTIONS and hdrs.ALLOW in response.headers:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_METHODS] = response.headers[hdrs.ALLOW]
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = _REQUEST_HEADERS
            response.headers[hdrs.ACCESS_CONTROL_MAX_AGE] = _PREFLIGHT_S

    app.on_response_prepare.append(add_headers)

"""The page's own files, from the package: read once, told apart by a tag, fenced in by a strict policy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files

from aiohttp import hdrs

from gateway.exchange import Answer

_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE = "index.html"
# Nothing but the server's own files runs, shows or is asked; nobody may frame the page.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
# A browser asks each time whether its copy is current: a server that was replaced is seen at once.
_HEADERS = (
    (str(hdrs.CACHE_CONTROL), "no-cache"),
    ("Content-Security-Policy", _POLICY),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
)


@cache
def names() -> tuple[str, ...]:
    """Of the files that the page needs besides itself."""
    found = (entry.name for entry in files("gateway.web").joinpath("static").iterdir())
    return tuple(sorted(name for name in found if name != PAGE))


def file(name: str) -> Callable[[Mapping[str, str]], Answer]:
    """What answers for one file: of a request's headers, the file, or 304 to who has it."""

    @cache
    def read() -> tuple[Answer, Answer]:
        body = files("gateway.web").joinpath("static", name).read_bytes()
        tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
        kind = f"{_TYPES[name[name.rindex('.') :]]}; charset=utf-8"
        headers = (*_HEADERS, (str(hdrs.ETAG), tag))
        return Answer(body, kind, headers), Answer(b"", kind, headers, status=304)

    def answer(headers: Mapping[str, str]) -> Answer:
        whole, unchanged = read()
        tag = next(value for header, value in whole.headers if header == hdrs.ETAG)
        given = headers.get(hdrs.IF_NONE_MATCH, "")
        return unchanged if tag in given or given.strip() == "*" else whole

    return answer

"""Which of the two codecs a body is in, and which one the answer takes."""

from __future__ import annotations

import enum
from functools import lru_cache


class Media(enum.Enum):
    """A codec; the value is the Content-Type of an answer."""

    JSON = "application/json"
    MSGPACK = "application/msgpack"


_BY_TYPE = {
    "application/json": Media.JSON,
    "application/msgpack": Media.MSGPACK,
    "application/x-msgpack": Media.MSGPACK,
    "application/vnd.msgpack": Media.MSGPACK,
}
_WILDCARDS = ("*/*", "application/*")


@lru_cache(maxsize=256)
def request_media(content_type: str | None) -> Media | None:
    """The codec of a body, from its Content-Type; a missing one counts as JSON. None: neither codec."""
    if content_type is None:
        return Media.JSON
    return _BY_TYPE.get(content_type.partition(";")[0].strip().lower())


@lru_cache(maxsize=256)
def answer_media(accept: str | None, asked_in: Media) -> Media:
    """The codec of the answer: the one that Accept prefers, else the request's own.

    A wildcard means the request's own; an Accept that names neither codec is not refused.
    """
    if not accept:
        return asked_in
    weights = _weights(accept)
    own = weights.get(asked_in, weights.get(None, 0.0))
    other = Media.MSGPACK if asked_in is Media.JSON else Media.JSON
    return other if weights.get(other, 0.0) > own else asked_in


def _weights(accept: str) -> dict[Media | None, float]:
    """q-values of an Accept header by codec; None stands for a wildcard."""
    weights: dict[Media | None, float] = {}
    for part in accept.split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        media = _BY_TYPE.get(name)
        if media is not None or name in _WILDCARDS:
            weights[media] = max(weights.get(media, 0.0), _q_value(parameters))
    return weights


def _q_value(parameters: list[str]) -> float:
    """1 unless stated; what is no number counts as 0."""
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0

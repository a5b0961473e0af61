"""How long chunks take, by their size: what one replica's times are compared with."""

from __future__ import annotations

from collections import deque

_LATELY = 32


class ChunkTimes:
    """Seconds that chunks of about so many tokens take at all replicas, lately.

    By size, since a chunk of 8 tokens takes a hundred times as long a token as one of 4096: a replica that
    happened to get small ones would look slow. Medians, since one chunk that met a busy machine says nothing.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def observe(self, num_tokens: int, seconds: float) -> float:
        """A chunk took so long; what such chunks take."""
        lately = self._seconds.setdefault(num_tokens.bit_length(), deque(maxlen=_LATELY))
        lately.append(seconds)
        return median(lately)


def median(values: deque[float]) -> float:
    """The value in the middle, or the higher of two."""
    return sorted(values)[len(values) // 2]

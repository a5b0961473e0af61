"""How long chunks take, by their size: what one replica's times are compared with."""

from __future__ import annotations

# So much of an expectation, and of a replica's own times, is left after each chunk: the last ten count.
MEMORY = 0.9


class ChunkTimes:
    """Seconds that chunks of about so many tokens take at all replicas, lately.

    By size, since a chunk of 8 tokens takes a hundred times as long a token as one of 4096: a replica that
    happened to get small ones would look slow.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def expected(self, num_tokens: int) -> float | None:
        """Seconds for a chunk of this size; None: there was none."""
        return self._seconds.get(num_tokens.bit_length())

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A chunk took so long."""
        size = num_tokens.bit_length()
        self._seconds[size] = MEMORY * self._seconds.get(size, seconds) + (1 - MEMORY) * seconds

"""How a chunk can end at a replica, other than with rows. The balancer decides what becomes of it."""

from __future__ import annotations


class ReplicaError(Exception):
    """Base of the set; the message says what happened, not where."""


class NotSent(ReplicaError):  # noqa: N818, the names say what happened
    """There is no connection to be had: the replica has seen nothing of the chunk."""


class Lost(ReplicaError):  # noqa: N818
    """The connection broke, or what came back was no answer: the chunk may run again elsewhere."""


class Unavailable(ReplicaError):  # noqa: N818
    """It answered 503. retry_after_s: when to ask again. out_of_memory: its device had too little memory."""

    def __init__(self, message: str, retry_after_s: float, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.out_of_memory = out_of_memory


class Busy(ReplicaError):  # noqa: N818
    """It answered 429: others keep it busy. retry_after_s: when it wants to be asked again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Expired(ReplicaError):  # noqa: N818
    """It answered 504: the deadline passed before the chunk was started."""


class Rejected(ReplicaError):  # noqa: N818
    """It answered 500 or a 4xx: what is wrong is the chunk, which would fare no better elsewhere."""

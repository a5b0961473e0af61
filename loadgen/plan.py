"""What a run consists of: targets, cases, their streams of requests, and the bounds of it all."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class LoadgenError(Exception):
    """The run cannot be done as asked. The message is one line for whoever started it."""


@dataclass(frozen=True)
class Target:
    """A server. name: "A", "B", … in the order of --url. model: None for one that needs no name."""

    name: str
    host: str
    port: int
    api: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)

    @property
    def netloc(self) -> str:
        """host:port as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://{self.netloc}"


@dataclass(frozen=True)
class Shape:
    """What one request holds: `batch` sequences of `low` to `high` tokens each, both included."""

    batch: int
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.batch}×{self.low}" + (f"–{self.high}" if self.high != self.low else "")


@dataclass(frozen=True)
class Source:
    """Where the inputs come from.

    Without a corpus they are random token ids, with exact lengths. With one they are text, which the server
    tokenises; `tokenizer` (a tokenizer.json) then makes their lengths exact, else words are counted.
    """

    vocab_size: int
    seed: int = 0
    corpus: Path | None = None
    tokenizer: Path | None = None

    @property
    def is_text(self) -> bool:
        """Whether text is sent."""
        return self.corpus is not None


class Pacing(Enum):
    """When requests are sent."""

    CLOSED = "closed"
    POISSON = "poisson"
    CONSTANT = "constant"
    TRACE = "trace"


@dataclass(frozen=True)
class Stream:
    """Requests of one kind. processes: clients it is spread over.

    in_flight: of a closed loop, in each process. rate: requests a second of an open loop, over all processes;
    load: instead of it, a share of what the server can do at most. trace: file of a TRACE. polls: its clients
    do not sleep, but ask their sockets all the while.
    """

    shape: Shape
    name: str = "requests"
    pacing: Pacing = Pacing.CLOSED
    in_flight: int = 1
    rate: float = 0.0
    load: float | None = None
    processes: int = 1
    trace: Path | None = None
    polls: bool = False

    @property
    def is_open(self) -> bool:
        """Whether requests are sent at their own times, whatever the server does."""
        return self.pacing is not Pacing.CLOSED


@dataclass(frozen=True)
class Limits:
    """When a case is warm and when it has been measured. Both end by count and time, and always by time.

    warmup_requests, warmup_s: a closed loop is warm after both and once its rate has settled, or after
    max_warmup_s. requests: to measure then, for at least min_s and at most max_s (an open loop: for max_s).
    timeout_s: of one request.
    """

    warmup_requests: int = 50
    warmup_s: float = 2.0
    max_warmup_s: float = 20.0
    requests: int = 1000
    min_s: float = 3.0
    max_s: float = 30.0
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Case:
    """One line of the report: streams that run side by side.

    alone: measure first what the client reaches by itself at this load; for more than any server may do.
    """

    suite: str
    name: str
    streams: tuple[Stream, ...]
    limits: Limits
    alone: bool = False

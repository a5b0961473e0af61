"""Decides for every step whether it runs eagerly, is captured, or is replayed. Knows neither CUDA nor torch.

A shape's first hit runs eagerly, which loads and compiles its kernels. Its second is captured and replayed,
later ones replayed. What cannot be captured runs eagerly for ever.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from rose.batch import TokenOutput
from rose.buckets import sequence_buckets, token_buckets
from rose.progress import Bar

log = logging.getLogger(__name__)

# When the cache is full, a shape must be hit this often before it may push out another. Without this, a cycle
# of one shape more than fits would capture (some 30 ms each) at every other step and never replay.
ADMIT_HITS = 8
# After a failed capture a shape is tried again when it ran eagerly so often, then when twice as often, and so
# on: what failed may have been a passing lack of memory, or may fail at every try.
RETRY_HITS = 64
# Of the time, for captures while many wait.
HURRIED_SHARE = 0.2

Work = TypeVar("Work")
WorkContra = TypeVar("WorkContra", contravariant=True)


class GraphKey(NamedTuple):
    """One shape: token bucket, sequence bucket, the attention backend's name, whether rows are spans.

    tokens: the kinds of token outputs that are wanted, in alphabetical order; see `rose.batch.TokenOutput`.
    longest: what kernels are told, eagerly and in a graph, is the most tokens of a sequence; of all that fit
        into the bucket, or a power of two where kernels do work in proportion to it.
    """

    num_tokens: int
    num_seqs: int
    attention: str
    spans: bool = False
    tokens: tuple[TokenOutput, ...] = ()
    longest: int = 0


class CaptureError(Exception):
    """This shape was not captured; the device still works."""


class Graph(Protocol):
    """A captured forward. nbytes: device memory it holds."""

    @property
    def nbytes(self) -> int:
        """Device memory in bytes."""
        ...

    def launch(self) -> None:
        """Enqueue one replay."""
        ...

    def close(self) -> None:
        """Give it up; the device may defer this until replays in flight are done."""
        ...


class GraphDevice(Protocol[WorkContra]):
    """What runs forwards. `work` is what one step needs beside its shape."""

    def run(self, key: GraphKey, work: WorkContra) -> None:
        """Enqueue the forward eagerly."""
        ...

    def capture(self, key: GraphKey, work: WorkContra) -> Graph:
        """Record the forward without running it.

        Raises:
            CaptureError: it was not captured, for want of memory or because it cannot be.
        """
        ...

    def capturable(self, key: GraphKey) -> bool:
        """Whether trying makes sense."""
        ...


class Execution(enum.Enum):
    """How a step was enqueued."""

    COLD = "cold"
    EAGER = "eager"
    CAPTURED = "captured"
    REPLAYED = "replayed"


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """mode: EngineOptions.capture. max_tokens: no graph above. max_graphs, max_bytes: kept at most."""

    mode: Literal["off", "lazy", "all"]
    max_tokens: int
    max_graphs: int
    max_bytes: int


@dataclass(slots=True)
class Entry:
    """What is known of one shape.

    misses: eager runs since it was first seen or last evicted. failures: captures that failed in a row.
    put_off: no capture before there are more misses. used: the replay that was its last, of all.
    replayed: how often it was. counts: of everything else.
    """

    key: GraphKey
    capturable: bool
    graph: Graph | None = None
    misses: int = 0
    failures: int = 0
    put_off: int = 0
    used: int = 0
    replayed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    capture_s: float = 0.0

    @property
    def state(self) -> str:
        """In a word."""
        if self.graph is not None:
            return "captured"
        if not self.capturable:
            return "uncapturable"
        return "warmed" if self.misses else "cold"


class GraphRunner(Generic[Work]):
    """The state of every shape, and the bounded set of graphs, least recently used out first.

    capture_freely: set False while many wait: each capture stalls the caller some 30 ms, and then no more
        than HURRIED_SHARE of the time goes to them. None at all would be worse: what is launched kernel by
        kernel takes several times as long, so that many would wait for ever.
    """

    def __init__(
        self, device: GraphDevice[Work], limits: GraphLimits, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.capture_freely = True
        self._device = device
        self._limits = limits
        self._clock = clock
        self._entries: dict[GraphKey, Entry] = {}
        self._captured: list[Entry] = []
        self._replays = 0
        self._bytes = 0
        self._hurried_from_s = -math.inf  # when there may be a capture although many wait

    def entry(self, key: GraphKey) -> Entry:
        """That of this shape, for `run`; always the same."""
        return self._entries.get(key) or self._seen(key)

    def run(self, entry: Entry, work: Work) -> Execution:
        """Enqueue one forward of this shape, exactly once unless an exception is raised.

        Raises:
            Exception: what the device raised.
        """
        graph = entry.graph
        if graph is not None:
            graph.launch()
            self._replays = entry.used = self._replays + 1
            entry.replayed += 1
            return Execution.REPLAYED
        if self._may_capture(entry) and self._capture(entry, work):
            return Execution.CAPTURED
        self._device.run(entry.key, work)
        entry.counts["eager"] += 1
        entry.misses += 1
        return Execution.COLD if entry.misses == 1 else Execution.EAGER

    def capture_all(self, keys: Iterable[GraphKey], work_of: Callable[[GraphKey], Work]) -> None:
        """Warm and capture every shape of `keys` that may be, up to the bounds; shows progress on a terminal.

        work_of: makes inputs for a shape, valid until it is called again.
        """
        wanted = [entry for entry in map(self.entry, keys) if self._worth_capturing(entry)]
        for entry in Bar(wanted, "capturing CUDA graphs", unit="graph"):
            if self._full:
                log.warning(
                    "kept %d CUDA graphs of %d: the bound is reached", len(self._captured), len(wanted)
                )
                return
            for _ in range(2):  # eagerly, then captured
                self.run(entry, work_of(entry.key))

    def stats(self) -> Mapping[str, object]:
        """Counters in total and by shape, as plain JSON values. Times in milliseconds."""
        entries = self._entries.values()
        counts = sum((entry.counts for entry in entries), Counter[str]())
        counts["replayed"] = sum(entry.replayed for entry in entries)
        states = Counter(entry.state for entry in entries)
        return {
            "mode": self._limits.mode,
            "max_capture_tokens": self._limits.max_tokens,
            "max_graphs": self._limits.max_graphs,
            "max_bytes": self._limits.max_bytes,
            "bytes": self._bytes,
            "capture_ms": round(1e3 * sum(entry.capture_s for entry in entries), 1),
            "states": {state: states[state] for state in ("cold", "warmed", "captured", "uncapturable")},
            "counts": {name: counts[name] for name in ("eager", "captures", "replayed", "evicted")},
            "buckets": [_describe(entry) for entry in sorted(entries, key=lambda entry: entry.key)],
        }

    def buckets(self, max_tokens: int, max_seqs: int) -> Mapping[str, list[int]]:
        """The sizes of batches of up to so many tokens and sequences for which graphs are made, rising."""
        most = min(max_tokens, self._limits.max_tokens)
        return {
            "token_buckets": [bucket for bucket in token_buckets(most) if bucket <= self._limits.max_tokens],
            "sequence_buckets": list(sequence_buckets(max_seqs)),
        }

    def close(self) -> None:
        """Give up all graphs."""
        while self._captured:
            self._evict_oldest()

    def _seen(self, key: GraphKey) -> Entry:
        entry = self._entries[key] = Entry(key, self._device.capturable(key))
        return entry

    def _worth_capturing(self, entry: Entry) -> bool:
        limits = self._limits
        return entry.capturable and limits.mode != "off" and entry.key.num_tokens <= limits.max_tokens

    def _may_capture(self, entry: Entry) -> bool:
        if entry.misses <= entry.put_off or not self._worth_capturing(entry):
            return False
        if not (self.capture_freely or self._clock() >= self._hurried_from_s):
            return False
        return not self._full or entry.misses >= ADMIT_HITS

    @property
    def _full(self) -> bool:
        """Whether one more graph, of the size that they have on average, would push out another."""
        count, limits = len(self._captured), self._limits
        return count >= limits.max_graphs or (count + 1) * self._bytes > count * limits.max_bytes

    def _capture(self, entry: Entry, work: Work) -> bool:
        """Capture and launch; False if this shape then still has to run eagerly."""
        while self._captured and len(self._captured) >= self._limits.max_graphs:
            self._evict_oldest()
        started = self._clock()
        try:
            graph = self._device.capture(entry.key, work)
        except CaptureError as error:
            self._capture_took(started)
            entry.put_off = entry.misses + (RETRY_HITS << entry.failures)
            entry.failures += 1
            log.warning("%s runs eagerly for now: %s", entry.key, error)
            return False
        entry.capture_s = self._capture_took(started)
        entry.failures = entry.put_off = 0
        if graph.nbytes > self._limits.max_bytes:
            entry.capturable = False
            log.warning("%s runs eagerly: its graph takes %d bytes", entry.key, graph.nbytes)
            graph.close()
            return False
        while self._captured and self._bytes + graph.nbytes > self._limits.max_bytes:
            self._evict_oldest()
        self._keep(entry, graph)
        graph.launch()
        return True

    def _capture_took(self, started_s: float) -> float:
        """Seconds since then; while many wait, the next capture is put off in proportion."""
        ended_s = self._clock()
        self._hurried_from_s = ended_s + (ended_s - started_s) * (1 / HURRIED_SHARE - 1)
        return ended_s - started_s

    def _keep(self, entry: Entry, graph: Graph) -> None:
        entry.graph = graph
        entry.counts["captures"] += 1
        entry.used = self._replays
        self._captured.append(entry)
        self._bytes += graph.nbytes

    def _evict_oldest(self) -> None:
        entry = min(self._captured, key=lambda entry: entry.used)  # of equals the one captured first
        self._captured.remove(entry)
        graph, entry.graph = entry.graph, None
        entry.misses = 0
        entry.counts["evicted"] += 1
        if graph is not None:
            self._bytes -= graph.nbytes
            graph.close()


def _describe(entry: Entry) -> Mapping[str, object]:
    return {
        **entry.key._asdict(),
        "state": entry.state,
        **{name: entry.counts[name] for name in ("eager", "captures", "evicted")},
        "replayed": entry.replayed,
        "capture_ms": round(1e3 * entry.capture_s, 2),
        "bytes": 0 if entry.graph is None else entry.graph.nbytes,
    }

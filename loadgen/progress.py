"""How far a run is, on stderr: a bar with the time left for terminals, or a line a case for logs."""

from __future__ import annotations

import sys
from time import perf_counter
from types import TracebackType
from typing import Protocol

from tqdm import tqdm

from loadgen.results import CaseResult
from loadgen.summary import StreamSummary

FORMAT = "{desc}|{bar}| {n:.1f}/{total} {elapsed}<{remaining}"


class Progress(Protocol):
    """What a run tells."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def begin(self, name: str) -> None:
        """A case starts."""

    def at(self, fraction: float) -> None:
        """How much of it is done."""

    def end(self, name: str, result: CaseResult) -> None:
        """It is done, now or in an earlier run."""


class Bar:
    """Quiet when stderr is no terminal. total: cases of the run, counting every round and target."""

    def __init__(self, total: int) -> None:
        # disable=None: tqdm is silent when its file is no terminal.
        self._bar = tqdm(
            total=total, unit="case", file=sys.stderr, disable=None, dynamic_ncols=True, bar_format=FORMAT
        )
        self._ended = 0

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def begin(self, name: str) -> None:
        """The next case starts."""
        self._bar.set_description_str(name.ljust(32), refresh=False)
        self.at(0.0)

    def at(self, fraction: float) -> None:
        """How much of the running case is done."""
        self._bar.n = self._ended + min(1.0, fraction)
        self._bar.refresh()

    def end(self, name: str, result: CaseResult) -> None:
        """Its place in the bar is full."""
        del name, result
        self._ended += 1
        self.at(0.0)


class Lines:
    """A line a case with its numbers, terminal or not."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._ended = 0
        self._begun_s = perf_counter()
        self._started_s = self._begun_s

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def begin(self, name: str) -> None:
        """Remember when."""
        del name
        self._begun_s = perf_counter()

    def at(self, fraction: float) -> None:
        """Nothing: a line when it is done is enough."""

    def end(self, name: str, result: CaseResult) -> None:
        """Its line."""
        self._ended += 1
        now_s = perf_counter()
        took = f"{now_s - self._begun_s:.1f} s, {now_s - self._started_s:.0f} s in all"
        sys.stderr.write(f"[{self._ended}/{self._total}] {name} {result.target}: {_words(result)} ({took})\n")
        sys.stderr.flush()
        self._begun_s = now_s


def _words(result: CaseResult) -> str:
    if result.failed is not None:
        return f"FAILED: {result.failed}"
    parts = [_numbers(stream) for stream in result.streams]
    checked = f"; check {result.check}" if result.check is not None else ""
    return "; ".join(parts) + checked


def _numbers(stream: StreamSummary) -> str:
    quantiles = stream.response.told()
    shown = ", ".join(f"{name} {ms:.2f}" for name, ms in quantiles.items() if name in ("p50", "p99"))
    shown = shown or f"max {stream.response.max:.1f}"
    numbers = f"{shown} ms of {stream.response.count}, {stream.embeddings_per_s:.1f} emb/s"
    if stream.rejected or stream.errors:
        numbers += f", {stream.rejected} refused, {sum(stream.errors.values())} errors"
    return numbers

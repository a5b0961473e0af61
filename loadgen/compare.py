"""Runs side by side: those of several targets measured in turns, or those of several result files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from loadgen.plan import LoadgenError
from loadgen.results import CaseResult, Results
from loadgen.summary import StreamSummary

Key = tuple[str, str, str]
# By their numbers; one that failed has none.
Rounds = dict[int, StreamSummary]


@dataclass(frozen=True)
class Column:
    """One side. rounds: each case's streams."""

    name: str
    rounds: dict[Key, Rounds]


@dataclass(frozen=True)
class Ratio:
    """Median over the rounds, with the least and the greatest; a round meets the same round of the other."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        spread = "" if self.low == self.high else f" ({self.low:.2f}–{self.high:.2f})"
        return f"{self.middle:.2f}×{spread}"


def read(path: Path) -> Results:
    """A result file.

    Raises:
        LoadgenError: it is none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, msgspec.DecodeError) as error:
        raise LoadgenError(f"{path}: {error}") from error


def columns_of_targets(results: Results) -> list[Column]:
    """One column a target of a run."""
    return [_column(f"{t['name']} {t['url']}", results.cases, t["name"]) for t in results.targets]


def columns_of_files(paths: list[Path]) -> list[Column]:
    """One column a target of each file.

    Raises:
        LoadgenError: a file is no result file.
    """
    columns = []
    for path in paths:
        results = read(path)
        for target in results.targets:
            several = f" {target['name']}" if len(results.targets) > 1 else ""
            columns.append(_column(path.stem + several, results.cases, target["name"]))
    return columns


def table(columns: list[Column]) -> str:
    """Markdown: each side's medians, then its ratios to the first: below 1 is faster, or fewer a second."""
    first, *others = columns
    heads = [first.name] + [f"{c.name} | ms ratio p50 | p99 | emb/s ratio" for c in others]
    lines = [f"| case: p50 / p99 ms, emb/s | {' | '.join(heads)} |", f"|---|{'---|' * (1 + 4 * len(others))}"]
    for key, rounds in first.rounds.items():
        cells = [_numbers(rounds)]
        for other in others:
            theirs = other.rounds.get(key, {})
            cells += [_numbers(theirs), *(str(r) if r else "–" for r in ratios(rounds, theirs))]
        lines.append(f"| {_name(key)} | {' | '.join(cells)} |")
    missing = sorted({_name(key) for c in others for key in c.rounds if key not in first.rounds})
    lines += [f"\nOnly in others than {first.name}: {', '.join(missing)}."] if missing else []
    return "\n".join(lines) + "\n"


def ratios(left: Rounds, right: Rounds) -> Iterator[Ratio | None]:
    """Of p50, p99 and embeddings a second, right to left, by round; None where a side has nothing."""
    pairs = [(left[number], right[number]) for number in left if number in right]
    for read_value in (_p50, _p99, _rate):
        both = [(read_value(s), read_value(r)) for s, r in pairs]
        values = [r / s for s, r in both if s and r is not None]
        yield Ratio(median(values), min(values), max(values)) if values else None


def _p50(stream: StreamSummary) -> float | None:
    return stream.response.told().get("p50")


def _p99(stream: StreamSummary) -> float | None:
    return stream.response.told().get("p99")


def _rate(stream: StreamSummary) -> float | None:
    return stream.embeddings_per_s


def _numbers(rounds: Rounds) -> str:
    if not rounds:
        return "–"
    told = ([v for r in rounds.values() if (v := value(r)) is not None] for value in (_p50, _p99, _rate))
    p50, p99, rate = (median(values) if values else None for values in told)
    return f"{_shown(p50, 2)} / {_shown(p99, 2)}, {_shown(rate, 1)}"


def _shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _name(key: Key) -> str:
    suite, case, stream = key
    return f"{suite} {case}" + (f", {stream}" if stream != "requests" else "")


def _column(name: str, cases: list[CaseResult], target: str) -> Column:
    rounds: dict[Key, Rounds] = {}
    for case in cases:
        if case.target == target:
            for stream in case.streams:
                rounds.setdefault((case.suite, case.name, stream.stream), {})[case.number] = stream
    return Column(name, rounds)

"""The order of a run, and one turn of it: a case, once, on one target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from loadgen.check import KEEP, Checker
from loadgen.conductor import Setting, run_case
from loadgen.plan import Case, LoadgenError, Shape, Source, Stream, Target
from loadgen.processes import Clients
from loadgen.progress import Progress
from loadgen.reference import Reference
from loadgen.results import CaseResult
from loadgen.served_model import counters
from loadgen.suites import saturation
from loadgen.summary import summarise

Key = tuple[str, str, int, str]
# What a turn takes beside its bounds: clients that start, requests that are made, answers under way.
MARGIN_S = 3.0


@dataclass(frozen=True)
class Turn:
    """sets_rate: what is measured becomes 100 % of the open loops of the same shape."""

    case: Case
    number: int
    target: Target
    sets_rate: bool = False

    @property
    def key(self) -> Key:
        """What tells it from the other turns of a run."""
        return (self.case.suite, self.case.name, self.number, self.target.name)

    @property
    def name(self) -> str:
        """For whoever watches."""
        return f"{self.case.suite} {self.case.name}" + (f" #{self.number + 1}" if self.number else "")

    @property
    def longest_s(self) -> float:
        """How long it takes at most, if the server answers at all."""
        limits = self.case.limits
        is_open = any(stream.is_open for stream in self.case.streams)
        return (limits.warmup_s if is_open else limits.max_warmup_s) + limits.max_s + MARGIN_S


def turns(
    cases: Iterable[Case], targets: tuple[Target, ...], rounds: int, max_rate: float | None
) -> list[Turn]:
    """A B A B: a slow drift of the machine meets all targets alike."""
    order: list[Turn] = []
    known: set[Shape] = set()
    for case in cases:
        stream, resolved = case.streams[0], case
        if stream.load is not None and max_rate is not None:
            resolved = replace(case, streams=(_at_rate(stream, max_rate),))
        elif stream.load is not None and stream.shape not in known:
            known.add(stream.shape)
            order.append(Turn(saturation(case), 0, targets[0], sets_rate=True))
        order += [Turn(resolved, number, target) for number in range(rounds) for target in targets]
    return order


class Runner:
    """Takes turns and remembers their results, and what an open loop's 100 % is."""

    def __init__(
        self, clients: Clients, source: Source, reference: Reference | None, progress: Progress
    ) -> None:
        self._clients = clients
        self._progress = progress
        self._setting = Setting(source, KEEP if reference else 0)
        self._checker = Checker(reference, source) if reference else None
        self._max_rates: dict[Shape, float] = {}
        self._found: dict[Key, CaseResult] = {}

    def keep(self, results: Iterable[CaseResult]) -> None:
        """Results of an earlier run, whose turns are not taken again."""
        self._found.update({(r.suite, r.name, r.number, r.target): r for r in results})

    def has(self, turn: Turn) -> bool:
        """Whether it has been taken."""
        return turn.key in self._found

    def found(self, turn: Turn) -> CaseResult | None:
        """Its result, None when it has not been taken."""
        return self._found.get(turn.key)

    def take(self, turn: Turn) -> CaseResult:
        """Measure it, unless that has been done."""
        if not self.has(turn):
            self._progress.begin(f"{turn.name} {turn.target.name}")
            self._found[turn.key] = self._measure(turn)
        result = self._found[turn.key]
        if turn.sets_rate:
            shape = turn.case.streams[0].shape
            self._max_rates[shape] = result.streams[0].requests_per_s if result.streams else 0.0
        return result

    def _measure(self, turn: Turn) -> CaseResult:
        streams = tuple(_at_rate(s, self._max_rates.get(s.shape, 0.0)) for s in turn.case.streams)
        case, target = replace(turn.case, streams=streams), turn.target
        if any(stream.is_open and stream.trace is None and stream.rate <= 0 for stream in streams):
            return CaseResult(*turn.key, failed="the maximum is not known")
        try:
            before = counters(target)
            runs = run_case(self._clients, case, target, self._setting, self._progress.at)
            after = counters(target)
        except LoadgenError as error:
            return CaseResult(*turn.key, failed=str(error))
        return CaseResult(
            *turn.key,
            streams=[summarise(stream) for stream in runs],
            tokens_per_step=_tokens_per_step(before, after),
            check=self._checker.check(runs, target.api) if self._checker else None,
        )


def _tokens_per_step(before: dict[str, int], after: dict[str, int]) -> float | None:
    """None: one of them is not known, or nothing ran in between."""
    if not before or not after or after["steps"] == before["steps"]:
        return None
    return (after["tokens"] - before["tokens"]) / (after["steps"] - before["steps"])


def _at_rate(stream: Stream, max_rate: float) -> Stream:
    """A share of the maximum as requests a second; a stream with a rate of its own as it is."""
    return stream if stream.load is None else replace(stream, rate=stream.load * max_rate, load=None)

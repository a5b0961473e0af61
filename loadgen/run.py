"""A whole run: every case, on every target, in turns; then the report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from loadgen import echo
from loadgen.check import KEEP, Checker
from loadgen.conductor import Setting, run_case
from loadgen.plan import Case, Limits, LoadgenError, Shape, Source, Stream, Target
from loadgen.processes import Clients
from loadgen.progress import Bar
from loadgen.reference import Reference
from loadgen.report.files import write
from loadgen.report.table import markdown
from loadgen.results import CaseResult, Results, machine, now
from loadgen.server_info import ServerInfo, ask, counters
from loadgen.suites import saturation
from loadgen.summary import Latency, summarise

DEFAULT_VOCAB_SIZE = 30_000
OVERHEAD = Case(
    "overhead",
    "1×512",
    (Stream(Shape(1, 512, 512)),),
    Limits(warmup_requests=200, warmup_s=0.3, max_warmup_s=1.0, requests=1000, min_s=0.5, max_s=2.0),
)


@dataclass(frozen=True)
class Plan:
    """Everything the command line asks for.

    rounds: how often each case runs on each target. max_rate: requests a second that are 100 % of an open
    loop; None: measured on the first target. report: folder for the report's files.
    """

    targets: tuple[Target, ...]
    cases: tuple[Case, ...]
    source: Source
    rounds: int = 1
    max_rate: float | None = None
    overhead: bool = True
    reference: Reference | None = None
    json: Path | None = None
    report: Path | None = None


def run(plan: Plan) -> int:
    """Do it; the table goes to stdout. Returns the exit status: 1 when a case failed or is invalid."""
    asked = [ask(target) for target in plan.targets]
    infos = [info for _, info in asked]
    plan = replace(
        plan, targets=tuple(target for target, _ in asked), source=_with_vocabulary(plan.source, infos)
    )
    cases, left_out = _that_fit(plan.cases, infos)
    results = _empty(plan, infos, left_out)
    with Clients() as clients:
        if plan.overhead:
            results.overhead = _overhead(clients, plan)
        with Bar(len(cases) * len(plan.targets) * plan.rounds) as bar:
            results.cases = list(_Runner(clients, plan, bar).results(cases))
    sys.stdout.write(markdown(results))
    if plan.json is not None:
        plan.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    if plan.report is not None:
        written = write(results, plan.report)
        sys.stdout.write(f"\nReport: {len(written)} files in {plan.report}.\n")
        if not any(path.suffix == ".png" for path in written):
            sys.stdout.write("No PNG: that needs matplotlib, pip install 'bouquet[report]'.\n")
    return 0 if all(case.valid for case in results.cases) else 1


class _Runner:
    """Runs cases and remembers what an open loop's 100 % is."""

    def __init__(self, clients: Clients, plan: Plan, bar: Bar) -> None:
        self._clients = clients
        self._plan = plan
        self._bar = bar
        self._setting = Setting(plan.source, KEEP if plan.reference else 0)
        self._checker = Checker(plan.reference, plan.source) if plan.reference else None
        self._max_rates: dict[Shape, float] = {}

    def results(self, cases: list[Case]) -> Iterator[CaseResult]:
        """A B A B: a slow drift of the machine meets all targets alike."""
        for case in cases:
            resolved = case
            if any(stream.load is not None for stream in case.streams):
                result = self._saturate(case)
                if result is not None:
                    yield result
                resolved = self._at_rate(case)
            for number in range(self._plan.rounds):
                for target in self._plan.targets:
                    self._bar.begin(f"{case.suite} {case.name} {target.name}")
                    yield self._one(resolved, number, target)

    def _saturate(self, case: Case) -> CaseResult | None:
        """Measure the maximum, unless it is known."""
        shape = case.streams[0].shape
        if self._plan.max_rate is not None:
            self._max_rates.setdefault(shape, self._plan.max_rate)
        if shape in self._max_rates:
            return None
        result = self._one(saturation(case), 0, self._plan.targets[0])
        self._max_rates[shape] = result.streams[0].requests_per_s if result.streams else 0.0
        return result

    def _at_rate(self, case: Case) -> Case:
        streams = (replace(s, rate=(s.load or 0.0) * self._max_rates[s.shape]) for s in case.streams)
        return replace(case, streams=tuple(streams))

    def _one(self, case: Case, number: int, target: Target) -> CaseResult:
        if any(stream.is_open and stream.trace is None and stream.rate <= 0 for stream in case.streams):
            return CaseResult(case.suite, case.name, number, target.name, failed="the maximum is not known")
        try:
            before = counters(target)
            runs = run_case(self._clients, case, target, self._setting, self._bar.at)
            after = counters(target)
        except LoadgenError as error:
            return CaseResult(case.suite, case.name, number, target.name, failed=str(error))
        steps = after.get("steps", 0) - before.get("steps", 0)
        return CaseResult(
            suite=case.suite,
            name=case.name,
            number=number,
            target=target.name,
            streams=[summarise(stream) for stream in runs],
            tokens_per_step=(after["tokens"] - before["tokens"]) / steps if steps else None,
            check=self._checker.check(runs, target.api) if self._checker else None,
        )


def _overhead(clients: Clients, plan: Plan) -> Latency | None:
    """What the client costs by itself, in the first target's wire format."""
    with echo.running() as port:
        target = Target("echo", "127.0.0.1", port, plan.targets[0].api, "echo")
        (measured,) = run_case(
            clients, OVERHEAD, target, Setting(Source(plan.source.vocab_size)), lambda _: None
        )
    return summarise(measured).service


def _empty(plan: Plan, infos: list[ServerInfo], left_out: list[str]) -> Results:
    source = plan.source
    inputs = f"random ids below {source.vocab_size}"
    if source.is_text:
        exact = f"exact by {source.tokenizer.name}" if source.tokenizer else "roughly"
        inputs = f"text of {source.corpus and source.corpus.name}, lengths {exact}"
    return Results(
        started=now(),
        command=["python -m loadgen", *sys.argv[1:]],
        machine=machine(),
        targets=[{"name": t.name, "url": t.url, "api": t.api, "model": t.model} for t in plan.targets],
        servers=[info.told for info in infos],
        inputs=inputs,
        left_out=left_out,
    )


def _with_vocabulary(source: Source, infos: list[ServerInfo]) -> Source:
    told = [info.vocab_size for info in infos if info.vocab_size]
    return replace(source, vocab_size=source.vocab_size or min(told, default=DEFAULT_VOCAB_SIZE))


def _that_fit(cases: tuple[Case, ...], infos: list[ServerInfo]) -> tuple[list[Case], list[str]]:
    """The cases that every server's model takes, and a line about each of the others."""
    limit = min((info.max_tokens for info in infos if info.max_tokens), default=sys.maxsize)
    fit, left_out = [], []
    for case in cases:
        longest = max(stream.shape.high for stream in case.streams)
        if longest <= limit:
            fit.append(case)
        else:
            left_out.append(f"{case.suite} {case.name}: the model takes {limit} tokens")
    if not fit:
        raise LoadgenError("; ".join(left_out) or "nothing to run")
    return fit, left_out

"""A whole run: every case, on every target, in turns; then the report."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from loadgen.conductor import Setting, run_case
from loadgen.plan import Case, LoadgenError, Source, Target
from loadgen.processes import Clients
from loadgen.progress import Bar
from loadgen.results import CaseResult, Results, machine, now
from loadgen.server_info import ServerInfo, ask, counters
from loadgen.summary import summarise
from loadgen.table import markdown

DEFAULT_VOCAB_SIZE = 30_000


@dataclass(frozen=True)
class Plan:
    """Everything the command line asks for. rounds: how often each case runs on each target."""

    targets: tuple[Target, ...]
    cases: tuple[Case, ...]
    source: Source
    rounds: int = 1
    json: Path | None = None


def run(plan: Plan) -> int:
    """Do it; the table goes to stdout. Returns the exit status: 1 when a case failed."""
    asked = [ask(target) for target in plan.targets]
    targets = tuple(target for target, _ in asked)
    infos = [info for _, info in asked]
    setting = Setting(_with_vocabulary(plan.source, infos))
    cases, left_out = _that_fit(plan.cases, infos)
    results = Results(
        started=now(),
        command=sys.argv,
        machine=machine(),
        targets=[msgspec.to_builtins(replace(target, api_key=None)) for target in targets],
        servers=[info.told for info in infos],
        inputs="text" if setting.source.is_text else f"random ids below {setting.source.vocab_size}",
        left_out=left_out,
    )
    steps = [(case, number, t) for case in cases for number in range(plan.rounds) for t in targets]
    with Clients() as clients, Bar(len(steps)) as bar:
        for case, number, target in steps:
            bar.begin(f"{case.suite} {case.name}" + (f" on {target.name}" if len(targets) > 1 else ""))
            results.cases.append(_one(clients, case, number, target, setting, bar))
    sys.stdout.write(markdown(results))
    if plan.json is not None:
        plan.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    return 1 if any(case.failed for case in results.cases) else 0


def _one(clients: Clients, case: Case, number: int, target: Target, setting: Setting, bar: Bar) -> CaseResult:
    before = counters(target)
    try:
        runs = run_case(clients, case, target, setting, bar.at)
    except LoadgenError as error:
        return CaseResult(case.suite, case.name, number, target.name, failed=str(error))
    after = counters(target)
    steps = after.get("steps", 0) - before.get("steps", 0)
    per_step = (after["tokens"] - before["tokens"]) / steps if steps else None
    streams = [summarise(stream) for stream in runs]
    return CaseResult(case.suite, case.name, number, target.name, streams=streams, tokens_per_step=per_step)


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

"""A whole run: what the servers are, every turn, and a report that is on disk after each of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from loadgen import compare
from loadgen.client_alone import ceilings, overhead
from loadgen.plan import Case, LoadgenError, Source, Target
from loadgen.processes import Clients
from loadgen.progress import Bar, Lines, Progress
from loadgen.reference import Reference
from loadgen.report.files import draw, save, write
from loadgen.report.table import markdown
from loadgen.results import Results, machine, now
from loadgen.served_model import ServedModel, ask
from loadgen.turns import Runner, Turn, turns

DEFAULT_VOCAB_SIZE = 30_000


@dataclass(frozen=True)
class Plan:
    """Everything the command line asks for.

    rounds: how often each case runs on each target. max_rate: requests a second that are 100 % of an open
    loop; None: measured on the first target. report: folder for the report's files. resume: keep what
    `report` or `json` holds already. budget_s: start nothing that could end later. lines: a line a case.
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
    resume: bool = False
    budget_s: float | None = None
    lines: bool = False


def run(plan: Plan) -> int:
    """Do it; the table goes to stdout. Returns the exit status: 1 when a case failed or is invalid.

    Raises:
        LoadgenError: nothing can be run.
    """
    deadline_s = perf_counter() + plan.budget_s if plan.budget_s is not None else None
    asked = [ask(target) for target in plan.targets]
    models = [model for _, model in asked]
    plan = replace(
        plan, targets=tuple(target for target, _ in asked), source=_with_vocabulary(plan.source, models)
    )
    cases, left_out = _that_fit(plan.cases, models)
    results = _begin(plan, models, left_out)
    _run(plan, turns(cases, plan.targets, plan.rounds, plan.max_rate), results, deadline_s)
    sys.stdout.write(markdown(results))
    if plan.report is not None:
        written = [*write(results, plan.report), *draw(results, plan.report)]
        sys.stdout.write(f"\nReport: {len(written)} files in {plan.report}.\n")
        if not any(path.suffix == ".png" for path in written):
            sys.stdout.write("No PNG: that needs matplotlib, pip install -e '.[report]'.\n")
    return 0 if all(case.valid for case in results.cases) else 1


def _run(plan: Plan, todo: list[Turn], results: Results, deadline_s: float | None) -> None:
    """Measure what `results` lacks, and save after each turn: a killed run leaves what it measured."""
    progress: Progress = Lines(len(todo)) if plan.lines else Bar(len(todo))
    with Clients() as clients, progress:
        runner = Runner(clients, plan.source, plan.reference, progress)
        runner.keep(results.cases)
        if plan.overhead:
            missing = [turn.case for turn in todo if not runner.has(turn)]
            results.overhead = results.overhead or overhead(clients, plan.targets[0], plan.source)
            results.alone.update(ceilings(clients, missing, plan.targets[0], plan.source))
        for turn in todo:
            if (
                deadline_s is not None
                and not runner.has(turn)
                and perf_counter() + turn.longest_s > deadline_s
            ):
                results.left_out.append(f"{turn.name}: no time left")
                continue
            result = runner.take(turn)
            results.cases = [found for each in todo if (found := runner.found(each)) is not None]
            _save(plan, results)
            progress.end(turn.name, result)
        _save(plan, results)


def _save(plan: Plan, results: Results) -> None:
    if plan.json is not None:
        save(results, plan.json)
    if plan.report is not None:
        write(results, plan.report)


def _begin(plan: Plan, models: list[ServedModel], left_out: list[str]) -> Results:
    """Results without cases, or with those that are kept.

    Raises:
        LoadgenError: what is to be resumed was another run.
    """
    fresh = _empty(plan, models, left_out)
    path = plan.report / "report.json" if plan.report is not None else plan.json
    if not plan.resume or path is None or not path.exists():
        return fresh
    before = compare.read(path)
    for what, then, today in (
        ("sent", before.inputs, fresh.inputs),
        ("measured", [_served(t) for t in before.targets], [_served(t) for t in fresh.targets]),
    ):
        if then != today:
            raise LoadgenError(f"--resume: {path} {what} {then}, this run {today}")
    fresh.started, fresh.resumed = before.started, [*before.resumed, fresh.started]
    fresh.overhead, fresh.alone = before.overhead, before.alone
    fresh.cases = [case for case in before.cases if case.valid]
    return fresh


def _served(target: dict[str, object]) -> str:
    return f"{target['name']} {target['model']} {target['api']}"


def _empty(plan: Plan, models: list[ServedModel], left_out: list[str]) -> Results:
    source = plan.source
    inputs = f"random ids below {source.vocab_size}"
    if source.is_text:
        exact = f"exact by {source.tokenizer.name}" if source.tokenizer else "roughly"
        inputs = f"text of {source.corpus and source.corpus.name}, lengths {exact}"
    return Results(
        started=now(),
        command=["python -m loadgen", *map(_without_folders, sys.argv[1:])],
        machine=machine(),
        targets=[{"name": t.name, "url": t.url, "api": t.api, "model": t.model} for t in plan.targets],
        servers=[model.told for model in models],
        inputs=inputs,
        left_out=left_out,
    )


def _without_folders(argument: str) -> str:
    """Reports are passed on: where on this machine a file lies is nobody's business."""
    flag, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path = Path(value)
    return f"{flag}{equals}{path.name}" if path.is_absolute() else argument


def _with_vocabulary(source: Source, models: list[ServedModel]) -> Source:
    told = [model.vocab_size for model in models if model.vocab_size]
    return replace(source, vocab_size=source.vocab_size or min(told, default=DEFAULT_VOCAB_SIZE))


def _that_fit(cases: tuple[Case, ...], models: list[ServedModel]) -> tuple[list[Case], list[str]]:
    """The cases that every server's model takes, and a line about each of the others."""
    limit = min((model.max_tokens for model in models if model.max_tokens), default=sys.maxsize)
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

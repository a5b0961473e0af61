"""`server.py corpus --plan`: the arithmetic of capacity.py as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gateway.corpus.capacity import PLAN_BYTES, Answer, Question, plan
from gateway.corpus.measured import GPU, SPEEDS, dimensions, extrapolated

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def report(question: Question) -> str:
    """All that one model and length take."""
    return "\n".join(_lines(question, plan(question)))


def table(question: Question) -> str:
    """Markdown: a line for each model and length that was measured, in place of the question's own."""
    head = ("model", "tokens", "emb/s a GPU", "GPUs", "hours", "GPU-hours", "cost", "float32", "int8", "bits")
    lines = [head, tuple("---" for _ in head)]
    for row in SPEEDS:
        answer = plan(replace(question, tokens=row.tokens, model=row.model))
        vectors = [_bytes(answer.vector_bytes[name]) for name in ("float32", "int8", "bits")]
        cost = f"${_short(answer.dollars)}"
        figures = (
            f"{answer.speed:,.0f}",
            f"{answer.gpus:,}",
            f"{answer.hours:,.0f}",
            _short(answer.gpu_hours),
        )
        lines.append((row.model, f"{row.tokens:,}", *figures, cost, *vectors))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def models() -> Sequence[str]:
    """Those that were measured."""
    return list(dict.fromkeys(row.model for row in SPEEDS))


def _lines(question: Question, answer: Answer) -> Iterator[str]:
    model, rows = question.model, _short(question.rows)
    guess = ", beyond the lengths that were measured" if extrapolated(model, question.tokens) else ""
    yield f"{rows} rows of {question.tokens:,.0f} tokens, {model}, {dimensions(model)} values each"
    yield f"speed       {answer.speed:,.0f} emb/s on one {GPU}{guess}"
    yield f"GPUs        {answer.gpus:,}"
    yield f"time        {answer.hours:,.1f} hours, {_short(answer.gpu_hours)} GPU-hours"
    yield f"cost        ${_short(answer.dollars)} at ${question.dollars:g} a GPU-hour"
    yield f"failures    {answer.lost_gpu_hours:,.1f} GPU-hours are done again"
    share = f"{answer.network_share:.2%} of a GPU's share of the network"
    yield f"text        {_bytes(answer.text_bytes)}; {share}"
    vectors = ", ".join(f"{_bytes(nbytes)} {name}" for name, nbytes in answer.vector_bytes.items())
    yield f"vectors     {vectors}"
    found = f"a rerun finds them in {answer.marker_s:,.0f} s"
    yield f"shards      {answer.shards:,} of {answer.shard_s:,.0f} s; {found}"
    over = " (too much: raise --shard-rows)" if answer.plan_bytes > PLAN_BYTES else ""
    yield f"driver      {_bytes(answer.plan_bytes)} of memory for the plan{over}"
    counts = ", ".join(f"{hours:,.1f} h of {kind}" for kind, hours in answer.count_hours.items())
    yield f"lines       counted before: {counts}; none of parquet"
    yield from _breaks(answer)


def _breaks(answer: Answer) -> Iterator[str]:
    """What gives way, the first first; "<" marks what does so with the GPUs of the answer."""
    yield "breaks at"
    for limit in answer.limits:
        mark = "<" if limit.gpus < answer.gpus else " "
        yield f"{mark} {limit.gpus:>14,.0f} GPUs  {limit.name}"


def _short(number: float) -> str:
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def _bytes(nbytes: float) -> str:
    unit = "PB" if nbytes >= 1e15 else "TB" if nbytes >= 1e12 else "GB" if nbytes >= 1e9 else "MB"
    return f"{nbytes / {'PB': 1e15, 'TB': 1e12, 'GB': 1e9, 'MB': 1e6}[unit]:.3g} {unit}"

"""Which kernels a forward spends the device's time in: a table of every kernel of one graph.

    python docs/benchmarks/profile_forward.py [--model pplx-embed] [--out profile.md]

Steps of the engine at replay, as CUPTI sees them through torch.profiler. "us" is the sum of a kernel's own
times in one step, the mean of STEPS, and "share" its part of all kernels'. Traced kernels do not overlap as
they do otherwise, and what is brought up early counts its wait for the kernel before. For times of forwards
see kernels.py.
Random weights, the model's shapes.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from step import batch_of, dummy_engine  # noqa: E402

from rose.batch import Engine  # noqa: E402
from rose.engine_options import EngineOptions  # noqa: E402

SHAPES = ((1, 128), (1, 512), (1, 4096), (16, 512))
WARM_STEPS, STEPS = 4, 5
# What a kernel's name says of it, the first that fits.
KINDS = (
    ("all layers", r"(de|en)coder_(stack|wide)"),
    ("attention", r"flash|attention|chained|_list|prefill|one_query|add_splits|absorb|_tiles|project_values"),
    ("product", r"gemm|nvjet|cutlass|skinny|cublas|splitk|^rotary_\d|^residual_\d"),
    ("rotation", r"rope"),
    ("norm", r"norm|row_scale"),
    ("activation", r"silu|gelu|swiglu"),
    ("pooling, delivery", r"pool|parts|mean|deliver|pick|quant"),
    ("embedding", r"embed|gather|index"),
    ("copy", r"memcpy|memset|fillfunc"),
)
NAME_WIDTH = 70


@dataclass(frozen=True)
class Span:
    """One kernel as it ran: microseconds."""

    name: str
    start_us: float
    us: float


def kind_of(name: str) -> str:
    """Of a kernel, by its name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def spans_of(engine: Engine, count: int, length: int) -> list[list[Span]]:
    """The kernels of each of STEPS steps, by their start."""
    batch = batch_of(engine, count, length)
    for _ in range(WARM_STEPS):
        engine.step(batch).result()
    steps = []
    for _ in range(STEPS):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            engine.step(batch).result()
            torch.cuda.synchronize()
        events: Sequence[Any] = profiler.events() or ()
        spans = [
            Span(event.name, event.time_range.start, event.time_range.elapsed_us())
            for event in events
            if str(event.device_type).endswith("CUDA")
        ]
        steps.append(sorted(spans, key=lambda span: span.start_us))
    return steps


def table_of(title: str, steps: Sequence[Sequence[Span]]) -> list[str]:
    """Lines of Markdown: all kernels, then each of them, the longest first."""
    sums: dict[str, list[float]] = defaultdict(list)
    for span in (span for spans in steps for span in spans):
        sums[span.name].append(span.us)
    whole = sum(map(sum, sums.values())) / len(steps)
    lines = [f"\n### {title}: {whole:.0f} us\n"]
    lines += ["| kind | kernel | launches | us | each | share |", "|---|---|---:|---:|---:|---:|"]
    for name, times in sorted(sums.items(), key=lambda item: -sum(item[1])):
        us, launches = sum(times) / len(steps), len(times) / len(steps)
        lines.append(
            f"| {kind_of(name)} | `{name[:NAME_WIDTH]}` | {launches:.0f} | {us:.0f} | {us / launches:.2f} "
            f"| {us / whole:.1%} |"
        )
    return lines


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="pplx-embed", help="a preset: pplx-embed, bge-m3, ...")
    parser.add_argument("--out", type=Path, help="write the tables here")
    arguments = parser.parse_args()
    engine = dummy_engine(arguments.model, EngineOptions(device="cuda", max_capture_tokens=8192))
    lines = [f"## {arguments.model} on {engine.info.device}"]
    for count, length in SHAPES:
        lines += table_of(f"{count}x{length}", spans_of(engine, count, length))
    engine.close()
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()

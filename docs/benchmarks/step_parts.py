"""Tells where the time of a step goes: each part of step() on the loop, and each kind of kernel in its graph.

    python docs/benchmarks/step_parts.py [--model pplx-embed] [--out parts.json] [--rounds 200]

Of each shape:
- "parts": µs of each part of step() at replay, p50 and p99, nested ones indented. By how the result is
  waited for: "awaited" as in the server, "polled" on the loop without ever sleeping, "spun" in one blocking
  call, "slept" 5 ms more after it; "at once": the second of two steps launched together, whose code and
  graph are still in the processor's caches. Where that is far below the rest, caches are what is paid for.
- "launch": µs of the graph launch alone, back to back, after 5 ms of sleep, and behind one that still runs.
  "flags N": the same graph instantiated by ourselves with these flags (torch gives 1 and 8).
- "kinds": what the graph is made of; see graph_kinds.py.
- "variants": the launch without fused products, and with every other attention backend.
One that fails says so in the place of its figures.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import uvloop
from cuda.bindings import driver

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from graph_kinds import attempt, kinds_of, launch_us  # noqa: E402
from step import batch_of, by_await, by_blocking, dummy_engine, microseconds, parsed  # noqa: E402

from cuda_utils import completion  # noqa: E402
from cuda_utils.errors import check  # noqa: E402
from cuda_utils.event import CudaEvent  # noqa: E402
from cuda_utils.graph import GraphExec  # noqa: E402
from cuda_utils.memcpy import CudaMemcpy  # noqa: E402
from cuda_utils.pinned import PinnedPool  # noqa: E402
from rose import cuda_forward  # noqa: E402
from rose.batch import RaggedBatch  # noqa: E402
from rose.cuda_forward import CudaForward  # noqa: E402
from rose.engine_options import EngineOptions  # noqa: E402
from rose.graph_engine import GraphEngine  # noqa: E402
from rose.graph_runner import GraphKey, GraphRunner  # noqa: E402
from rose.limits import StepLimits  # noqa: E402
from rose.staging import StagingRing, StagingSlot  # noqa: E402
from rose.step_time import StepTimes  # noqa: E402

SHAPES = ((1, 128), (1, 512), (8, 512), (16, 512))
PARTS: tuple[tuple[str, type, str], ...] = (
    ("step", GraphEngine, "step"),
    ("  check", StepLimits, "check"),
    ("  shape", GraphEngine, "_shape_of"),
    ("  slot", StagingRing, "free"),
    ("  stage", GraphEngine, "_stage"),
    ("    fill", StagingSlot, "fill"),
    ("    copy in", CudaMemcpy, "host_to_device"),
    ("    plan", CudaForward, "plan"),
    ("  run", GraphRunner, "run"),
    ("    graph launch", GraphExec, "launch"),
    ("  acquire", PinnedPool, "acquire"),
    ("  copy out", CudaMemcpy, "device_to_host"),
    ("  event", CudaEvent, "record"),
    ("  predict", StepTimes, "launched"),
    ("  launched", StagingRing, "launched"),
)
SLEEP_S = 0.005


_Graph = torch.cuda.CUDAGraph


def kept_graph() -> torch.cuda.CUDAGraph:
    """A graph whose nodes can be read after its capture."""
    graph: Any = _Graph(keep_graph=True)
    end = graph.capture_end

    def capture_end() -> None:
        end()
        graph.instantiate()

    graph.capture_end = capture_end
    kept: torch.cuda.CUDAGraph = graph
    return kept


@contextmanager
def timed_parts(times: dict[str, list[float]]) -> Iterator[None]:
    """Every call of a part inside leaves its seconds in `times`."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        seconds = times.setdefault(name, [])

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            seconds.append(time.perf_counter() - started)
            return result

        return call

    with ExitStack() as stack:
        for name, owner, method in PARTS:
            stack.enter_context(patch.object(owner, method, timed(name, getattr(owner, method))))
        yield


async def _poll(lazy: Any) -> None:
    with patch.object(completion, "FAR_S", math.inf):
        await lazy


async def _sleep(lazy: Any) -> None:
    await lazy
    await asyncio.sleep(SLEEP_S)


WAYS: dict[str, Callable[[Any], Awaitable[None]]] = {
    "awaited": by_await,
    "polled": _poll,
    "spun": by_blocking,
    "slept": _sleep,
}


async def parts_of(engine: GraphEngine, batch: RaggedBatch, rounds: int) -> dict[str, Any]:
    """p50 and p99 of each part, by way of waiting; "untimed" is step() without the timers."""
    report: dict[str, Any] = {}
    for way, wait in WAYS.items():
        plain = []
        for _ in range(rounds):
            started = time.perf_counter()
            lazy = engine.step(batch)
            plain.append(time.perf_counter() - started)
            await wait(lazy)
        times: dict[str, list[float]] = {}
        with timed_parts(times):
            for _ in range(rounds):
                await wait(engine.step(batch))
        report[way] = summary(plain, times)
    report["at once"] = await parts_at_once(engine, batch, rounds)
    return report


async def parts_at_once(engine: GraphEngine, batch: RaggedBatch, rounds: int) -> dict[str, Any]:
    """Of the second of two steps launched together: all that it touches is in the processor's caches."""
    plain = []
    for _ in range(rounds):
        first = engine.step(batch)
        started = time.perf_counter()
        second = engine.step(batch)
        plain.append(time.perf_counter() - started)
        await first
        await second
    times: dict[str, list[float]] = {}
    with timed_parts(times):
        for _ in range(rounds):
            first, second = engine.step(batch), engine.step(batch)
            await first
            await second
    return summary(plain, {name: seconds[1::2] for name, seconds in times.items()})


def summary(plain: list[float], times: Mapping[str, list[float]]) -> dict[str, Any]:
    """p50 and p99 of what was timed without timers inside, and with them."""
    parts = {name: microseconds(seconds) for name, seconds in times.items() if seconds}
    return {"untimed": microseconds(plain), **parts}


def entry_of(engine: GraphEngine, batch: RaggedBatch) -> tuple[GraphKey, Any]:
    """The shape of `batch` and its graph, captured if need be."""
    for _ in range(3):
        engine.step(batch).result()
    entry = max(engine._runner._captured, key=lambda entry: entry.used)
    key = entry.key
    if key.num_tokens < batch.num_tokens:
        raise RuntimeError(f"a batch of {batch.num_tokens} tokens is not captured")
    return key, entry.graph


def launches(graph: Any) -> dict[str, float]:
    """The launch of a captured forward on an idle device, alone and not."""
    executable = driver.CUgraphExec(int(graph._executable._handle))
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)

    def behind_itself() -> None:
        check(driver.cuGraphLaunch(executable, stream), "cuGraphLaunch")

    report = {
        "back to back": launch_us(executable),
        "after sleep": launch_us(executable, lambda: time.sleep(SLEEP_S)),
        "behind itself": launch_us(executable, behind_itself),
    }
    for flags in (0, 1, 8):
        ours = check(driver.cuGraphInstantiate(graph._graph.raw_cuda_graph(), flags), "cuGraphInstantiate")
        report[f"flags {flags}"] = launch_us(ours)
        driver.cuGraphExecDestroy(ours)
    return report


def variants_of(engine: GraphEngine, batch: RaggedBatch) -> dict[str, Any]:
    """The launch of the same forward otherwise: each captured anew, all forgotten afterwards."""
    forward: Any = engine._forward
    report: dict[str, Any] = {}

    def captured_anew() -> float:
        engine._runner.close()
        engine._runner._entries.clear()
        engine._shapes.clear()
        _, graph = entry_of(engine, batch)
        return launch_us(driver.CUgraphExec(int(graph._executable._handle)))

    for name in forward._backends:
        with patch.object(cuda_forward, "choose", lambda *_, name=name: name):
            report[f"attention {name}"] = attempt(captured_anew)
    if getattr(forward._model, "_fused", None) is not None:
        with patch.object(forward._model, "_fused", None):
            report["no fused products"] = attempt(captured_anew)
    report["as served"] = attempt(captured_anew)
    return report


async def measure(engine: GraphEngine, rounds: int) -> dict[str, Any]:
    """All of it, by shape; what captures other graphs comes last."""
    gc.collect()
    gc.freeze()
    batches = {f"{count}x{length}": batch_of(engine, count, length) for count, length in SHAPES}
    report: dict[str, Any] = {}
    for shape, batch in batches.items():
        key, graph = entry_of(engine, batch)
        report[shape] = {
            "attention": key.attention,
            "parts": await parts_of(engine, batch, rounds),
            "launch": attempt(functools.partial(launches, graph)),
        }
    for shape, batch in batches.items():
        _, graph = entry_of(engine, batch)
        report[shape]["kinds"] = attempt(functools.partial(kinds_of, graph._graph))
    for shape in ("1x512", "8x512", "16x512"):
        report[shape]["variants"] = attempt(functools.partial(variants_of, engine, batches[shape]))
    return report


def show(report: dict[str, Any]) -> None:
    """Print it as tables."""
    for shape, of_shape in report.items():
        ways = of_shape["parts"].values()
        print(f"\n{shape} by {of_shape['attention']}: p50 / p99 µs", *of_shape["parts"], sep="  ")
        for name in ("untimed", *(name for name, _, _ in PARTS)):
            figures = [way.get(name, {}) for way in ways]
            cells = (f"{one.get('p50_us', 0):6.1f} /{one.get('p99_us', 0):6.1f}" for one in figures)
            print(f"  {name:18}", *cells)
        for title in ("launch", "kinds", "variants"):
            figures = of_shape.get(title)
            if isinstance(figures, dict):
                print(f" {title}:", *(f"  {name}: {value}" for name, value in figures.items()), sep="\n")
            elif figures is not None:
                print(f" {title}: {figures}")


def main() -> None:
    """Load, measure, print, write."""
    arguments = parsed(__doc__, rounds=200)
    engine: Any = dummy_engine(arguments.model, EngineOptions(device="cuda", max_capture_tokens=8192))
    with (
        patch.object(torch.cuda, "CUDAGraph", kept_graph),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        report = runner.run(measure(engine, arguments.rounds))
    show(report)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    engine.close()


if __name__ == "__main__":
    main()

"""Times a step of the CUDA engine: its cost to the loop, how soon the loop learns of its end, the GPU's time.

    python docs/benchmarks/step.py [--model pplx-embed] [--out step.json] [--rounds 1000]

Weights are random, shapes are the model's. "step" is the time that Engine.step takes on the loop's thread
when the shape's graph is there. "wake" is the time from before step() until the result is in hand, by several
ways of waiting on a uvloop loop, over that of a blocking synchronize. "gpu" is the device's time a step,
copies included, from CUDA events around steps launched back to back.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.batch import Engine, RaggedBatch
from rose.engine import load_engine
from rose.engine_options import EngineOptions

ROOT = Path(__file__).resolve().parents[2]
STEP_SHAPES = ((1, 128), (16, 32), (1, 512), (8, 512))
WAKE_SHAPES = ((1, 128), (8, 512))
GPU_SHAPES = ((1, 16), (1, 128), (1, 512), (1, 4096), (8, 512), (16, 512), (32, 512))
MANY, MANY_LENGTH = 100, 512
WARM_STEPS = 5
IN_FLIGHT = 3


def batch_of(engine: Engine, count: int, length: int) -> RaggedBatch:
    """`count` random sequences of `length` tokens."""
    rng = np.random.default_rng(count * 100_003 + length)
    return RaggedBatch.pack(
        [rng.integers(0, engine.info.vocab_size, length, dtype=np.int32) for _ in range(count)]
    )


def microseconds(times_s: list[float]) -> dict[str, float]:
    """p50, p99 and mean of times in seconds, as µs."""
    ordered = sorted(times_s)
    return {
        "p50_us": round(1e6 * statistics.median(ordered), 1),
        "p99_us": round(1e6 * ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)], 1),
        "mean_us": round(1e6 * statistics.fmean(ordered), 1),
    }


async def step_times(engine: Engine, batch: RaggedBatch, rounds: int, in_flight: int) -> dict[str, float]:
    """What step() takes, with `in_flight` steps running when the next is launched."""
    running: deque[Any] = deque()
    times = []
    for number in range(WARM_STEPS + rounds):
        started = time.perf_counter()
        running.append(engine.step(batch))
        if number >= WARM_STEPS:
            times.append(time.perf_counter() - started)
        while len(running) > in_flight:
            await running.popleft()
    while running:
        await running.popleft()
    return microseconds(times)


async def by_await(lazy: Any) -> None:
    """What the server does."""
    await lazy


async def by_blocking(lazy: Any) -> None:
    """The quickest there is, but the loop stands still."""
    lazy.result()


async def by_polling(lazy: Any) -> None:
    """Ask once a turn, whatever is predicted."""
    while not lazy.done:  # noqa: ASYNC110 - asking is what is measured
        await asyncio.sleep(0)


async def by_timer(lazy: Any) -> None:
    """Sleep until 2 ms before the predicted end, then ask once a turn."""
    await asyncio.sleep(max((lazy.due_s or 0.0) - time.monotonic() - 0.002, 0.0))
    await by_polling(lazy)


def by_thread(pool: ThreadPoolExecutor) -> Callable[[Any], Awaitable[None]]:
    """A thread waits, then wakes the loop with call_soon_threadsafe."""

    async def wait(lazy: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(pool, lazy._event.synchronize)

    return wait


async def wake_times(engine: Engine, batch: RaggedBatch, rounds: int) -> dict[str, dict[str, float]]:
    """Launch to result by each way of waiting, in turns so that clocks and neighbours hit all alike."""
    pool = ThreadPoolExecutor(1, "waiter")
    ways: Mapping[str, Callable[[Any], Awaitable[None]]] = {
        "blocking": by_blocking,
        "await": by_await,
        "poll": by_polling,
        "timer+poll": by_timer,
        "thread": by_thread(pool),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM_STEPS + rounds):
        for name, wait in ways.items():
            started = time.perf_counter()
            lazy = engine.step(batch)
            await wait(lazy)
            if number >= WARM_STEPS:
                times[name].append(time.perf_counter() - started)
            await lazy
    pool.shutdown()
    measured = {name: microseconds(of_way) for name, of_way in times.items()}
    for of_way in measured.values():
        of_way["over_blocking_us"] = round(of_way["p50_us"] - measured["blocking"]["p50_us"], 1)
    return measured


def gpu_ms(engine: Engine, batches: list[RaggedBatch], repeats: int) -> float:
    """Milliseconds on the device for `batches`, one after another, the median of `repeats`."""
    for batch in batches * 3:  # eager, captured, replayed
        engine.step(batch).result()
    times = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        running: deque[Any] = deque()
        first.record()
        for batch in batches:
            running.append(engine.step(batch))
            if len(running) == IN_FLIGHT:
                running.popleft().result()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
        while running:
            running.popleft().result()
    return float(statistics.median(times))


def gpu_times(engine: Engine) -> dict[str, float]:
    """ms a step by shape, and for 100 sequences of 512 tokens in steps of 8, 16 and 32."""
    measured = {}
    back_to_back = 10
    for count, length in GPU_SHAPES:
        if length <= engine.info.max_model_len:
            batches = [batch_of(engine, count, length)] * back_to_back
            measured[f"{count}x{length}"] = round(gpu_ms(engine, batches, 10) / back_to_back, 4)
    for size in (8, 16, 32):
        sizes = [size] * (MANY // size) + ([MANY % size] if MANY % size else [])
        batches = [batch_of(engine, count, MANY_LENGTH) for count in sizes]
        measured[f"{MANY}x{MANY_LENGTH} by {size}"] = round(gpu_ms(engine, batches, 5), 3)
    return measured


async def measure(engine: Engine, rounds: int) -> dict[str, Any]:
    """Everything, on the running loop."""
    gc.collect()
    gc.freeze()  # as the server does after its start
    shapes = {f"{count}x{length}": batch_of(engine, count, length) for count, length in STEP_SHAPES}
    return {
        "step_alone": {name: await step_times(engine, batch, rounds, 0) for name, batch in shapes.items()},
        "step_two_in_flight": {
            name: await step_times(engine, batch, rounds, 1) for name, batch in shapes.items()
        },
        "wake": {
            f"{count}x{length}": await wake_times(engine, batch_of(engine, count, length), rounds // 4)
            for count, length in WAKE_SHAPES
        },
        "gpu_ms": gpu_times(engine),
    }


def show(report: Mapping[str, Any]) -> None:
    """Print the report as tables."""
    print(f"{report['model']} on {report['device']}, {report['attention']}, loaded in {report['load_s']} s")
    for title in ("step_alone", "step_two_in_flight"):
        print(f"\n{title}: p50 / p99 µs of step() on the loop")
        for shape, times in report[title].items():
            print(f"  {shape:>10}  {times['p50_us']:8.1f} {times['p99_us']:8.1f}")
    for shape, ways in report["wake"].items():
        print(f"\nwake {shape}: launch to result p50 µs, over blocking, p99")
        for name, times in ways.items():
            figures = (times[column] for column in ("p50_us", "over_blocking_us", "p99_us"))
            print(f"  {name:>10}", *(f"{figure:9.1f}" for figure in figures))
    print("\ngpu: ms a step (for 100x512: of all steps)")
    for shape, milliseconds in report["gpu_ms"].items():
        print(f"  {shape:>14}  {milliseconds:9.3f}")


def parsed(description: str | None, rounds: int) -> argparse.Namespace:
    """The flags of a script that times steps: model, out and rounds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="pplx-embed", help="a preset: pplx-embed, bge-m3, ...")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--rounds", type=int, default=rounds, help="steps timed each time")
    return parser.parse_args()


def dummy_engine(model: str, options: EngineOptions) -> Engine:
    """The engine of a preset, with random weights."""
    return load_engine(ROOT / "rose" / "presets" / model, options, dummy=True, model_name=model)


def main() -> None:
    """Load, measure, print, write."""
    arguments = parsed(__doc__, rounds=1000)
    started = time.perf_counter()
    engine = dummy_engine(arguments.model, EngineOptions(device="cuda"))
    load_s = round(time.perf_counter() - started, 2)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured = runner.run(measure(engine, arguments.rounds))
    graphs: Any = engine.stats()["graphs"]
    report = {
        "model": arguments.model,
        "device": engine.info.device,
        "dtype": engine.info.dtype,
        "attention": engine.info.attention,
        "torch": torch.__version__,
        "load_s": load_s,
        **measured,
        "graphs": graphs,
    }
    engine.close()
    show(report)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

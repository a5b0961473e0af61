"""How late the loop's other work is while long texts are tokenised beside it.

    python docs/benchmarks/tokenizer_lag.py --tokenizer tokenizer.json [--runs 5]

20 texts of a million dots, cut to 512 tokens, in four threads as a server has them, while a task sleeps for
1 ms again and again. ms, the median, 99th percentile and most of each run; then the same beside as many busy
processes as there are cores, in place of the tokeniser: what the machine's turns cost. For an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gateway.tokenization.loading import load_tokenizer
from gateway.tokenization.pool import TokenizerPool

TEXTS, CHARACTERS, MAX_TOKENS = 20, 1_000_000, 512
THREADS, INLINE_CHARS = 4, 256
SLEEP_S = 0.001
BUSY = "import time\nend = time.monotonic() + {s}\nwhile time.monotonic() < end: pass"


async def lateness_ms(work: Callable[[], Awaitable[object]]) -> tuple[float, float, float, float]:
    """Median, 99th percentile and most of how late a sleeping task is meanwhile; seconds of the work."""
    late: list[float] = []

    async def watch() -> None:
        while True:
            due_s = time.perf_counter() + SLEEP_S
            await asyncio.sleep(SLEEP_S)
            late.append(1e3 * (time.perf_counter() - due_s))

    watcher, started_s = asyncio.create_task(watch()), time.perf_counter()
    await work()
    taken_s = time.perf_counter() - started_s
    watcher.cancel()
    return float(np.median(late)), float(np.quantile(late, 0.99)), max(late), taken_s


async def beside_busy(seconds: float) -> None:
    """As many processes as cores, which only count."""
    command = (sys.executable, "-c", BUSY.format(s=seconds))
    busy = [await asyncio.create_subprocess_exec(*command) for _ in range(os.cpu_count() or 1)]
    await asyncio.gather(*(process.wait() for process in busy))


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    late = load_tokenizer(arguments.tokenizer)
    late.start()
    tokenizer = await asyncio.to_thread(late.wait)
    pool, texts = TokenizerPool(tokenizer, THREADS, INLINE_CHARS), ["." * CHARACTERS] * TEXTS
    await pool.encode(texts, MAX_TOKENS)
    gc.collect()
    gc.freeze()
    print(f"{tokenizer.backend}, load {os.getloadavg()[0]:.1f}")
    for _ in range(arguments.runs):
        figures = await lateness_ms(lambda: pool.encode(texts, MAX_TOKENS))
        print("  {:5.2f} {:6.1f} {:6.1f} ms late, {:.2f} s".format(*figures))
    print("beside busy processes")
    for _ in range(arguments.runs):
        figures = await lateness_ms(lambda: beside_busy(2.0))
        print("  {:5.2f} {:6.1f} {:6.1f} ms late, {:.2f} s".format(*figures))
    pool.close()


if __name__ == "__main__":
    uvloop.run(main())

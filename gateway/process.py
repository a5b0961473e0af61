"""What a serving process does with itself: its log, its collector, its threads beside the loop, its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import NoReturn, TextIO, TypeVar

T = TypeVar("T")


def set_up_logging(level: str, stream: TextIO | None = None) -> None:
    """Everything to `stream`, a line each. None: stdout; stderr is for the one line why the process ended."""
    form = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s"
    logging.basicConfig(
        level=level.upper(), stream=stream or sys.stdout, format=form, datefmt="%Y-%m-%dT%H:%M:%S"
    )
    logging.captureWarnings(capture=True)
    for library in ("asyncio", "httpx", "httpx2", "httpcore", "httpcore2", "huggingface_hub", "urllib3"):
        logging.getLogger(library).setLevel(logging.WARNING)


def yield_between_forwards() -> None:
    """Have OpenMP's threads sleep between parallel regions, unless the environment says otherwise.

    libgomp reads this once, when torch loads it. By default its threads spin for the next region, which takes
    the cores from those who have work: with two threads on two cores at a load of 7 to 9 a short text took
    496 to 845 ms spinning and 6 to 7 ms so.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def limit_tokenizer_threads(count: int) -> None:
    """Have the `tokenizers` library take so many threads for a list, unless the environment says otherwise.

    It reads this once, at its first list. By default it has a thread for each core, however many those are,
    and the event loop no core of its own.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", str(count))


def beside(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread that dies with the process: nothing else ends a load before its time."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return future


async def ended_within(limit_s: float, work: Callable[[], None]) -> bool:
    """Run blocking `work` beside the loop; whether it ended within `limit_s` seconds."""
    done, _ = await asyncio.wait({asyncio.wrap_future(beside(work))}, timeout=limit_s)
    return bool(done)


def quiet_collector() -> None:
    """Keep the cycle collector out of requests' way, once all that lives to the end is there.

    It need not look at torch's million objects again. And requests leave no cycles: at Python's threshold of
    700 objects it ran every 45 requests, with 64 in flight, for nothing: 5 % of the loop's time, 0.25 ms each
    and 7 ms the longest. At 10 000 it did not run once in 19 000 requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def leave(status: int) -> NoReturn:
    """End the process now, also while threads load a model, wait for a device or only begin.

    By the usual way one in 30 corpus jobs that ended soon, on a busy machine, was aborted after all was done
    (status -6): C++ ends a process whose threads, here those of Arrow's pools, go away while they start.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # whoever read it has had enough
            stream.flush()
    os._exit(status)

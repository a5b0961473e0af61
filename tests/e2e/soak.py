"""A server under steady load for as long as one likes, watched for what grows or slows.

    python -m tests.e2e.soak --seconds 480
    python -m tests.e2e.soak --seconds 120 -- --device cuda --model pplx-embed --load-format dummy

What follows `--` are flags of server.py; without any, a scripted engine serves. Lengths are random; the load
is a share of what a closed loop reaches at first. A JSON line has what was seen; exit status 0 if it is well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np
import uvloop

from tests.e2e.server_process import FAKE, REAL, ServerProcess
from tests.wire import EMBED, read_answer

# Per 100 000 requests after the first fifth; what a second of rates and buffers may take besides.
GROWTH_BYTES, SLACK_BYTES = 1e6, 8e6
GPU_GROWTH_BYTES = 64e6
# Of the host, for a CUDA graph of 230 kernels on driver 580: the heap grew by 370 MB with the first 257, by
# 30 with 18 more. Graphs are bounded (--max-graphs), and rare shapes are captured late.
GRAPH_BYTES = 1.6e6
P99_GROWTH = 1.2
LENGTHS = 512  # different requests
IN_FLIGHT = 64
MOST_FAILED = 1000  # then the server is gone
MOST_IDLE_S = 20.0
# Requests under way. Where others take the cores for long, an open loop would open connections without end,
# and what would be seen is the kernel's queue of those that nobody has accepted yet.
MOST_RUNNING = 512


@dataclass
class Sample:
    """The process at one moment."""

    at_s: float
    requests: int
    rss_bytes: int
    descriptors: int
    threads: int
    gpu_bytes: int
    graphs: int = 0


@dataclass
class Seen:
    """What a run saw. taken_s: by when each answer ended, in seconds from the beginning.

    held_back: requests that were sent later than they were due, as too many were under way.
    """

    held_back: int = 0
    samples: list[Sample] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    taken_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        return self.failures.total()


def sample(pid: int, at_s: float, requests: int) -> Sample:
    """Raises ProcessLookupError when the process has ended, or is about to: it has no memory any more."""
    status = Path(f"/proc/{pid}/status").read_text()
    memory = re.search(r"VmRSS:\s+(\d+)", status)
    if memory is None:
        raise ProcessLookupError(" ".join(status.split()[:8]))
    rss = int(memory[1]) * 1024
    threads = int(re.search(r"Threads:\s+(\d+)", status)[1])  # type: ignore[index]
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Sample(at_s, requests, rss, descriptors, threads, gpu_bytes())


async def graphs_of(server: ServerProcess) -> int:
    """CUDA graphs that the server keeps."""
    engine = (await asyncio.to_thread(server.get, "/info"))[1]["engine"]
    states: dict[str, int] = engine.get("graphs", {}).get("states", {})
    return states.get("captured", 0)


def gpu_bytes() -> int:
    """Memory in use on the first GPU; 0 where there is none."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(answer.stdout.split()[0]) << 20


def bodies(longest: int, vocab: int) -> list[bytes]:
    """Requests of one to four sequences, short ones more often than long ones."""
    rng = np.random.default_rng(7)
    made = []
    for _ in range(LENGTHS):
        lengths = np.exp(rng.uniform(0, np.log(longest), rng.integers(1, 5))).astype(int)
        body = {"input": [rng.integers(0, vocab, length).tolist() for length in lengths]}
        data = msgspec.msgpack.encode(body)
        head = f"POST {EMBED} HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\n"
        made.append(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return made


class Load:
    """Sends the bodies in turn on connections that stay."""

    def __init__(self, port: int, requests: Sequence[bytes]) -> None:
        self._port, self._requests = port, requests
        self._idle: deque[tuple[float, tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = deque()
        self.seen = Seen()
        self.begin_s = time.perf_counter()

    async def ask(self, number: int) -> None:
        try:
            connection = await self._connection()
        except OSError as error:
            self.seen.failures[type(error).__name__] += 1
            await asyncio.sleep(0.01)
            return
        sent_s = time.perf_counter()
        connection[1].write(self._requests[number % len(self._requests)])
        try:
            answer = await read_answer(connection[0])
        except (OSError, asyncio.IncompleteReadError) as error:
            self.seen.failures[type(error).__name__] += 1
            connection[1].close()
            return
        ended_s = time.perf_counter()
        if answer.status != 200:
            self.seen.failures[str(answer.status)] += 1
        self.seen.ended_s.append(ended_s - self.begin_s)
        self.seen.taken_s.append(ended_s - sent_s)
        self._idle.append((ended_s, connection))

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The one that was used last, or a new one; those that the server is about to close are given up."""
        while self._idle and time.perf_counter() - self._idle[0][0] > MOST_IDLE_S:
            self._idle.popleft()[1][1].close()
        if self._idle:
            return self._idle.pop()[1]
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def closed(self, seconds: float) -> float:
        """Requests a second of a closed loop."""
        begin_s, count = time.perf_counter(), 0

        async def client() -> None:
            nonlocal count
            while time.perf_counter() - begin_s < seconds:
                await self.ask(count)
                count += 1

        await asyncio.gather(*(client() for _ in range(IN_FLIGHT)))
        return count / (time.perf_counter() - begin_s)

    async def open(self, rate: float, seconds: float, requests: int, server: ServerProcess) -> Seen:
        """`rate` a second, until time, requests or server are over; a sample each hundredth of the time."""
        self.seen, self.begin_s = Seen(), time.perf_counter()
        running: set[asyncio.Task[None]] = set()
        number, next_sample_s = 0, 0.0
        while (now_s := time.perf_counter() - self.begin_s) < seconds and number < requests:
            if self.seen.failed > MOST_FAILED:
                break
            if now_s >= next_sample_s:
                try:
                    taken = sample(server.pid, now_s, number)
                    taken.graphs = await graphs_of(server)
                    self.seen.samples.append(taken)
                except (ProcessLookupError, OSError) as error:
                    self.seen.failures[str(error)] += 1
                    break
                next_sample_s += seconds / 100
            if number / rate - now_s > 0.001:
                await asyncio.sleep(number / rate - now_s)
            if len(running) >= MOST_RUNNING:
                self.seen.held_back += 1
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            task = asyncio.create_task(self.ask(number))
            running.add(task)
            task.add_done_callback(running.discard)
            number += 1
            if number % 16 == 0:
                await asyncio.sleep(0)
        await asyncio.gather(*running)
        if self.seen.failed <= MOST_FAILED and not server.ended:
            last = sample(server.pid, time.perf_counter() - self.begin_s, number)
            last.graphs = await graphs_of(server)
            self.seen.samples.append(last)
        return self.seen


def judge(seen: Seen) -> tuple[dict[str, object], list[str]]:
    """What was seen, and which limits it broke."""
    samples = seen.samples[len(seen.samples) // 5 :]
    requests = np.array([it.requests for it in samples], float)
    rss = np.array([it.rss_bytes - GRAPH_BYTES * it.graphs for it in samples], float)
    slope = float(np.polyfit(requests, rss, 1)[0] * 1e5) if len(samples) > 2 else 0.0
    ended, taken = np.array(seen.ended_s), np.array(seen.taken_s)
    first = taken[ended < ended.max() / 10]
    last = taken[ended >= ended.max() * 0.9]
    p99s_ms = [float(np.quantile(part, 0.99) * 1e3) for part in (first, last)]
    half = len(samples) // 2
    found: dict[str, object] = {
        "requests": len(taken),
        "seconds": round(float(ended.max()), 1),
        "failed": dict(seen.failures),
        "held_back": seen.held_back,
        "rss_mb": [round(samples[place].rss_bytes / 1e6, 1) for place in (0, -1)],
        "graphs": [samples[place].graphs for place in (0, -1)],
        "growth_mb_per_100k": round(slope / 1e6, 3),
        "p99_ms_first_last_tenth": [round(value, 2) for value in p99s_ms],
        "descriptors": [max(it.descriptors for it in part) for part in (samples[:half], samples[half:])],
        "threads": [max(it.threads for it in part) for part in (samples[:half], samples[half:])],
        "gpu_mb": [round(samples[place].gpu_bytes / 1e6) for place in (0, -1)],
    }
    grown = slope * (requests[-1] - requests[0]) / 1e5
    limits = {
        "failed": seen.failed == 0,
        "growth_mb_per_100k": slope <= GROWTH_BYTES or grown <= SLACK_BYTES,
        "p99_ms_first_last_tenth": p99s_ms[1] <= P99_GROWTH * p99s_ms[0],
        "descriptors": samples[-1].descriptors <= max(it.descriptors for it in samples[: half + 1]) + 2,
        "threads": samples[-1].threads <= max(it.threads for it in samples[: half + 1]),
        "gpu_mb": samples[-1].gpu_bytes - samples[0].gpu_bytes <= GPU_GROWTH_BYTES,
    }
    return found, [name for name, held in limits.items() if not held]


def soak(
    seconds: float, requests: int, share: float, flags: Sequence[str]
) -> tuple[dict[str, object], list[str]]:
    """Start a server, load it, end it; what was seen, and the limits that did not hold."""
    program = REAL if flags else FAKE
    flags = flags or ("--load-format", "dummy")
    env = {} if program is REAL else {"FAKE_STEP_S": "0.002"}
    with ServerProcess(
        "--port", "0", *flags, program=program, env=env, python=("-X", "faulthandler")
    ) as server:
        server.ready(600)
        info = server.get("/info")[1]["model"]
        longest = min(info["max_model_len"], 2048)
        load = Load(urlsplit(server.url).port or 0, bodies(longest, info["vocab_size"]))

        async def run() -> Seen:
            await load.closed(min(20.0, max(1.0, seconds / 10)))
            rate = share * await load.closed(min(10.0, max(1.0, seconds / 20)))
            return await load.open(rate, seconds, requests, server)

        seen = uvloop.run(run())
        if seen.failed:
            time.sleep(2.0)  # for a process that is about to end
        if seen.failed > MOST_FAILED or server.ended:
            status, last = server.wait() if server.ended else None, server.stdout[-1:]
            failed = {"failed": dict(seen.failures), "requests": len(seen.taken_s), "status": status}
            return {**failed, "stdout": last, "stderr": server.stderr}, ["failed"]
        metrics = server.get("/info")[1]["engine"]
        found, broken = judge(seen)
        found["engine"] = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        return found, broken


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--share", type=float, default=0.7, help="of what a closed loop reaches")
    parser.add_argument("server", nargs="*", help="flags of server.py, after --")
    args = parser.parse_args(argv)
    found, broken = soak(args.seconds, args.requests, args.share, args.server)
    print(json.dumps(found))
    print("held" if not broken else f"broken: {', '.join(broken)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

"""Times MiniLM on two CPU cores: our server through HTTP beside sentence-transformers in process.

    .venv/bin/python docs/benchmarks/cpu_http.py [--pairs 5] [--seconds 4] [--cpus 0,1]

Both are processes of their own with two threads, pinned to the same cores, on the same fp32 weights and
texts; they take turns, one idle while the other is timed; a pair gives a ratio. Ours is a whole exchange:
request, tokeniser, forward, answer, read by one client that sends one request after another (msgpack, one
connection) and shares the cores. Theirs is `encode` called in its own process: tokeniser, forward, normalise.
OpenMP's idle threads sleep on both sides, which is our default and not theirs; OMP_WAIT_POLICY=ACTIVE has
both spin.
Writes cpu_http.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from serving import ROOT, Server, machine

# Each is one token of MiniLM's vocabulary.
WORDS = """
river music garden winter city child light train water story guitar market letter summer engine island window
doctor paper horse field bread glass stone road friend morning evening house school the of and in a
""".split()  # noqa: SIM905, a list would be 36 lines
THREADS = 2


@dataclass(frozen=True, slots=True)
class Workload:
    """A call of `texts` texts with a number of words in the range `words`; goal: the ratio that is wanted."""

    name: str
    texts: int
    words: tuple[int, int]
    figure: str
    goal: str


WORKLOADS = (
    Workload("one short text", 1, (6, 14), "latency", "<= 0.75"),
    Workload("32 short texts", 32, (6, 14), "throughput", ">= 1.15"),
    Workload("16 texts of 256 tokens", 16, (254, 254), "throughput", ">= 1.05"),
)


def make_calls(workload: Workload, count: int = 64) -> list[list[str]]:
    """`count` calls of texts that never repeat, the same for both sides."""
    generator = random.Random(workload.name)
    return [
        [
            " ".join(generator.choices(WORDS, k=generator.randint(*workload.words)))
            for _ in range(workload.texts)
        ]
        for _ in range(count)
    ]


def time_calls(embed: Callable[[list[str]], object], calls: list[list[str]], seconds: float) -> float:
    """Median seconds of a call, over at least `seconds` seconds and five calls."""
    times: list[float] = []
    ends = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < ends:
        texts = calls[len(times) % len(calls)]
        started = time.perf_counter()
        embed(texts)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


class Ours:
    """The server, asked over one connection."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection(server.host, server.port)

    def embed(self, texts: list[str]) -> np.ndarray:
        """f32[n, dim] of `texts`."""
        headers = {"Content-Type": "application/msgpack"}
        body = msgspec.msgpack.encode({"input": texts, "truncate": True})
        self._connection.request("POST", "/v1/embeddings", body, headers)
        response = self._connection.getresponse()
        answer = msgspec.msgpack.decode(response.read())
        if response.status != 200:
            raise SystemExit(answer["error"]["message"])
        return np.frombuffer(answer["embeddings"], "<f4").reshape(answer["shape"])

    def measure(self, workload: Workload, seconds: float) -> float:
        """Median seconds of a call."""
        return time_calls(self.embed, make_calls(workload), seconds)


class Theirs:
    """sentence-transformers in a process that is told over its standard input what to time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--sentence-transformers"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ask("ready")

    def measure(self, workload: Workload, seconds: float) -> float:
        """Median seconds of a call."""
        return float(self._ask(f"{WORKLOADS.index(workload)} {seconds}"))

    def vectors(self) -> np.ndarray:
        """f32[n, dim] of the first call of the longest texts."""
        return np.array(json.loads(self._ask("vectors")), np.float32)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _ask(self, question: str) -> str:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("pipes are closed")
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


def answer_as_sentence_transformers() -> None:
    """The other process: read what to time, print seconds a call."""
    import torch
    from sentence_transformers import SentenceTransformer

    from rose.model_source import resolve

    torch.set_num_threads(THREADS)
    model = SentenceTransformer(str(resolve("minilm").path), device="cpu")

    def embed(texts: list[str]) -> np.ndarray:
        vectors: np.ndarray = model.encode(texts, show_progress_bar=False)
        return vectors

    for line in sys.stdin:
        if line.strip() == "ready":
            print("ready", flush=True)
        elif line.strip() == "vectors":
            print(json.dumps(embed(make_calls(WORKLOADS[2])[0]).tolist()), flush=True)
        else:
            index, seconds = line.split()
            calls = make_calls(WORKLOADS[int(index)])
            print(time_calls(embed, calls, float(seconds)), flush=True)


def check_same_vectors(ours: Ours, theirs: Theirs) -> None:
    """A speed is worth nothing unless both sides compute the same."""
    left, right = ours.embed(make_calls(WORKLOADS[2])[0]), theirs.vectors()
    cosines = (left * right).sum(1)
    if cosines.min() < 0.9999:
        raise SystemExit(f"the two sides disagree: smallest cosine {cosines.min()}")


def compare(ours: Ours, theirs: Theirs, workload: Workload, args: argparse.Namespace) -> dict[str, object]:
    """Pairs of seconds a call, in turns, and the median of their ratios."""
    time_calls(ours.embed, make_calls(workload), 1.0)
    theirs.measure(workload, 1.0)
    pairs = [
        (ours.measure(workload, args.seconds), theirs.measure(workload, args.seconds))
        for _ in range(args.pairs)
    ]
    latency = workload.figure == "latency"
    ratios = [mine / other if latency else other / mine for mine, other in pairs]
    mine_s, other_s = (statistics.median(side) for side in zip(*pairs, strict=True))
    values = [seconds * 1e3 if latency else workload.texts / seconds for seconds in (mine_s, other_s)]
    unit = "ms" if latency else "texts/s"
    ratio = statistics.median(ratios)
    print(
        f"{workload.name:<24}{workload.figure:<12}{values[0]:>9.2f}{values[1]:>11.2f} {unit:<8}"
        f"{ratio:>7.2f}x  ({min(ratios):.2f}..{max(ratios):.2f}), wanted {workload.goal}",
        flush=True,
    )
    return {
        "workload": workload.name,
        "figure": f"{workload.figure}, {unit}",
        "ours": round(values[0], 2),
        "sentence_transformers": round(values[1], 2),
        "ratio": round(ratio, 3),
        "ratios": [round(value, 3) for value in ratios],
        "wanted": workload.goal,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one turn")
    parser.add_argument("--cpus", default="0,1", help="cores that both sides and the client share")
    parser.add_argument("--sentence-transformers", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sentence_transformers:
        answer_as_sentence_transformers()
        return
    cpus = [int(cpu) for cpu in args.cpus.split(",")]
    os.sched_setaffinity(0, cpus)  # and so of both processes
    policy = os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    theirs = Theirs()
    print(f"{'':<24}{'':<12}{'ours':>9}{'s-t':>11}")
    with Server("--model", "minilm", "--threads", str(THREADS)) as server:
        ours = Ours(server)
        check_same_vectors(ours, theirs)
        rows = [compare(ours, theirs, workload, args) for workload in WORKLOADS]
    theirs.close()
    figures = {
        "command": "python docs/benchmarks/cpu_http.py",
        "machine": machine("torch", "sentence-transformers", "transformers", "tokenizers"),
        "threads": THREADS,
        "openmp_wait_policy": policy,
        "pairs": args.pairs,
        "rows": rows,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

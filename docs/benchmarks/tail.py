"""Where the slowest requests of a sequential client spend their time: in the server, or on the way to it.

    python docs/benchmarks/tail.py [--model NAME ...] [--batch 1x128 ...] [--rounds 2000] [-- FLAGS]

One server a model, with FLAGS; one client on one plain socket, which sleeps until its answer comes, then
one that polls for it. Microseconds: "took" as the client sees it, and what of it was "inference" (a batch's
launch to its rows), "queue" and "gateway" as the server says in its headers, and "outside": kernel, socket
and client. First the quantiles of each by itself, then their means over the requests of one band of "took".
"ran behind": milliseconds that the server's loop was ready and another thread had its core, by the kernel's
count.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from plain_client import connect, exchange, request_of, stages_us
from serving import Server

PARTS = ("took", "outside", "gateway", "queue", "inference")
QUANTILES = (0.5, 0.9, 0.99)
BANDS = ((0.0, 0.5), (0.5, 0.9), (0.9, 0.98), (0.98, 1.0))
BATCHES = ("1x128", "1x512")
WARM_ROUNDS = 150
# With fewer a band would be empty.
LEAST_ROUNDS = 20
# Ids that every vocabulary has.
VOCAB_SIZE = 20_000
DUMMY = ("--load-format", "dummy", "--device", "cuda")


def measure(address: tuple[str, int], wire: bytes, rounds: int, *, polled: bool) -> np.ndarray:
    """f64[rounds, PARTS], µs, a row a request."""
    rows = []
    with connect(address) as connection:
        for _ in range(WARM_ROUNDS):
            exchange(connection, wire)
        connection.setblocking(not polled)
        for _ in range(rounds):
            started = time.perf_counter()
            head = exchange(connection, wire)
            took = 1e6 * (time.perf_counter() - started)
            total, queue, inference = stages_us(head)
            rows.append((took, took - total, total - queue - inference, queue, inference))
    return np.array(rows)


def waited_ms(pid: int) -> float:
    """Milliseconds that a process's first thread was ready and did not run."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e6


def _tail(times: np.ndarray) -> float:
    """p99 over p50."""
    return float(np.quantile(times, 0.99) / np.quantile(times, 0.5))


def show(title: str, rows: np.ndarray, behind_ms: float) -> None:
    """Print two tables. rows: f64[n, PARTS], µs."""
    took, own = rows[:, 0], rows[:, 2:].sum(axis=1)
    print(f"\n{title}: p99 is {_tail(took):.2f} times p50; of the server's own {_tail(own):.2f};", end=" ")
    print(f"ran behind {behind_ms:.2f} ms")
    print(f"{'':>12}" + "".join(f"{name:>11}" for name in PARTS))
    for quantile in QUANTILES:
        line = np.quantile(rows, quantile, axis=0)
        print(f"{f'p{100 * quantile:.0f}':>12}" + "".join(f"{value:11.1f}" for value in line))
    ordered = rows[np.argsort(took)]
    for first, last in BANDS:
        band = ordered[int(first * len(rows)) : int(last * len(rows))]
        means = "".join(f"{value:11.1f}" for value in band.mean(axis=0))
        print(f"{f'{first:.0%} to {last:.0%}':>12}{means}")


def main() -> None:
    """Measure and print."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--model", action="append", help="a preset; repeatable")
    parser.add_argument("--batch", action="append", help="of a request, sequences x length; repeatable")
    parser.add_argument("--rounds", type=int, default=2000, help="requests of each batch and client")
    parser.add_argument("flags", nargs="*", help=f"flags of server.py (default: {' '.join(DUMMY)})")
    arguments = parser.parse_args()
    if arguments.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds is {arguments.rounds}; at least {LEAST_ROUNDS} make a table")
    for model in arguments.model or ("pplx-embed", "bge-m3"):
        with Server("--model", model, *(arguments.flags or DUMMY)) as server:
            for batch in arguments.batch or BATCHES:
                count, length = map(int, batch.split("x"))
                for polled in (False, True):
                    before_ms = waited_ms(server.pid)
                    wire = request_of(model, VOCAB_SIZE, count, length)
                    rows = measure((server.host, server.port), wire, arguments.rounds, polled=polled)
                    how = "polling" if polled else "sleeping"
                    show(f"{model}, {batch}, {how} client", rows, waited_ms(server.pid) - before_ms)


if __name__ == "__main__":
    main()

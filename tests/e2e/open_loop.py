"""A client that sends at a rate, whatever becomes of what it sent: how servers fare that cannot keep up."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tests.wire import WireAnswer, post, read_answer


@dataclass
class Outcome:
    """What became of one load.

    taken_s: seconds from sending to the last byte, by status. told_ms: x-total-time, by status.
    served_at_s: when answers of 200 ended, from the beginning of the load.
    """

    seconds: float
    taken_s: dict[int, list[float]] = field(default_factory=dict)
    told_ms: dict[int, list[float]] = field(default_factory=dict)
    served_at_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    without_retry_after: int = 0

    def add(self, answer: WireAnswer, taken_s: float, at_s: float) -> None:
        self.taken_s.setdefault(answer.status, []).append(taken_s)
        self.told_ms.setdefault(answer.status, []).append(float(answer.headers["x-total-time"]))
        if answer.status == 200:
            self.served_at_s.append(at_s)
        elif "retry-after" not in answer.headers:
            self.without_retry_after += 1

    @property
    def goodput(self) -> float:
        """Answers of 200 a second, while the load lasted but for its first tenth."""
        begin_s = self.seconds / 10
        return sum(begin_s <= at_s <= self.seconds for at_s in self.served_at_s) / (self.seconds - begin_s)

    def quantile_s(self, status: int, share: float) -> float:
        return float(np.quantile(self.taken_s[status], share))

    def __str__(self) -> str:
        parts = [f"{self.goodput:.0f} served a second"]
        for status, taken in sorted(self.taken_s.items()):
            p50, p99 = np.quantile(taken, [0.5, 0.99]) * 1e3
            told = float(np.quantile(self.told_ms[status], 0.99))
            parts.append(f"{status}: {len(taken)}, p50 {p50:.1f} ms, p99 {p99:.1f} ms (told {told:.2f} ms)")
        return "; ".join([*parts, *(f"{count} {name}" for name, count in self.errors.items())])


class OpenLoop:
    """Keeps connections, as many as it needs."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def run(self, rate: float, seconds: float, ids: list[int]) -> Outcome:
        """Send `rate` requests a second for `seconds`, each when it is due, and wait for every answer."""
        outcome = Outcome(seconds)
        sent: set[asyncio.Task[None]] = set()
        data, begin_s = post({"input": ids}), time.perf_counter()
        for number in range(int(rate * seconds)):
            wait_s = begin_s + number / rate - time.perf_counter()
            if wait_s > 0.001:
                await asyncio.sleep(wait_s)
            task = asyncio.create_task(self._ask(data, begin_s, outcome))
            sent.add(task)
            task.add_done_callback(sent.discard)
            if number % 32 == 31:
                await asyncio.sleep(0)
        await asyncio.gather(*sent)
        return outcome

    async def _ask(self, data: bytes, begin_s: float, outcome: Outcome) -> None:
        sent_s = time.perf_counter()
        try:
            if self._idle:
                connection = self._idle.pop()
            else:
                connection = await asyncio.open_connection("127.0.0.1", self._port)
            connection[1].write(data)
            answer = await asyncio.wait_for(read_answer(connection[0]), 30)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            outcome.errors[type(error).__name__] += 1
            return
        ended_s = time.perf_counter()
        outcome.add(answer, ended_s - sent_s, ended_s - begin_s)
        self._idle.append(connection)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()

from __future__ import annotations

import itertools
import math
from time import perf_counter

import numpy as np
import pytest
import uvloop

from loadgen.arrivals import Alarm, arrivals
from loadgen.plan import LoadgenError, Pacing, Shape, Stream


def stream(pacing: Pacing, rate: float, processes: int = 1) -> Stream:
    return Stream(Shape(1, 8, 8), pacing=pacing, rate=rate, processes=processes)


def first(count: int, of: Stream, index: int = 0, seed: int = 0) -> list[float]:
    return list(itertools.islice(arrivals(of, index, seed), count))


def test_constant_processes_take_turns() -> None:
    both = stream(Pacing.CONSTANT, 10.0, processes=2)
    assert first(3, both, 0) == pytest.approx([0.0, 0.2, 0.4])
    assert first(3, both, 1) == pytest.approx([0.1, 0.3, 0.5])


def test_poisson_has_the_rate_and_the_spread() -> None:
    gaps = np.diff(first(20_000, stream(Pacing.POISSON, 50.0)))
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    # Of an exponential the deviation equals the mean, and e^-1 of the gaps are longer.
    assert gaps.std() == pytest.approx(0.02, rel=0.05)
    assert (gaps > 0.02).mean() == pytest.approx(math.exp(-1), rel=0.05)


def test_poisson_is_shared_and_repeatable() -> None:
    four = stream(Pacing.POISSON, 400.0, processes=4)
    ends = [first(5000, four, index)[-1] for index in range(4)]
    assert ends == pytest.approx([50.0] * 4, rel=0.1)
    assert len(set(ends)) == 4
    assert first(10, four, 1) == first(10, four, 1) != first(10, four, 1, seed=1)


def test_a_closed_loop_has_no_times() -> None:
    with pytest.raises(LoadgenError):
        first(1, stream(Pacing.CLOSED, 1.0))


@pytest.mark.timed
def test_the_alarm_is_never_early_and_rarely_late() -> None:
    async def lateness() -> list[float]:
        late = []
        with Alarm() as alarm:
            for _ in range(50):
                at_s = perf_counter() + 0.0033
                await alarm.wait_until(at_s)
                late.append(perf_counter() - at_s)
            begun_s = perf_counter()
            await alarm.wait_until(begun_s - 1.0)
            assert perf_counter() - begun_s < 0.1
        return late

    late = sorted(uvloop.run(lateness()))
    # A millisecond timer would be 0.3 or 0.7 ms off every time: early, or late in the best case too.
    assert late[0] >= 0.0
    assert late[5] < 0.0005

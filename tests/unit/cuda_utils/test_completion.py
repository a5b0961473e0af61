"""When a loop asks a device, when it tells that an end is near, and when it sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_utils.completion import (
    FAR_S,
    IDLE_TURN_S,
    LATE_S,
    LINGER_S,
    NAP_S,
    NEAR_S,
    SOON_S,
    SPIN_S,
    WAKE_EARLY_S,
    Poller,
    pause_s,
)
from tests.virtual_loop import TURN_S, run_virtual


def test_a_distant_step_is_left_alone_until_just_before_it_is_due() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        poller = Poller(loop.time)
        pending = PassesAt(loop.time, due_s=10.0)
        await poller.wait(pending)
        assert loop.time() - 10.0 < 2 * TURN_S
        assert poller.polls <= WAKE_EARLY_S / TURN_S + 2
        assert pending.asked_first_s >= 10.0 - WAKE_EARLY_S - TURN_S

    run_virtual(main())


def test_a_step_without_a_prediction_is_asked_each_turn_and_then_at_leisure() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        poller = Poller(loop.time)
        await poller.wait(PassesAt(loop.time, 5.0, due_s=None))
        assert loop.time() - 5.0 <= 2 * NAP_S
        assert 4.9 / NAP_S < poller.polls < SPIN_S / TURN_S + 5.0 / NAP_S + 2

    run_virtual(main())


@pytest.mark.parametrize(
    ("due_s", "expected_s"),
    [
        (3 * FAR_S, [WAKE_EARLY_S, SOON_S]),
        (FAR_S - TURN_S, [NEAR_S, SOON_S]),
        (2 * NEAR_S, [NEAR_S, SOON_S]),
        (NEAR_S - TURN_S, [SOON_S]),
        (SOON_S - TURN_S, []),
    ],
    ids=["slept for", "polled for", "shorter", "short", "too short"],
)
@pytest.mark.parametrize("behind", [False, True])
def test_a_step_is_told_that_its_end_is_near(due_s: float, expected_s: list[float], behind: bool) -> None:
    """Alone, and behind one that was awaited with it."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        poller = Poller(loop.time)
        first, second = (PassesAt(loop.time, due_s=times * due_s) for times in (1, 2))
        await asyncio.gather(poller.wait(first), poller.wait(second) if behind else asyncio.sleep(0))
        for pending in (first, second) if behind else (first,):
            before_s = [(pending.due_s or 0.0) - told_s for told_s in pending.told_s]
            assert before_s == pytest.approx(expected_s, abs=2 * TURN_S)

    run_virtual(main())


def sleeps_of(loop: asyncio.AbstractEventLoop) -> list[float]:
    """How long each turn of a virtual loop from now on may sleep, in seconds."""
    sleeps: list[float] = []
    selector = loop._jumping  # type: ignore[attr-defined]
    select = selector.select

    def noted(timeout: float) -> object:
        sleeps.append(timeout)
        return select(timeout)

    selector.select = noted
    return sleeps


def test_a_loop_stays_awake_for_a_while_after_the_last_step_and_then_sleeps() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        await Poller(loop.time).wait(PassesAt(loop.time, due_s=2 * NEAR_S))
        sleeps = sleeps_of(loop)
        await asyncio.sleep(1.0)
        slept_s = max(sleeps)
        assert slept_s == pytest.approx(1.0 - LINGER_S, abs=3 * TURN_S)
        assert sleeps.index(slept_s) * TURN_S == pytest.approx(LINGER_S, abs=3 * TURN_S)

    run_virtual(main())


def test_a_loop_that_stayed_awake_sleeps_through_a_long_step() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        poller = Poller(loop.time)
        await poller.wait(PassesAt(loop.time, due_s=2 * NEAR_S))
        await asyncio.sleep(LINGER_S / 2)
        sleeps = sleeps_of(loop)
        await poller.wait(PassesAt(loop.time, due_s=loop.time() + 2 * FAR_S))
        assert max(sleeps[:3]) == pytest.approx(2 * FAR_S - WAKE_EARLY_S, abs=3 * TURN_S)

    run_virtual(main())


@pytest.mark.parametrize("due_s", [None, 0.0, -1.0], ids=["unknown", "now", "past"])
def test_a_step_whose_end_is_unknown_or_past_is_not_told(due_s: float | None) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        pending = PassesAt(loop.time, 0.01, due_s=due_s)
        await Poller(loop.time).wait(pending)
        assert pending.told_s == []

    run_virtual(main())


@pytest.mark.parametrize("due_s", [2 * NEAR_S, 3 * FAR_S], ids=["polled for", "slept for"])
def test_a_loop_with_other_work_is_not_told(due_s: float) -> None:
    async def work(loop: asyncio.AbstractEventLoop) -> None:
        while True:
            await asyncio.sleep(0)
            loop._jumping.now_s += IDLE_TURN_S  # type: ignore[attr-defined]

    async def main() -> None:
        loop = asyncio.get_running_loop()
        working = asyncio.ensure_future(work(loop))
        pending = PassesAt(loop.time, due_s=due_s)
        await Poller(loop.time).wait(pending)
        working.cancel()
        assert pending.told_s == []

    run_virtual(main())


@pytest.mark.parametrize(("left_s", "times"), [(SOON_S - TURN_S, 1), (LATE_S / 2, 0), (-0.001, 0)])
def test_a_loop_that_wakes_late_tells_it_at_most_once(left_s: float, times: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        pending = PassesAt(loop.time, 0.04, due_s=0.02)
        waiting = asyncio.ensure_future(Poller(loop.time).wait(pending))
        await asyncio.sleep(0)
        loop._jumping.now_s = 0.02 - left_s  # type: ignore[attr-defined]  # other work of the loop's
        await waiting
        assert len(pending.told_s) == times

    run_virtual(main())


@given(now=st.floats(0, 100), since=st.floats(0, 100), due=st.one_of(st.none(), st.floats(0, 100)))
def test_a_pause_never_oversleeps_the_predicted_finish(now: float, since: float, due: float | None) -> None:
    pause = pause_s(now, since, due)
    assert pause >= 0
    if due is not None and now < due:
        assert now + pause <= due
    if due is not None and due - now > FAR_S:
        assert pause > 0
    if due is not None and 0 <= due - now <= FAR_S:
        assert pause == 0
    if now - max(since, due or 0) > SPIN_S:
        assert pause == NAP_S or (due is not None and due > now)


class PassesAt:
    """Pending until a moment of `clock`, which by default is when it is due."""

    order = 0

    def __init__(
        self, clock: Callable[[], float], passes_s: float | None = None, *, due_s: float | None
    ) -> None:
        self.due_s = due_s
        self.asked_first_s = 0.0
        self.told_s: list[float] = []
        self._clock = clock
        self._passes_s = passes_s if passes_s is not None else due_s or 0.0

    @property
    def done(self) -> bool:
        self.asked_first_s = self.asked_first_s or self._clock()
        return self._clock() >= self._passes_s

    def near(self, left_s: float) -> None:
        self.told_s.append(self._clock())

"""A LazyTensor gives one outcome to all who ask, and wakes its loop by asking no more than needed."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable

import pytest
import uvloop

from cuda_utils import completion
from cuda_utils.completion import poller_of
from cuda_utils.errors import DeviceError
from cuda_utils.lazy_tensor import LazyTensor


class AskedEvent:
    """As a CUDA event: has to be asked. Passed after `queries` questions; fails with `error` if given."""

    def __init__(self, queries: float, error: DeviceError | None = None) -> None:
        self.left = queries
        self.error = error
        self.synchronized = 0

    def query(self) -> bool:
        self.left -= 1
        if self.left > 0:
            return False
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        self.synchronized += 1
        self.left = 0
        self.query()

    def subscribe(self, callback: Callable[[], None]) -> bool:
        return False


def value_or_error(error: DeviceError | None) -> str:
    if error is not None:
        raise ValueError("step failed") from error
    return "value"


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs a coroutine function on either kind of loop, with a hard timeout."""

    def run_on(main: Callable[[], object]) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(main(), 20)  # type: ignore[arg-type]

        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(bounded())

    return run_on


def test_result_always_waits_for_the_event_and_finishes_once() -> None:
    calls = list[object]()
    event = AskedEvent(5)
    lazy = LazyTensor(event, lambda error: calls.append(error) or "value")
    assert not lazy.done
    assert lazy.result() == lazy.result() == "value"
    assert event.synchronized == 1
    assert calls == [None]
    assert lazy.done


def test_the_devices_error_reaches_finish_and_its_error_every_caller(run: Callable[..., None]) -> None:
    broken = DeviceError("illegal address", sticky=True)

    async def main() -> None:
        for queries in (1, 4):
            lazy = LazyTensor(AskedEvent(queries, broken), value_or_error)
            for _ in range(2):
                with pytest.raises(ValueError, match="step failed") as caught:
                    await lazy
                assert caught.value.__cause__ is broken
        blocking = LazyTensor(AskedEvent(4, broken), value_or_error)
        with pytest.raises(ValueError, match="step failed"):
            blocking.result()

    run(main)


def test_a_failure_that_nobody_asks_for_leaves_nothing_for_the_collector() -> None:
    def fail(_: DeviceError | None) -> None:
        raise ValueError("step failed")

    event = AskedEvent(1)
    left, lazy = weakref.ref(event), LazyTensor(event, fail)
    gc.disable()
    try:
        assert lazy.done
        del lazy, event
        assert left() is None
    finally:
        gc.enable()


def test_many_awaiters_one_cancelled(run: Callable[..., None]) -> None:
    async def main() -> None:
        lazy = LazyTensor(AskedEvent(50), value_or_error)

        async def wait() -> str:
            return await lazy

        tasks = [asyncio.create_task(wait()) for _ in range(4)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[2].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, str] * 2
        assert await lazy == "value"

    run(main)


def test_only_the_oldest_is_asked_and_all_are_woken_in_order(run: Callable[..., None]) -> None:
    async def main() -> None:
        events = [AskedEvent(20), AskedEvent(2), AskedEvent(2)]
        lazies = [LazyTensor(event, value_or_error) for event in events]
        woken = list[int]()

        async def wait(number: int) -> None:
            await lazies[number]
            woken.append(number)

        await asyncio.gather(*(wait(number) for number in (2, 0, 1)))
        assert woken == [0, 1, 2]
        assert [event.left for event in events] == [0, 0, 0]  # none was asked more than it took

    run(main)


def test_nothing_is_asked_when_nothing_is_awaited(run: Callable[..., None]) -> None:
    async def main() -> None:
        poller = poller_of(asyncio.get_running_loop())
        await LazyTensor(AskedEvent(5), value_or_error)
        forever = asyncio.ensure_future(awaiting(LazyTensor(AskedEvent(float("inf")), value_or_error)))
        await asyncio.sleep(0)
        forever.cancel()
        await asyncio.sleep(0.01)  # at most one more turn finds the awaiter gone
        before = poller.polls
        for _ in range(200):
            await asyncio.sleep(0)
        assert poller.polls == before
        assert "armed=False" in repr(poller)

    run(main)


def test_a_step_that_never_ends_does_not_keep_a_core_busy(run: Callable[..., None]) -> None:
    async def main() -> None:
        lazy = LazyTensor(AskedEvent(float("inf")), value_or_error)

        async def awaiting() -> int:
            return await lazy

        started_s = time.thread_time()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(awaiting(), 0.1)
        assert not lazy.done
        assert time.thread_time() - started_s < 0.03  # SPIN_S, and a question every NAP_S

    run(main)


async def test_a_nearer_step_awaited_later_does_not_wait_for_the_timer_of_a_distant_one() -> None:
    near = LazyTensor(AskedEvent(3), value_or_error)
    outlook = Told(completion.time.monotonic() + 60)
    distant = LazyTensor(AskedEvent(3), value_or_error, outlook=outlook)
    waiting = asyncio.ensure_future(awaiting(distant))
    await asyncio.sleep(0)
    assert await asyncio.wait_for(awaiting(near), 5) == "value"
    waiting.cancel()
    assert (outlook.asked, outlook.told) == (1, 0)


async def test_a_lazy_tensor_passes_it_on_until_it_is_done() -> None:
    outlook = Told(None)
    event = AskedEvent(3)
    lazy = LazyTensor(event, value_or_error, outlook=outlook)
    lazy.near(0.001)
    assert outlook.told == 1
    assert await lazy == "value"
    lazy.near(0.001)
    assert outlook.told == 1
    LazyTensor(event, value_or_error).near(0.001)


def test_a_loop_has_one_poller_which_does_not_keep_it_alive(run: Callable[..., None]) -> None:
    loops = list[weakref.ref[asyncio.AbstractEventLoop]]()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loops.append(weakref.ref(loop))
        await LazyTensor(AskedEvent(5), value_or_error)
        assert poller_of(loop) is poller_of(loop)

    run(main)
    gc.collect()
    assert loops[0]() is None


async def awaiting(lazy: LazyTensor[str]) -> str:
    return await lazy


class Told:
    """What is known of a step: when it is due, and how often that was asked and told."""

    def __init__(self, due_s: float | None) -> None:
        self._due_s = due_s
        self.asked = self.told = 0

    def due_s(self) -> float | None:
        self.asked += 1
        return self._due_s

    def near(self, left_s: float) -> None:
        self.told += 1

"""The CPU's stream and event behave as CUDA's: order, marks, sticky errors."""

from __future__ import annotations

import threading

import pytest

from cuda_utils.errors import DeviceError
from cuda_utils.event import CpuEvent
from cuda_utils.stream import CpuStream


@pytest.fixture
def stream() -> CpuStream:
    return CpuStream("test-stream")


def broken() -> None:
    raise ValueError("boom")


def test_work_runs_in_order_and_events_mark_it(stream: CpuStream) -> None:
    gate, ran, events = threading.Event(), list[int](), [CpuEvent(stream) for _ in range(3)]
    stream.launch(lambda: gate.wait(10) or None)
    for number, event in enumerate(events):
        stream.launch(lambda number=number: ran.append(number))
        event.record()
    assert not any(event.query() for event in events)
    gate.set()
    events[-1].synchronize()
    assert ran == [0, 1, 2]
    assert all(event.query() for event in events)
    stream.close()


def test_an_event_never_recorded_counts_as_passed(stream: CpuStream) -> None:
    assert CpuEvent(stream).query()
    stream.close()


def test_only_the_last_record_counts(stream: CpuStream) -> None:
    first, second = threading.Event(), threading.Event()
    event = CpuEvent(stream)
    stream.launch(lambda: first.wait(10) or None)
    event.record()
    passed_first = threading.Event()
    stream.launch(passed_first.set)
    stream.launch(lambda: second.wait(10) or None)
    event.record()
    first.set()
    assert passed_first.wait(10)
    assert not event.query()
    second.set()
    event.synchronize()
    stream.close()


def test_subscribers_are_told_once_also_when_late(stream: CpuStream) -> None:
    gate, told, event = threading.Event(), list[str](), CpuEvent(stream)
    stream.launch(lambda: gate.wait(10) or None)
    event.record()
    assert event.subscribe(lambda: told.append("early"))
    gate.set()
    stream.close()
    assert event.subscribe(lambda: told.append("late"))
    assert told == ["early", "late"]


def test_work_that_raises_breaks_the_stream_for_good(stream: CpuStream) -> None:
    before, after, ran = CpuEvent(stream), CpuEvent(stream), list[int]()
    gate = threading.Event()
    stream.launch(lambda: gate.wait(10) or None)
    before.record()
    stream.launch(broken)
    stream.launch(lambda: ran.append(1))
    after.record()
    gate.set()
    with pytest.raises(DeviceError, match="boom") as caught:
        after.synchronize()
    assert caught.value.sticky
    assert before.query()
    assert ran == []
    with pytest.raises(DeviceError, match="boom"):
        stream.launch(broken)
    with pytest.raises(DeviceError, match="boom"):
        stream.synchronize()
    stream.close()


def test_a_start_that_fails_breaks_the_stream() -> None:
    stream = CpuStream("test-stream", broken)
    with pytest.raises(DeviceError, match="boom"):
        stream.synchronize()
    stream.close()


def test_close_runs_what_is_queued_and_refuses_more(stream: CpuStream) -> None:
    ran = list[int]()
    stream.launch(lambda: ran.append(1))
    stream.close()
    assert ran == [1]
    for refused in (lambda: stream.launch(broken), CpuEvent(stream).record, stream.synchronize):
        with pytest.raises(DeviceError, match="closed"):
            refused()
    stream.close()

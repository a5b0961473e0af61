"""When a closed loop is warm and when it has been measured, from the beats of its clients."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence

import pytest

from loadgen.conductor import ClientLostError, Setting, _done_since, _Running, _settled, run_case
from loadgen.plan import Case, Limits, Shape, Source, Stream, Target
from loadgen.processes import Ready
from loadgen.recording import Beat


def client(done: Sequence[int]) -> _Running:
    """One that had `done` answers after 1, 2, … seconds."""
    pipe, _ = multiprocessing.Pipe()
    running = _Running(Stream(Shape(1, 8, 8)), pipe)
    running.beats += [Beat(float(at), 0.0, count, 0) for at, count in enumerate(done, 1)]
    return running


@pytest.mark.parametrize(
    ("clients", "settled"),
    [
        ([range(100, 1000, 100)], True),
        # Captures in the first third only, then in the second too.
        ([[1, 2, 3, 103, 203, 303, 403, 503, 603]], True),
        ([[1, 2, 3, 4, 5, 6, 106, 206, 306]], False),
        # Ten percent faster in the last third.
        ([[100, 200, 300, 400, 500, 600, 710, 820, 930]], False),
        # 5 and 4 of them are the same as far as counting can tell; 3 are too few.
        ([[1, 2, 4, 5, 7, 9, 10, 11, 13]], True),
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9]], False),
        # Slow requests: each of four clients has had too few, together they have enough.
        ([[0, 1, 1, 1, 2, 2, 2, 3, 3]] * 4, True),
        ([[]], False),
    ],
)
def test_a_rate_has_settled(clients: list[Sequence[int]], settled: bool) -> None:
    assert _settled([client(done) for done in clients], 0.0) is settled


@pytest.mark.parametrize(("start_s", "counted"), [(0.5, 40), (2.5, 20), (3.0, 20), (4.5, 0), (9.0, 0)])
def test_nothing_of_the_warm_up_counts_as_measured(start_s: float, counted: int) -> None:
    """Beats at 1 to 5 s: answers between the start and the beat after it may be older than the start."""
    assert _done_since([client([10, 20, 30, 40, 50])], start_s) == counted
    assert _done_since([client([10, 20, 30, 40, 50]), client([])], start_s) == counted


class Gone:
    """Clients of one process that dies after it was sent so many messages; and its pipe."""

    def __init__(self, sends: int) -> None:
        self._left = sends
        self.discarded = False

    def pipes(self, count: int) -> list[Gone]:
        assert count == 1
        return [self]

    def discard(self) -> None:
        self.discarded = True

    def send(self, message: object) -> None:
        self._left -= 1
        if self._left < 0:
            raise BrokenPipeError

    def poll(self, timeout_s: float) -> bool:
        return True

    def recv(self) -> object:
        return Ready()


@pytest.mark.parametrize("sends", [0, 1], ids=["a job", "go"])
def test_a_client_that_is_dead_when_it_is_told_something_is_lost(sends: int) -> None:
    clients, case = Gone(sends), Case("1×8", "latency", (Stream(Shape(1, 8, 8)),), Limits())
    target, setting = Target("A", "127.0.0.1", 1, "openai"), Setting(Source(100))
    with pytest.raises(ClientLostError, match="a client process died"):
        run_case(clients, case, target, setting, lambda fraction: None)  # type: ignore[arg-type]
    assert clients.discarded

"""The seam between the scheduler's errors and HTTP."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import scheduler.errors
from gateway.errors import ApiError, ErrorKind, from_exception
from scheduler.errors import (
    Backlog,
    DeadlineExpired,
    Draining,
    EngineDead,
    NoReplica,
    QueueFull,
    SchedulerError,
)

BACKLOG = Backlog(10, 1, 10, 1)


def full(retry_after_s: float) -> QueueFull:
    return QueueFull(1, 1, BACKLOG, retry_after_s)


def all_scheduler_errors() -> list[type[SchedulerError]]:
    found = [value for value in vars(scheduler.errors).values() if isinstance(value, type)]
    return [kind for kind in found if issubclass(kind, SchedulerError) and kind is not SchedulerError]


@pytest.mark.parametrize("kind", all_scheduler_errors())
def test_every_scheduler_error_has_a_place(kind: type[SchedulerError]) -> None:
    """One that is added there and not here would be told as our own defect."""
    made: dict[type[SchedulerError], Callable[[], SchedulerError]] = {
        QueueFull: lambda: full(1.0),
        DeadlineExpired: lambda: DeadlineExpired(1.0),
        NoReplica: lambda: NoReplica("why", 1.0),
    }
    error = made.get(kind, lambda: kind("why"))()
    assert from_exception(error).kind is not ErrorKind.INTERNAL
    assert from_exception(error).message == str(error)


@pytest.mark.parametrize(
    ("retry_after_s", "seconds", "milliseconds"),
    [(0.0, "1", "1"), (0.25, "1", "250"), (1.0, "1", "1000"), (1.0001, "2", "1001"), (90.0, "90", "90000")],
)
def test_retry_after_is_whole_seconds_and_milliseconds(
    retry_after_s: float, seconds: str, milliseconds: str
) -> None:
    for error in (full(retry_after_s), NoReplica("why", retry_after_s)):
        headers = dict(from_exception(error).headers)
        assert headers == {"Retry-After": seconds, "retry-after-ms": milliseconds}


def test_only_what_a_reconnect_can_mend_closes_the_connection() -> None:
    assert from_exception(EngineDead("")).closes
    assert from_exception(Draining("")).closes
    assert not from_exception(full(1.0)).closes
    assert not from_exception(NoReplica("", 1.0)).closes
    assert not from_exception(DeadlineExpired(1.0)).closes


def test_our_own_errors_pass_through() -> None:
    error = ApiError(ErrorKind.INVALID_VALUE, "why")
    assert from_exception(error) is error


def test_codes_are_told_apart() -> None:
    codes = [kind.value[2] for kind in ErrorKind]
    assert len(set(codes)) == len(codes)

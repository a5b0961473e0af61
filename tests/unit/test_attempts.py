"""Only what was too slow is tried again."""

from __future__ import annotations

import pytest

from tests.attempts import TooSlowError, best_of, in_time


@pytest.mark.parametrize(("slow", "runs"), [(0, 1), (2, 3)])
def test_one_of_the_runs_must_be_in_time(slow: int, runs: int) -> None:
    seen: list[int] = []

    @best_of(3)
    def measured() -> None:
        seen.append(1)
        in_time(len(seen) > slow)

    measured()
    assert len(seen) == runs


async def test_the_last_that_is_too_slow_fails() -> None:
    seen: list[int] = []

    @best_of(2)
    async def measured() -> None:
        seen.append(1)
        in_time(False, "all the time")

    with pytest.raises(TooSlowError, match="all the time"):
        await measured()
    assert len(seen) == 2


def test_what_is_wrong_fails_at_once() -> None:
    seen: list[int] = []

    @best_of(3)
    def measured() -> None:
        seen.append(1)
        raise AssertionError("wrong")

    with pytest.raises(AssertionError, match="wrong"):
        measured()
    assert len(seen) == 1

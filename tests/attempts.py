"""Tests of times on machines that others use too."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])


class TooSlowError(AssertionError):
    """A time that others' work on the machine may have spoiled."""


def in_time(holds: bool, *seen: object) -> None:
    """Assert what a measured time says. seen: for the message.

    Raises:
        TooSlowError: it does not hold.
    """
    if not holds:
        raise TooSlowError(*seen)


def best_of(count: int) -> Callable[[Test], Test]:
    """A test whose times (`in_time`) must hold in one of `count` runs: others may have had the cores in one.

    Whatever else is wrong in any of them fails at once. Fixtures are not made anew. It has the mark `timed`.
    """

    def decorate(test: Test) -> Test:
        @wraps(test)
        async def again(*args: Any, **named: Any) -> None:
            for left in reversed(range(count)):
                try:
                    await test(*args, **named)
                    return
                except TooSlowError:
                    if not left:
                        raise
                await asyncio.sleep(0.2)  # for what was in the way

        @wraps(test)
        def again_at_once(*args: Any, **named: Any) -> None:
            for left in reversed(range(count)):
                try:
                    test(*args, **named)
                    return
                except TooSlowError:
                    if not left:
                        raise

        tried = again if inspect.iscoroutinefunction(test) else again_at_once
        return pytest.mark.timed(tried)  # type: ignore[return-value]

    return decorate

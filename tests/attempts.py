"""Tests of times on machines that others use too."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., Any])


def best_of(count: int) -> Callable[[Test], Test]:
    """A test that measures times and must hold in one of `count` runs: others may have had the cores in one.

    What is wrong, and not slow, fails in each of them. Fixtures are not made anew.
    """

    def decorate(test: Test) -> Test:
        @wraps(test)
        async def again(*args: Any, **named: Any) -> None:
            for left in reversed(range(count)):
                try:
                    await test(*args, **named)
                    return
                except AssertionError:
                    if not left:
                        raise
                await asyncio.sleep(0.2)  # for what was in the way

        @wraps(test)
        def again_at_once(*args: Any, **named: Any) -> None:
            for left in reversed(range(count)):
                try:
                    test(*args, **named)
                    return
                except AssertionError:
                    if not left:
                        raise

        return again if inspect.iscoroutinefunction(test) else again_at_once  # type: ignore[return-value]

    return decorate

"""What an engine may have beside `rose.batch.Engine`: a say in when it captures graphs."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class CapturingEngine(Protocol):
    """An engine that may stall the loop to capture a graph; told whether that would delay little."""

    capture_freely: bool


def capturing(engine: object) -> CapturingEngine | None:
    """`engine`, if it is one."""
    return engine if isinstance(engine, CapturingEngine) else None

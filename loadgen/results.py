"""Everything a run found out, as it is written to JSON and read back for a comparison."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from loadgen.check import Check
from loadgen.summary import Latency, StreamSummary

VERSION = 1


class CaseResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One case, one round, one target. failed: why there are no numbers. check: None if not asked for."""

    suite: str
    name: str
    number: int
    target: str
    streams: list[StreamSummary] = []
    tokens_per_step: float | None = None
    failed: str | None = None
    check: Check | None = None

    @property
    def valid(self) -> bool:
        """Whether the numbers may be used."""
        return self.failed is None and (self.check is None or self.check.passed)


class Results(msgspec.Struct):
    """A whole run. inputs: what was sent. left_out: cases that were not run, and why.

    overhead: of 1×512 against the echo server, so of the client itself. alone: embeddings a second of client
    and echo server, by suite and case. resumed: when it was gone on with. servers: their own pages.
    """

    started: str
    command: list[str]
    machine: dict[str, Any]
    targets: list[dict[str, Any]]
    servers: list[dict[str, Any]]
    inputs: str
    left_out: list[str]
    overhead: Latency | None = None
    alone: dict[str, float] = {}
    resumed: list[str] = []
    cases: list[CaseResult] = []
    version: int = VERSION


def now() -> str:
    """The time of day, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine() -> dict[str, Any]:
    """What the numbers depend on beside the server."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }

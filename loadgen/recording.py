"""What a client writes down while it runs, as flat arrays: 40 bytes a request, no object of its own."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from random import randrange

import numpy as np
import numpy.typing as npt

from loadgen.http1 import Response

Floats = npt.NDArray[np.float64]
SERVER_PARTS = ("queue", "tokenization", "inference")
_PARTS = tuple(re.compile(rb"x-" + part.encode() + rb"-time: *([0-9.]+)", re.I) for part in SERVER_PARTS)


@dataclass(frozen=True)
class Beat:
    """A sign of life. at_s: perf_counter. cpu_s: of the client's process so far. done: answers so far."""

    at_s: float
    cpu_s: float
    done: int
    errors: int


@dataclass(frozen=True)
class Recording:
    """One client's run; times are perf_counter seconds, which all processes of a machine share.

    intended_s, sent_s, done_s: f64[n] of the requests answered with 200. request: i32[n], which distinct one.
    server_ms: f64[n, 3], SERVER_PARTS, NaN where not told. errors: (intended second, kind) of the others.
    sequences, tokens: i64[distinct], of each distinct request.
    samples: answers kept for a check, as (number of the distinct request, response).
    """

    intended_s: Floats
    sent_s: Floats
    done_s: Floats
    request: npt.NDArray[np.int32]
    server_ms: Floats
    errors: tuple[tuple[float, str], ...]
    beats: tuple[Beat, ...]
    sequences: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    samples: tuple[tuple[int, Response], ...] = ()


@dataclass
class Recorder:
    """Takes one line a request. keep: answers to keep: the first, the last, and others drawn evenly."""

    keep: int = 0
    intended: array[float] = field(default_factory=lambda: array("d"))
    sent: array[float] = field(default_factory=lambda: array("d"))
    done: array[float] = field(default_factory=lambda: array("d"))
    request: array[int] = field(default_factory=lambda: array("i"))
    server: array[float] = field(default_factory=lambda: array("d"))
    errors: list[tuple[float, str]] = field(default_factory=list)
    samples: dict[int, tuple[int, Response]] = field(default_factory=dict)

    def answered(self, request: int, intended_s: float, sent_s: float, response: Response) -> None:
        """A response of any status."""
        if response.status != 200:
            self.failed(intended_s, f"http {response.status}")
            return
        self.intended.append(intended_s)
        self.sent.append(sent_s)
        self.done.append(response.done_s)
        self.request.append(request)
        for pattern in _PARTS:
            found = pattern.search(response.head)
            self.server.append(float(found.group(1)) if found else np.nan)
        if self.keep:
            self._sample(request, response)

    def _sample(self, request: int, response: Response) -> None:
        """Slot 0 has the first answer, slot 1 the last; each of the others is as likely to be in the rest.

        An answer is one of the others once it is no longer the last, so that none is kept twice.
        Source: J. Vitter, "Random sampling with a reservoir", algorithm R, 1985.
        """
        others = len(self.done) - 2
        if others > 0:
            slot = 1 + others if others <= self.keep - 2 else 2 + randrange(others)
            if slot < self.keep:
                self.samples[slot] = self.samples[1]
        self.samples[0 if others < 0 else 1] = (request, response)

    def failed(self, intended_s: float, kind: str) -> None:
        """A request that got no vectors."""
        self.errors.append((intended_s, kind))

    def freeze(self, beats: list[Beat], sequences: list[int], tokens: list[int]) -> Recording:
        """Everything so far."""
        return Recording(
            intended_s=np.array(self.intended),
            sent_s=np.array(self.sent),
            done_s=np.array(self.done),
            request=np.array(self.request, np.int32),
            server_ms=np.array(self.server).reshape(-1, len(SERVER_PARTS)),
            errors=tuple(self.errors),
            beats=tuple(beats),
            sequences=np.array(sequences, np.int64),
            tokens=np.array(tokens, np.int64),
            samples=tuple(self.samples.values()),
        )

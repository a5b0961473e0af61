"""Whether what a server answered under load is right: fast wrong vectors are worth nothing."""

from __future__ import annotations

import msgspec
import numpy as np

from loadgen.apis import APIS, Vectors, decode_checked
from loadgen.conductor import StreamRun
from loadgen.plan import LoadgenError, Source
from loadgen.recording import Recording
from loadgen.reference import Reference
from loadgen.requests import distinct
from loadgen.workload import Inputs

MAX_DEVIATION = 0.001
# Answers of each client, and sequences of each answer: a reference on a CPU takes seconds for a long one.
KEEP = 4
ROWS = 2


class Check(msgspec.Struct, frozen=True):
    """deviation: the largest 1 - cosine of `vectors` vectors. failed: why they could not be compared."""

    reference: str
    vectors: int
    deviation: float
    failed: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the run's numbers may be used."""
        return self.failed is None and self.vectors > 0 and self.deviation <= MAX_DEVIATION

    def __str__(self) -> str:
        if self.failed is not None:
            return f"no comparison with {self.reference}: {self.failed}"
        verdict = "ok" if self.passed else "INVALID"
        worst = f"worst cosine {1 - self.deviation:.6f} of {self.vectors} vectors"
        return f"{verdict}: {worst} to {self.reference}; {1 - MAX_DEVIATION:g} is wanted"


class Checker:
    """Compares samples of runs with `reference`, and asks it for each vector once."""

    def __init__(self, reference: Reference, source: Source) -> None:
        self._reference = reference
        self._source = source
        self._known: dict[tuple[object, ...], Vectors] = {}

    def check(self, runs: tuple[StreamRun, ...], api: str) -> Check:
        """The samples of one case."""
        deviations: list[float] = []
        try:
            for run in runs:
                for index, recording in enumerate(run.recordings):
                    deviations += self._deviations(run, index, recording, api)
        except LoadgenError as error:
            return Check(self._reference.name, 0, 1.0, str(error))
        if not deviations:
            return Check(self._reference.name, 0, 1.0, "nothing was answered")
        return Check(self._reference.name, len(deviations), max(deviations))

    def _deviations(self, run: StreamRun, index: int, recording: Recording, api: str) -> list[float]:
        requests = distinct(run.stream, self._source, index)
        found: list[float] = []
        for number, response in recording.samples:
            inputs = requests[number]
            rows = sorted({int(row) for row in np.linspace(0, len(inputs) - 1, ROWS)})
            vectors = decode_checked(APIS[api], response, len(inputs)).vectors[rows]
            found += deviations(vectors, self._right((run.stream, index, number), inputs.rows(rows)))
        return found

    def _right(self, key: tuple[object, ...], inputs: Inputs) -> Vectors:
        if key not in self._known:
            self._known[key] = self._reference.embed(inputs)
        return self._known[key]


def deviations(left: Vectors, right: Vectors) -> list[float]:
    """1 - cosine of each row of f32[n, dim] with the same row of the other; 1 for a vector of zeros.

    Raises:
        LoadgenError: the shapes differ.
    """
    if left.shape != right.shape:
        raise LoadgenError(f"vectors of shape {left.shape}, but {right.shape} of the reference")
    a, b = left.astype(np.float64), right.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosines = np.where(norms > 0, (a * b).sum(axis=1) / np.where(norms > 0, norms, 1.0), 0.0)
    return [max(0.0, 1.0 - float(cosine)) for cosine in cosines]

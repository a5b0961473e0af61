"""What a comparison of a model with its authors' code found, and whether that is near enough."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rose.batch import EngineInfo

# What rounding alone explains, by the engine's dtype: cosines of vectors, of those of single tokens, and
# differences of logits and of weights of words, which are no vectors whose length is free.
COSINES = {"float32": 0.99999, "bfloat16": 0.999, "float16": 0.999, "fp8": 0.98}
TOKEN_COSINES = {"float32": 0.9999, "bfloat16": 0.99, "float16": 0.99, "fp8": 0.9}
DIFFERENCES = {"float32": 0.001, "bfloat16": 0.25, "float16": 0.25, "fp8": 1.0}
# Of int8 values that are not what the authors' quantiser makes of the same vector: those between two steps.
INT8_SHARE = 0.01

# What a model gives of a text first of all, by its task.
MAIN: Mapping[str, str] = {"embed": "vector", "score": "logits", "sparse": "weights"}
INT8 = "int8"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one output of one case is like. output: of `MAIN`, "int8", or a token output.

    same_ids: whether both sides made the same tokens, of the same types, of the case.
    measured: by the measure of the output's criterion.
    """

    text: str
    num_tokens: int
    output: str
    same_ids: bool
    measured: float

    @property
    def name(self) -> str:
        """Enough of the text to know it by."""
        return repr(self.text if len(self.text) <= 48 else f"{self.text[:45]}...")


def _cosine(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """The least of any two rows."""
    a, b = (np.atleast_2d(rows).astype(np.float64) for rows in (ours, theirs))
    with np.errstate(invalid="ignore"):  # what is not finite gives NaN, which passes nowhere
        return float(((a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))).min())


def _difference(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """The largest of any two numbers."""
    return float(np.abs(ours - theirs).max())


def _share(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """Of numbers that are not the same; 1 if two are farther apart than neighbours."""
    apart = np.abs(ours.astype(np.int64) - theirs)
    return 1.0 if apart.max() > 1 else float(np.count_nonzero(apart)) / apart.size


_MEASURES: Mapping[str, Callable[[NDArray[Any], NDArray[Any]], float]] = {
    "cosine": _cosine,
    "difference": _difference,
    "share": _share,
}


@dataclass(frozen=True, slots=True)
class Criterion:
    """What is near enough: a cosine of at least `limit`, or a difference or a share of at most `limit`."""

    measure: Literal["cosine", "difference", "share"]
    limit: float

    def of(self, ours: NDArray[Any], theirs: NDArray[Any]) -> float:
        """What is measured of two arrays of one shape; NaN if either has one."""
        return _MEASURES[self.measure](ours, theirs)

    def met(self, finding: Finding) -> bool:
        """Whether a case is near enough. NaN never is."""
        value = finding.measured
        return value >= self.limit if self.measure == "cosine" else value <= self.limit

    def worst(self, findings: Sequence[Finding]) -> Finding:
        """The farthest case; one with NaN if there is any."""
        sign = -1.0 if self.measure == "cosine" else 1.0
        distances = [sign * finding.measured for finding in findings]
        return findings[int(np.argmax(np.where(np.isnan(distances), np.inf, distances)))]

    def __str__(self) -> str:
        return f"{'at least' if self.measure == 'cosine' else 'at most'} {self.limit:g} wanted"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What the verdict depends on."""
    parser.add_argument(
        "--threshold",
        metavar="COSINE",
        type=float,
        help="of vectors, those of single tokens too: fail below it; default: 0.99999 in float32, 0.999 in "
        "16 bits, 0.98 in fp8; of single tokens 0.9999, 0.99 and 0.9",
    )
    parser.add_argument(
        "--tolerance",
        metavar="DIFFERENCE",
        type=float,
        help="of raw logits and weights of words: fail above it; default: 0.001 in float32, 0.25 in 16 bits, "
        "1 in fp8",
    )


def criteria(info: EngineInfo, args: argparse.Namespace) -> dict[str, Criterion]:
    """Of each output that the model has, by its dtype unless a flag says otherwise; the main one last."""
    dtype, threshold = info.dtype, args.threshold
    difference = Criterion("difference", DIFFERENCES[dtype] if args.tolerance is None else args.tolerance)
    of_tokens = Criterion("cosine", TOKEN_COSINES[dtype] if threshold is None else threshold)
    wanted: dict[str, Criterion] = {
        kind: difference if kind == "lexical" else of_tokens for kind in info.token_outputs
    }
    if info.has_int8:
        wanted[INT8] = Criterion("share", INT8_SHARE)
    of_vectors = Criterion("cosine", COSINES[dtype] if threshold is None else threshold)
    return {**wanted, MAIN[info.task]: of_vectors if info.task == "embed" else difference}


def describe(findings: Sequence[Finding], wanted: Mapping[str, Criterion]) -> Iterator[str]:
    """Lines for people: what differs, the worst case of each output, and the verdict at the end."""
    main = list(wanted)[-1]
    for finding in findings:
        label = "" if finding.output == main else f"{finding.output}: "
        if not (finding.same_ids or label):
            yield f"other tokens: {finding.name}"
        criterion = wanted[finding.output]
        if not criterion.met(finding):
            value = f"{criterion.measure} {finding.measured:.7f}"
            yield f"{label}{value}, {finding.num_tokens} tokens: {finding.name}"
    verdict = "the same" if passed(findings, wanted) else "NOT the same"
    for output, criterion in wanted.items():
        found = [finding for finding in findings if finding.output == output]
        worst = criterion.worst(found)
        label, end = (f" {output}:", "") if output != main else ("", f": {verdict}")
        value = f"worst {criterion.measure} {worst.measured:.7f} of {worst.name}"
        yield f"{len(found)} texts,{label} {value} ({criterion}){end}"


def passed(findings: Sequence[Finding], wanted: Mapping[str, Criterion]) -> bool:
    """Whether every case has the same tokens and outputs that are near enough."""
    return all(finding.same_ids and wanted[finding.output].met(finding) for finding in findings)

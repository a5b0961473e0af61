"""Measured figures that plans are made of. A test holds them to the raw reports in docs/benchmarks."""

from __future__ import annotations

from bisect import bisect
from typing import NamedTuple


class Speed(NamedTuple):
    """Embeddings a second of one GPU at a length, through HTTP with four client processes."""

    model: str
    dimensions: int
    tokens: int
    embeddings_per_s: float


GPU = "H200"
# Random weights in the models' shapes, bfloat16, token ids. Source: docs/benchmarks/h200.
SPEEDS = (
    Speed("pplx-embed", 1024, 512, 1221),
    Speed("pplx-embed", 1024, 1024, 561.1),
    Speed("pplx-embed", 1024, 4096, 90.8),
    Speed("bge-m3", 1024, 512, 1862),
    Speed("bge-m3", 1024, 1024, 868.8),
    Speed("bge-m3", 1024, 4096, 149.3),
    Speed("bge-base", 768, 50, 55_963),
    Speed("bge-base", 768, 512, 5109),
)
# Bytes of text a second that are read to count lines, of one file, on one core of a Xeon.
COUNTED_BYTES_PER_S = {".jsonl": 2.0e9, ".jsonl.gz": 0.26e9, ".jsonl.zst": 0.7e9}


def speed(model: str, tokens: float) -> float:
    """Embeddings a second of one GPU for texts of so many tokens.

    Between two measured lengths, and beyond the last, seconds are a·tokens + b·tokens²; with one length
    alone, or where b would be below 0, they are in proportion to the tokens.

    Raises:
        KeyError: the model was not measured.
    """
    known = sorted((row.tokens, 1 / row.embeddings_per_s) for row in SPEEDS if row.model == model)
    if not known:
        raise KeyError(model)
    after = min(max(bisect(known, (tokens,)), 1), len(known) - 1)
    (t2, s2) = known[after]
    (t1, s1) = known[after - 1]
    slope = (s2 / t2 - s1 / t1) / (t2 - t1) if t2 > t1 else 0.0
    if slope > 0:
        return 1 / ((s1 / t1 + slope * (tokens - t1)) * tokens)
    near_t, near_s = min((t1, s1), (t2, s2), key=lambda point: abs(point[0] - tokens))
    return near_t / near_s / tokens


def extrapolated(model: str, tokens: float) -> bool:
    """Whether a length lies outside those that were measured."""
    lengths = [row.tokens for row in SPEEDS if row.model == model]
    return not min(lengths) <= tokens <= max(lengths)


def dimensions(model: str) -> int:
    """Values of the model's vectors."""
    return next(row.dimensions for row in SPEEDS if row.model == model)

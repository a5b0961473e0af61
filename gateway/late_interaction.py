"""Scores of two texts by more than one vector each: ColBERT's, and by the words that they share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gateway.token_outputs import Words
from rose.batch import Float32

# Rows of the query compared at a time: 32 MiB of products with a document of 8192 tokens.
_ROWS = 1024


def late_interactions(queries: list[Float32], documents: list[Float32]) -> NDArray[np.float64]:
    """f64[n]: `late_interaction` of each pair. May take seconds, mostly without the interpreter's lock."""
    return np.array([late_interaction(*pair) for pair in zip(queries, documents, strict=True)])


def late_interaction(query: Float32, document: Float32) -> float:
    """The mean, over rows of query f32[q, W], of the largest product with a row of document f32[d, W].

    0.0 if either has no row.
    Source: Khattab and Zaharia, ColBERT, arXiv 2004.12832; BGE-M3's authors take the mean instead of the sum.
    """
    if not len(query) or not len(document):
        return 0.0
    parts = (query[start : start + _ROWS] for start in range(0, len(query), _ROWS))
    return sum(float((part @ document.T).max(axis=1).sum(dtype=np.float64)) for part in parts) / len(query)


def shared_words(query: Words, document: Words) -> float:
    """The sum of products of what the words weigh that both texts have."""
    _, ours, theirs = np.intersect1d(query.indices, document.indices, assume_unique=True, return_indices=True)
    return float(query.values[ours].astype(np.float64) @ document.values[theirs])

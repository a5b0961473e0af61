"""The distinct requests of one client: the same every time, so that a check can make them again."""

from __future__ import annotations

import numpy as np

from loadgen import trace
from loadgen.plan import LoadgenError, Pacing, Source, Stream
from loadgen.texts import Cutter
from loadgen.workload import Inputs, random_ids

# Enough that no cache of a few could serve them, few enough to be made in a second.
MAX_DISTINCT = 64
MAX_DISTINCT_TOKENS = 1_000_000


def distinct(stream: Stream, source: Source, index: int) -> list[Inputs]:
    """What process `index` of a stream sends, over and over; a trace's share in full.

    Raises:
        LoadgenError: the corpus, the tokenizer or the trace cannot be used.
    """
    rng = np.random.default_rng([source.seed, index])
    if stream.pacing is Pacing.TRACE:
        return [trace.inputs_of(entry, source, rng) for entry in share(stream, index)]
    shape = stream.shape
    count = max(2, min(MAX_DISTINCT, MAX_DISTINCT_TOKENS // (shape.batch * shape.high)))
    if source.is_text:
        cutter = Cutter(source)
        cuts = (cutter.texts(shape, rng) for _ in range(count))
        return [Inputs(texts=texts, tokens=tokens) for texts, tokens in cuts]
    lengths = (rng.integers(shape.low, shape.high, shape.batch, endpoint=True) for _ in range(count))
    return [Inputs(random_ids(ns.tolist(), source, rng), tokens=int(ns.sum())) for ns in lengths]


def share(stream: Stream, index: int) -> list[trace.Entry]:
    """The requests of a trace that process `index` sends: every n-th."""
    if stream.trace is None:
        raise LoadgenError("a trace needs --trace")
    return trace.read(stream.trace)[index :: stream.processes]

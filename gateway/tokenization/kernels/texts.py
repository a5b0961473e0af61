"""Where one text's ids begin and end, with the template around them."""

from __future__ import annotations

import numpy as np

from gateway.tokenization.kernels.arrays import BOUNDS, CURSOR, IDS, PREFIX, STATE, SUFFIX, Int64
from gateway.tokenization.kernels.jit import array_at, inner

# Places in a kernel's state: where the next id goes, and where a text's own ids end at the latest.
OUT, LIMIT = 0, 1


@inner
def begin_text(memory: Int64) -> bool:
    """Write the template's prefix before the text cursor[0]; False: there is no room."""
    ids, bounds = array_at(memory, IDS, np.int32), array_at(memory, BOUNDS, np.int64)
    cursor, prefix = array_at(memory, CURSOR, np.int64), array_at(memory, PREFIX, np.int32)
    state = array_at(memory, STATE, np.int64)
    out = bounds[cursor[0]]
    if out + len(prefix) > len(ids):
        return False
    for index in range(len(prefix)):
        ids[out] = prefix[index]
        out += 1
    state[OUT], state[LIMIT] = out, out + cursor[2]
    return True


@inner
def end_text(memory: Int64) -> bool:
    """Cut the text's ids to what is wanted, write the suffix, go on to the next; False: there is no room."""
    ids, bounds = array_at(memory, IDS, np.int32), array_at(memory, BOUNDS, np.int64)
    cursor, suffix = array_at(memory, CURSOR, np.int64), array_at(memory, SUFFIX, np.int32)
    state = array_at(memory, STATE, np.int64)
    out = min(state[OUT], state[LIMIT])
    if out + len(suffix) > len(ids):
        return False
    for index in range(len(suffix)):
        ids[out] = suffix[index]
        out += 1
    cursor[0] += 1
    bounds[cursor[0]] = out
    return True

"""Names of the arrays that kernels pass around, and what a kernel answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rose.batch import Int32

UInt8: TypeAlias = npt.NDArray[np.uint8]
UInt16: TypeAlias = npt.NDArray[np.uint16]
UInt32: TypeAlias = npt.NDArray[np.uint32]
UInt64: TypeAlias = npt.NDArray[np.uint64]
Int64: TypeAlias = npt.NDArray[np.int64]
Float64: TypeAlias = npt.NDArray[np.float64]
Array: TypeAlias = npt.NDArray[Any]
# Read-only: a view of a bytes object.
Bytes: TypeAlias = npt.NDArray[np.uint8]

# An int64 to numba, which makes a float64 of an unsigned and a signed number; an int to the type checker.
signed: Callable[[Any], int] = np.int64  # type: ignore[assignment]

# As an index, one that numba does not look at for being negative.
unsigned: Callable[[Any], int] = np.uint64  # type: ignore[assignment]

# What a kernel answers. OK: it is through with all texts. ROOM: Output.ids is too small. WORD: a word's
# buffers are too small. BLOCK: it met a code point of a block that is not classified yet. REFER: a text is
# not for it.
OK, ROOM, WORD, BLOCK, REFER = 0, 1, 2, 3, 4
# Above these bits of the answer is where the ids end.
CODE_BITS = 3

# Class of a code point whose block is not classified yet.
UNKNOWN = 255
NUM_BLOCKS, BLOCK_SIZE = 0x1100, 256


class Words(NamedTuple):
    """What is remembered of words already tokenised; see words.py.

    slots: u64[n]. arena: i32[m], words and ids. used: i64[1], of the arena.
    """

    slots: UInt64
    arena: Int32
    used: Int64


class Output(NamedTuple):
    """Where ids go. ids: i32[c]. bounds: i64[n + 1], text t's are ids[bounds[t]:bounds[t + 1]].

    texts: i64[n + 1], text t is the bytes from texts[t] to texts[t + 1]; of a single one nobody need say it.
    cursor: i64[2]: the text that the answer is about; its BLOCK, or the least bytes of a WORD.
    prefix, suffix: i32[p] and i32[s], ids around every text.
    """

    ids: Int32
    bounds: Int64
    texts: Int64
    cursor: Int64
    prefix: Int32
    suffix: Int32


# Numbers of the arrays that every kernel has, and of the first that is its own. STATE: a kernel's variables.
IDS, BOUNDS, TEXTS, CURSOR, PREFIX, SUFFIX, STATE, OWN = range(8)
MOST_ARRAYS = 32

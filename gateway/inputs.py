"""What a request may give as input, checked: texts that are not empty, ids that the model knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np

from gateway.errors import ApiError, ErrorKind
from rose.batch import Int32


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts still to be tokenised; none is empty."""

    texts: list[str]


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Sequences of ids, i32[n] with n >= 1, each id in [0, vocab_size)."""

    sequences: list[Int32]


_INT32 = np.dtype("<i4")

Inputs: TypeAlias = Texts | TokenIds


@dataclass(frozen=True, slots=True)
class InputLimits:
    """max_tokens: of one input. max_items, max_request_tokens: of one request. Ids are below vocab_size."""

    vocab_size: int
    max_tokens: int
    max_items: int
    max_request_tokens: int


def read_input(value: str | list[str | int | list[int]] | None, limits: InputLimits) -> Inputs:
    """Check OpenAI's `input`, whichever of its four kinds it is.

    Raises:
        ApiError: INVALID_VALUE, naming the item and what is wrong with it.
    """
    if not value:
        what = "missing" if value is None else "an empty string" if value == "" else "an empty list"
        raise invalid(f"input is {what}; give a string, a list of strings, token ids, or lists of token ids")
    if isinstance(value, str):
        return Texts([value])
    kind = type(value[0])
    if set(map(type, value)) != {kind}:
        index = next(i for i, item in enumerate(value) if type(item) is not kind)
        raise invalid(f"input[{index}] is {_NAMES[type(value[index])]}, but input[0] is {_NAMES[kind]}")
    if kind is int:
        return TokenIds([_ids(cast(list[int], value), "input", limits.vocab_size)])
    check_count(len(value), limits.max_items)
    if not all(value):
        index = next(i for i, item in enumerate(value) if not item)
        raise invalid(f"input[{index}] is empty")
    if kind is str:
        return Texts(cast(list[str], value))
    rows = enumerate(cast(list[list[int]], value))
    return TokenIds([_ids(row, f"input[{i}]", limits.vocab_size) for i, row in rows])


def read_id_blocks(input_ids: memoryview, lengths: memoryview | None, limits: InputLimits) -> TokenIds:
    """Check ids given as int32 little-endian blocks: input_ids i32[T], lengths i32[n] (None: one sequence).

    Raises:
        ApiError: INVALID_VALUE, naming the item and what is wrong with it.
    """
    ids = _block(input_ids, "input_ids")
    check_range(ids, "input_ids", limits.vocab_size)
    if lengths is None:
        return TokenIds([ids])
    counts = _block(lengths, "lengths")
    check_count(len(counts), limits.max_items)
    if counts.min() < 1:
        raise invalid(f"lengths[{counts.argmin()}] is {counts.min()}; every sequence has an id", "lengths")
    ends = counts.cumsum(dtype=np.int64)  # five lengths of 2**31 - 1 must not wrap around
    if ends[-1] != len(ids):
        raise invalid(f"lengths add up to {ends[-1]}, but input_ids holds {len(ids)} ids", "lengths")
    starts = ends - counts
    return TokenIds([ids[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)])


def check_count(count: int, max_items: int) -> None:
    """Refuse a request of more than max_items inputs.

    Raises:
        ApiError: INVALID_VALUE.
    """
    if count > max_items:
        raise invalid(f"input has {count} items; this server takes at most {max_items} a request")


def check_range(ids: Int32, name: str, vocab_size: int) -> None:
    """Refuse ids, i32[n], that the model has no embedding for.

    Raises:
        ApiError: INVALID_VALUE, naming the first bad id, its place and the limit.
    """
    # As unsigned, a negative id is a huge one: one pass instead of two.
    if len(ids) and int(ids.view(np.uint32).max()) >= vocab_size:
        index = int((ids.view(np.uint32) >= vocab_size).argmax())
        raise _bad_id(int(ids[index]), f"{name}[{index}]", vocab_size)


def invalid(message: str, param: str = "input") -> ApiError:
    """An INVALID_VALUE error for the request's field `param`."""
    return ApiError(ErrorKind.INVALID_VALUE, message, param=param)


def _ids(items: Sequence[int], name: str, vocab_size: int) -> Int32:
    try:
        ids = np.array(items, np.int32)
    except OverflowError:
        index = next(i for i, item in enumerate(items) if not -(2**31) <= item < 2**31)
        raise _bad_id(items[index], f"{name}[{index}]", vocab_size) from None
    check_range(ids, name, vocab_size)
    return ids


def _block(block: memoryview, name: str) -> Int32:
    """A copy, so that the ids are aligned and the request's body can go."""
    if len(block) == 0 or len(block) % 4:
        raise invalid(f"{name} has {len(block)} bytes; it must hold int32 values, one or more", name)
    return np.frombuffer(block, _INT32).astype(np.int32)


def _bad_id(value: int, place: str, vocab_size: int) -> ApiError:
    return invalid(f"{place} is token id {value}; this model takes 0 to {vocab_size - 1}")


_NAMES = {str: "a string", int: "a token id", list: "a list of token ids"}

"""What a request may give as input, checked: texts that are not empty, ids that the model knows."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias, cast

import msgspec
import numpy as np

from gateway.errors import ApiError, ErrorKind
from rose.batch import Int32, RaggedIds


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts still to be tokenised; none is empty.

    name: the field they came from. query_name, num_queries: the first so many came from another field.
    """

    texts: list[str]
    name: str = "input"
    query_name: str = ""
    num_queries: int = 0

    def place(self, index: int) -> str:
        """How a message names text number `index`."""
        if index >= self.num_queries:
            return f"{self.name}[{index - self.num_queries}]"
        return self.query_name if self.num_queries == 1 else f"{self.query_name}[{index}]"

    def field(self, index: int) -> str:
        """The field that text number `index` came from."""
        return self.name if index >= self.num_queries else self.query_name


class TokenIds(msgspec.Struct, frozen=True):
    """Sequences of ids, i32[n] with n >= 1, each id in [0, vocab_size).

    name: the field they came from. in_block: it holds the ids of all sequences end to end.
    """

    sequences: RaggedIds
    name: str = "input"
    in_block: bool = False

    def place(self, index: int) -> str:
        """How a message names sequence number `index`."""
        return f"sequence {index} of {self.name}" if self.in_block else f"{self.name}[{index}]"

    def field(self, index: int) -> str:
        """The field that sequence number `index` came from."""
        return self.name


# Characters that a text may become which goes before each of a request's others: as a body may have bytes.
_MOST_REPEATED = 8 << 20

_INT32, _UINT32 = np.dtype("<i4"), np.dtype("<u4")

Inputs: TypeAlias = Texts | TokenIds


@dataclass(frozen=True, slots=True)
class InputLimits:
    """max_tokens: of one input. max_items, max_request_tokens: of one request. Ids are below vocab_size."""

    vocab_size: int
    max_tokens: int
    max_items: int
    max_request_tokens: int


# Without bounds, digits of any number are read: 0.2 ms for 4000 of them.
Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
InputValue: TypeAlias = str | list[str | Int64 | list[Int64]]


def read_input(value: InputValue | None, limits: InputLimits, name: str = "input") -> Inputs:
    """Check OpenAI's `input`, whichever of its four kinds it is. name: what the dialect calls it.

    Raises:
        ApiError: INVALID_VALUE, naming the item and what is wrong with it.
    """
    if not value:
        what = "missing" if value is None else "an empty string" if value == "" else "an empty list"
        message = f"{name} is {what}; give a string, a list of strings, token ids, or lists of token ids"
        raise invalid(message, name)
    if isinstance(value, str):
        return Texts([value], name)
    kind = type(value[0])
    if set(map(type, value)) != {kind}:
        index = next(i for i, item in enumerate(value) if type(item) is not kind)
        found, first = _NAMES[type(value[index])], _NAMES[kind]
        raise invalid(f"{name}[{index}] is {found}, but {name}[0] is {first}", name)
    if kind is int:
        return TokenIds(RaggedIds.of([_ids(cast(list[int], value), name, limits.vocab_size)]), name)
    check_items(value, limits.max_items, name)
    if kind is str:
        return Texts(cast(list[str], value), name)
    rows = enumerate(cast(list[list[int]], value))
    ids = [_ids(row, f"{name}[{i}]", limits.vocab_size) for i, row in rows]
    return TokenIds(RaggedIds.of(ids), name)


def check_items(items: Sequence[object], max_items: int, name: str) -> None:
    """Refuse a list that is empty, has more than max_items items, or one of them empty.

    Raises:
        ApiError: INVALID_VALUE, naming the first empty item.
    """
    if not items:
        raise invalid(f"{name} is an empty list", name)
    check_count(len(items), max_items, name)
    if not all(items):
        index = next(i for i, item in enumerate(items) if not item)
        raise invalid(f"{name}[{index}] is empty", name)


def read_id_blocks(input_ids: memoryview, lengths: memoryview | None, limits: InputLimits) -> TokenIds:
    """Check ids given as int32 little-endian blocks: input_ids i32[T], lengths i32[n] (None: one sequence).

    Raises:
        ApiError: INVALID_VALUE, naming the item and what is wrong with it.
    """
    _check_block(input_ids, "input_ids")
    # A copy: it is aligned, and the request's body can go. Of what may not be written argmax makes another.
    ids = np.frombuffer(bytearray(input_ids), _INT32)
    check_range(ids, "input_ids", limits.vocab_size)
    if lengths is None:
        return TokenIds(RaggedIds(ids, (len(ids),)), "input_ids", in_block=True)
    counts = _counts(lengths, limits.max_items)
    least, total = min(counts), sum(counts)
    if least < 1:
        raise invalid(f"lengths[{counts.index(least)}] is {least}; every sequence has an id", "lengths")
    if total != len(ids):
        raise invalid(f"lengths add up to {total}, but input_ids holds {len(ids)} ids", "lengths")
    return TokenIds(RaggedIds(ids, counts), "input_ids", in_block=True)


def check_text(text: str, name: str) -> None:
    """Refuse an empty string. name: the field that is one text.

    Raises:
        ApiError: INVALID_VALUE.
    """
    if not text:
        raise invalid(f"{name} is an empty string", name)


def check_count(count: int, max_items: int, name: str = "input") -> None:
    """Refuse a request of more than max_items inputs.

    Raises:
        ApiError: INVALID_VALUE.
    """
    if count > max_items:
        raise invalid(f"{name} has {count} items; this server takes at most {max_items} a request", name)


def check_range(ids: Int32, name: str, vocab_size: int) -> None:
    """Refuse ids, i32[n], that the model has no embedding for.

    Raises:
        ApiError: INVALID_VALUE, naming the first bad id, its place and the limit.
    """
    # As unsigned, a negative id is a huge one: one pass instead of two. argmax takes half as long as max.
    unsigned = ids.view(_UINT32)
    if len(ids) and unsigned.item(unsigned.argmax()) >= vocab_size:
        index = int((unsigned >= vocab_size).argmax())
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


def _check_block(block: memoryview, name: str) -> None:
    if len(block) == 0 or len(block) % 4:
        raise invalid(f"{name} has {len(block)} bytes; it must hold int32 values, one or more", name)


def _counts(block: memoryview, max_items: int) -> tuple[int, ...]:
    """Not through numpy: a reduction takes 2 µs whatever its size, and 8 in a process that does much else."""
    _check_block(block, "lengths")
    count = len(block) // 4
    check_count(count, max_items, "lengths")
    return struct.unpack(f"<{count}i", block)


def _bad_id(value: int, place: str, vocab_size: int) -> ApiError:
    message = f"{place} is token id {value}; this model takes 0 to {vocab_size - 1}"
    return invalid(message, place.removeprefix("tokens of ").partition("[")[0])


_NAMES = {str: "a string", int: "a token id", list: "a list of token ids"}


def check_repeated(num_chars: int, times: int, name: str) -> None:
    """Refuse a text that goes with so many others that a small body becomes gigabytes.

    num_chars: the text's characters. times: the others. name: the text's field.

    Raises:
        ApiError: INPUT_TOO_LONG.
    """
    if num_chars * times > _MOST_REPEATED:
        message = f"{name} has {num_chars} characters, and goes with each of {times} texts"
        message += f"; together that may be {_MOST_REPEATED} characters"
        raise ApiError(ErrorKind.INPUT_TOO_LONG, message, param=name)

"""Tokens of texts as /tokenize answers them: a list for each text, written a part at a time."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gateway.media import Media
from gateway.schemas import encode
from gateway.tokenization.base import TextTokens

# A few tokens are no part by themselves: a hop to a thread takes as long as some ten of them.
_PART_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Form:
    """How a codec writes a list: what begins one of so many items, what is between them, and its end."""

    begin: Callable[[int], bytes]
    between: bytes
    end: bytes


def written(texts: Iterable[TextTokens], *, num_texts: int, media: Media) -> Iterator[bytes]:
    """The list of all texts' lists of tokens, in parts that are not empty."""
    form = _FORMS[media]
    part = bytearray(form.begin(num_texts))
    for index, text in enumerate(texts):
        part += form.between * (index > 0) + form.begin(text.count)
        for number, run in enumerate(text.runs):
            items = encode(run, media)
            part += form.between * (number > 0)
            part += items[len(form.begin(len(run))) : len(items) - len(form.end)]
            if len(part) >= _PART_BYTES:
                yield bytes(part)
                part.clear()
        part += form.end
    part += form.end
    if part:
        yield bytes(part)


def _array(count: int) -> bytes:
    """What begins an array of msgpack."""
    if count < 16:
        return bytes([0x90 | count])
    return struct.pack(">BH", 0xDC, count) if count < 1 << 16 else struct.pack(">BI", 0xDD, count)


_FORMS = {Media.JSON: _Form(lambda _: b"[", b",", b"]"), Media.MSGPACK: _Form(_array, b"", b"")}

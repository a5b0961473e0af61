"""How many values a body holds, found before it is decoded: the loop stands still while they become objects.

Bytes alone bound little: 8 MiB of text are decoded in 10 ms, and 8 MiB of empty lists in 3 s or more.
"""

from __future__ import annotations

import msgspec
import numpy as np

from gateway.errors import ApiError, ErrorKind
from gateway.media import Media

# Lists and objects: 0.3 to 0.5 µs each, the collector's passes not counted. Smaller bodies hold no more.
MAX_CONTAINERS = 131_072
# 0.03 to 0.05 µs each; twice the tokens that a request may have by default.
MAX_VALUES = 2_097_152
_PART_BYTES = 1 << 18

_SCALARS = msgspec.msgpack.Decoder(list[str | int | float | bool | None])
_PARTS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_FIELDS = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
# What begins an array or map of msgpack, and how many bytes its size has; that of a short one is in the byte.
_ARRAYS, _MAPS = {0xDC: 2, 0xDD: 4}, {0xDE: 2, 0xDF: 4}


def check_values(body: bytes, media: Media) -> None:
    """Refuse a body that has too many lists and objects, or a list with too many values.

    Raises:
        ApiError: INVALID_BODY.
    """
    if len(body) <= MAX_CONTAINERS:
        return
    if media is Media.JSON:
        _check_json(body)
        return
    try:
        _check_msgpack(body)
    except (msgspec.MsgspecError, RecursionError):
        return  # told better by whoever decodes the body


def _check_json(body: bytes) -> None:
    """Count what looks like structure; if that is too much, count again outside of strings.

    The second count takes 12 ms a MiB, and ends where there is too much.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS and body.count(b",") < MAX_VALUES:
        return
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    containers = values = 0
    in_string = np.uint8(0)
    for start in range(0, len(body), _PART_BYTES):
        part = np.frombuffer(body[start : start + _PART_BYTES], np.uint8)
        strings = np.bitwise_xor.accumulate((part == ord('"')).view(np.uint8)) ^ in_string
        in_string = strings[-1]
        outside = part[strings == 0]
        containers += int(np.count_nonzero((outside == ord("[")) | (outside == ord("{"))))
        values += int(np.count_nonzero(outside == ord(",")))
        if containers > MAX_CONTAINERS:
            raise _refusal("lists and objects", MAX_CONTAINERS)
        if values >= MAX_VALUES:
            raise _refusal("values", MAX_VALUES)


def _check_msgpack(packed: bytes | msgspec.Raw) -> None:
    """Look at the sizes that arrays and maps state, and into those with large parts."""
    view = memoryview(packed)
    if len(view) <= MAX_CONTAINERS:
        return
    kind = view[0]
    if kind >> 4 == 0x9 or kind in _ARRAYS:
        size = _stated(view, _ARRAYS)
        if size > MAX_VALUES:
            raise _refusal("values", MAX_VALUES)
        if size > MAX_CONTAINERS:
            _check_scalars(view)
            return
        parts = _PARTS.decode(view)
    elif kind >> 4 == 0x8 or kind in _MAPS:
        if _stated(view, _MAPS) > MAX_CONTAINERS:
            raise _refusal("fields", MAX_CONTAINERS)
        parts = list(_FIELDS.decode(view).values())
    else:
        return
    for part in parts:
        _check_msgpack(part)


def _check_scalars(view: memoryview) -> None:
    try:
        _SCALARS.decode(view)
    except msgspec.ValidationError:
        raise _refusal("lists and objects", MAX_CONTAINERS) from None


def _stated(view: memoryview, long_forms: dict[int, int]) -> int:
    size_bytes = long_forms.get(view[0])
    return view[0] & 0xF if size_bytes is None else int.from_bytes(view[1 : 1 + size_bytes], "big")


def _refusal(what: str, most: int) -> ApiError:
    message = f"the body has too many {what}; this server takes up to {most} in a body"
    return ApiError(ErrorKind.INVALID_BODY, message)

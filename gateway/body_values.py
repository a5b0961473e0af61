"""How many values a body holds, found before it is decoded: the loop stands still while they become objects.

Bytes alone bound little: 8 MiB of text are decoded in 10 ms, and 8 MiB of empty lists in 3 s or more.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec
import numpy as np

from gateway.errors import ApiError, ErrorKind
from gateway.media import Media

# Lists and objects: 0.3 to 0.5 µs each, the collector's passes not counted. Smaller bodies hold no more.
MAX_CONTAINERS = 131_072
# 0.03 to 0.05 µs each; twice the tokens that a request may have by default.
MAX_VALUES = 2_097_152
# Each level of msgpack takes another pass over all that is in it.
_MAX_LEVELS = 32
_PART_BYTES = 1 << 18

_SCALARS = msgspec.msgpack.Decoder(list[str | int | float | bool | None])
_PARTS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_FIELDS = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
# What begins an array or map of msgpack, and how many bytes its size has; that of a short one is in the byte.
_ARRAYS, _MAPS = {0xDC: 2, 0xDD: 4}, {0xDE: 2, 0xDF: 4}


def check_values(body: bytes, media: Media) -> None:
    """Refuse a body that has too many lists and objects, or too many values.

    Raises:
        ApiError: INVALID_BODY.
    """
    if len(body) <= MAX_CONTAINERS:
        return
    if media is Media.JSON:
        _check_json(body)
        return
    with suppress(msgspec.MsgspecError, RecursionError):  # told better by whoever decodes the body
        if _is_container(body[0]):
            _Count().look(body, _MAX_LEVELS)


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


class _Count:
    """Of what was seen of a msgpack body."""

    def __init__(self) -> None:
        self._containers = self._values = 0

    def look(self, packed: bytes | msgspec.Raw, levels: int) -> None:
        """Count what an array or map and those in it state, `levels` deep at most; first the outer one.

        Raises:
            ApiError: INVALID_BODY.
            MsgspecError, RecursionError: it is no msgpack.
        """
        view = memoryview(packed)
        is_array = _is_array(view[0])
        size = _stated(view, _ARRAYS if is_array else _MAPS)
        self._values += size
        if self._values > MAX_VALUES:
            raise _refusal("values", MAX_VALUES)
        if size > MAX_CONTAINERS:
            if not is_array:
                raise _refusal("fields", MAX_CONTAINERS)
            _check_scalars(view)
            return
        parts = _PARTS.decode(view) if is_array else list(_FIELDS.decode(view).values())
        inner = [part for part in parts if _is_container(memoryview(part)[0])]
        self._containers += len(inner)
        if self._containers >= MAX_CONTAINERS:
            raise _refusal("lists and objects", MAX_CONTAINERS)
        if inner and not levels:
            raise _refusal("levels", _MAX_LEVELS)
        for part in inner:
            self.look(part, levels - 1)


def _is_array(kind: int) -> bool:
    return kind >> 4 == 0x9 or kind in _ARRAYS


def _is_container(kind: int) -> bool:
    return _is_array(kind) or kind >> 4 == 0x8 or kind in _MAPS


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

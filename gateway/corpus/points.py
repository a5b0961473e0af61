"""Rows of a window as points of Qdrant, each under an id that is the same in every run."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
import orjson

from gateway.corpus.windows import Window

# Of an upsert's body, of which Qdrant takes 32 MB; of a value, and of the rest of a point, about.
_MOST_BODY_BYTES, _VALUE_BYTES, _PAYLOAD_BYTES = 4 << 20, 13, 512
_MOST_ID = (1 << 64) - 1


def point_id(file: str, row: int, id_: object) -> int | str:
    """A row's id as Qdrant takes them: unsigned integers and UUIDs as they are, else a UUID5 of what it has.

    That is, in the namespace of URLs, its id's text, or FILE#ROW if it has none.
    """
    if isinstance(id_, int) and 0 <= id_ <= _MOST_ID:
        return id_
    if isinstance(id_, str) and _is_uuid(id_):
        return id_
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{file}#{row}" if id_ is None else str(id_)))


def _is_uuid(text: str) -> bool:
    """Only as UUIDs are written: of what is read as one, two texts can be the same."""
    try:
        return len(text) == 36 and str(uuid.UUID(text)) == text
    except ValueError:
        return False


def bodies_of(window: Window) -> Iterator[list[int]]:
    """Places of the window's rows that have a vector, as many as one upsert takes."""
    if window.values is None:
        return
    places = [place for place in range(len(window.rows)) if place not in window.reasons]
    most = max(1, _MOST_BODY_BYTES // (window.values.shape[1] * _VALUE_BYTES + _PAYLOAD_BYTES))
    for start in range(0, len(places), most):
        yield places[start : start + most]


def body_of(window: Window, places: list[int]) -> bytes:
    """The upsert of these rows: PointsBatch of Qdrant's schema, in JSON."""
    assert window.values is not None
    rows = [(window.files[place], window.rows[place], window.ids[place]) for place in places]
    payloads = [{"file": file, "row": row} | ({} if id_ is None else {"id": id_}) for file, row, id_ in rows]
    vectors = np.ascontiguousarray(window.values[places], np.float32)
    batch = {"ids": [point_id(*row) for row in rows], "vectors": vectors, "payloads": payloads}
    return orjson.dumps({"batch": batch}, option=orjson.OPT_SERIALIZE_NUMPY)

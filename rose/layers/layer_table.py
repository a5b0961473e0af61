"""From the best ways of whole layers to lines of the table that `rose.kernels.fused` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rose.kernels.fused import FusedKey
from rose.layers.layer_case import Case, Way, products_of

Line = dict[str, Any]


def lines_of(case: Case, way: Way, m: int, us: tuple[float, float]) -> list[Line]:
    """What `way` says of every product of every mode from m rows on. us: a layer's, so and by the base.

    Other modes' are the base's, by which the last layer ends, or none. Of launches only whether they are
    early: `rose.kernels.early` has one way for that.
    """
    chosen: dict[FusedKey, str | None] = {
        (epilogue, *case.shapes[place]): None
        for epilogues in case.epilogues.values()
        for place, epilogue in epilogues.items()
    }
    chosen |= products_of(case, case.base) | products_of(case, way)
    times = {"us": round(us[0], 2), "plain_us": round(us[1], 2)}
    early = way["early"] != "NO"
    return [
        {"epilogue": epilogue, "n": n, "k": k, "min_m": m, "kernel": kernel}
        | ({"early": True} if early and kernel is not None else {})
        | times
        for (epilogue, n, k), kernel in chosen.items()
    ]


def merged(old: Sequence[Line], new: Sequence[Line], resume: int | None) -> list[Line]:
    """`old` with `new` in place of what it says of the same products from their first rows up to `resume`.

    resume: where the old choice holds again; None: nowhere. Lines that repeat the one for fewer rows are left
    out.
    """
    kept: list[Line] = []
    for key in dict.fromkeys(_key(line) for line in [*old, *new]):
        before = sorted((line for line in old if _key(line) == key), key=_rows)
        mine = sorted((line for line in new if _key(line) == key), key=_rows)
        if mine:
            below = [line for line in before if _rows(line) < _rows(mine[0])]
            again = [] if resume is None else _from(before, resume, mine[-1])
            before = [*below, *mine, *again]
        last = (None, False)
        for line in before:
            said = (line["kernel"], line.get("early", False))
            if said != last:
                kept.append(line)
            last = said
    return kept


def _from(lines: Sequence[Line], rows: int, like: Line) -> list[Line]:
    """What `lines`, by rising rows, say from so many on; no kernel where they say nothing."""
    serving = [line for line in lines if _rows(line) <= rows]
    none = {**like, "kernel": None, "early": False}
    again = (serving[-1] if serving else none) | {"min_m": rows}
    return [again, *(line for line in lines if _rows(line) > rows)]


def _key(line: Mapping[str, Any]) -> tuple[str, int, int]:
    return (line["epilogue"], line["n"], line["k"])


def _rows(line: Mapping[str, Any]) -> int:
    rows: int = line["min_m"]
    return rows

"""Which shapes have a CUDA graph: the engine's shapes as cells of tokens and sequences, and what changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# Of shapes that share a cell (other outputs, other attention) the best is told.
_STATES = ("uncapturable", "cold", "warmed", "captured")
# Tokens, sequences, state, replays, steps in all.
Cell = tuple[int, int, str, int, int]


class Coverage:
    """Graphs as `Engine.stats` tells them. Tokens of a cell are 0 above what is captured at all."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, int], Cell] = {}

    def whole(self, graphs: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """All that is known; None: this engine has no graphs. Does not count as told to others."""
        if graphs is None:
            return None
        return {
            "mode": graphs["mode"],
            "max_tokens": graphs["max_capture_tokens"],
            "token_buckets": graphs.get("token_buckets", ()),
            "sequence_buckets": graphs.get("sequence_buckets", ()),
            "cells": list(_cells(graphs).values()),
        }

    def changes(self, graphs: Mapping[str, Any] | None) -> list[Cell]:
        """The cells that are not as they were at the last call."""
        if graphs is None:
            return []
        cells = _cells(graphs)
        changed = [cell for place, cell in cells.items() if self._told.get(place) != cell]
        self._told = cells
        return changed


def _cells(graphs: Mapping[str, Any]) -> dict[tuple[int, int], Cell]:
    most = graphs["max_capture_tokens"]
    cells: dict[tuple[int, int], Cell] = {}
    for shape in _shapes(graphs):
        tokens = shape["num_tokens"] if shape["num_tokens"] <= most else 0
        place = tokens, shape["num_seqs"]
        _, _, state, replays, steps = cells.get(place, (*place, "uncapturable", 0, 0))
        best = max(state, shape["state"], key=_STATES.index)
        replays += shape["replayed"]
        steps += shape["eager"] + shape["captures"] + shape["replayed"]
        cells[place] = (*place, best, replays, steps)
    return cells


def _shapes(graphs: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    shapes: Iterable[Mapping[str, Any]] = graphs["buckets"]
    return shapes

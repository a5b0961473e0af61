"""Sort a batch's sequences by length, so that a CPU backend can take equal ones together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from rose.device_batch import Outputs

if TYPE_CHECKING:
    from rose.device_batch import DeviceBatch


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows and tokens of a sorted batch were before.

    rows: i64[S], or None if they keep their order, because they are spans. tokens: i64[T]; padding stays.
    """

    rows: torch.Tensor | None
    tokens: torch.Tensor


def sorted_by_length(batch: DeviceBatch) -> tuple[DeviceBatch, Places | None]:
    """The batch with its sequences in order of length, and where they were; None: the order was right.

    What a backend's `plan` was told of the old order no longer holds, so only for those that plan nothing
    (on a CPU: all).
    """
    offsets = batch.host_cu_seqlens
    lengths = np.diff(offsets)
    if (lengths[1:] >= lengths[:-1]).all():
        return batch, None
    order = np.argsort(lengths, kind="stable")
    sorted_offsets = np.zeros_like(offsets)
    np.cumsum(lengths[order], out=sorted_offsets[1:])
    shift = np.repeat(offsets[:-1][order] - sorted_offsets[:-1], lengths[order])
    tokens = torch.arange(batch.num_tokens)
    tokens[: len(shift)] += torch.from_numpy(shift)
    types, spans = batch.token_type_ids, batch.spans
    if spans is not None:
        owner = np.searchsorted(offsets, spans[0].numpy(), side="right") - 1
        moves = np.zeros(len(order) + 1, np.int32)  # the last is for an empty span at the batch's end
        moves[order] = sorted_offsets[:-1] - offsets[:-1][order]
        spans = spans + torch.from_numpy(moves[owner])
    reordered = replace(
        batch,
        input_ids=batch.input_ids[tokens],
        cu_seqlens=torch.from_numpy(sorted_offsets),
        token_type_ids=None if types is None else types[tokens],
        host_cu_seqlens=sorted_offsets,
        spans=spans,
    )
    return reordered, Places(torch.from_numpy(order) if spans is None else None, tokens)


def run_by_length(batch: DeviceBatch, outputs: Outputs, run: Callable[[DeviceBatch, Outputs], None]) -> None:
    """`run` a forward on the batch in order of length, and put its rows back where they belong."""
    by_length, places = sorted_by_length(batch)
    if places is None or (places.rows is None and not outputs.tokens):
        run(by_length, outputs)
        return
    int8 = None if outputs.int8 is None else torch.empty_like(outputs.int8)
    tokens = {kind: torch.empty_like(rows) for kind, rows in outputs.tokens.items()}
    found = Outputs(torch.empty_like(outputs.vectors), int8, tokens)
    run(by_length, found)
    rows = slice(None) if places.rows is None else places.rows
    outputs.vectors[rows] = found.vectors
    if outputs.int8 is not None and found.int8 is not None:
        outputs.int8[rows] = found.int8
    for kind, values in tokens.items():
        outputs.tokens[kind][places.tokens] = values

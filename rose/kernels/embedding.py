"""From token ids and offsets to the first layer's input, in one pass; positions come from the offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rose.kernels import dispatch
from rose.kernels.norm import LayerNorm, RmsNorm, layer_normalized, rms_normalized

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class EmbeddedTokens:
    """Where `embed_tokens` writes: residual [T, H] (the rows), hidden [T, H] (normed), positions i32[T]."""

    residual: Tensor
    hidden: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class BertTables:
    """word [V, H]; position [P, H] and token_type [N, H], each or None; the LayerNorm over their sum.

    position_offset: row of `position` that a sequence's first token takes (BERT 0, RoBERTa and XLM-R 2).
    """

    word: Tensor
    position: Tensor | None
    token_type: Tensor | None
    norm: LayerNorm
    position_offset: int = 0


def embed_tokens(
    input_ids: Tensor, cu_seqlens: Tensor, table: Tensor, norm: RmsNorm, out: EmbeddedTokens
) -> None:
    """residual = table[id], hidden = norm(residual), position = place of the token in its sequence.

    input_ids: i32[T]; one outside [0, V) counts as 0. cu_seqlens: i32[S+1]. table: [V, H].
    Rows past cu_seqlens[-1] are written too, at position 0.
    """
    if dispatch.uses_triton(table):
        from rose.kernels.jit import embedding as jit

        jit.embed_tokens(input_ids, cu_seqlens, table, norm, out)
    else:
        rows = table[rows_of(input_ids, table)].float()
        out.residual.copy_(rows)
        out.hidden.copy_(rms_normalized(rows, norm))
        out.positions.copy_(token_positions(cu_seqlens, len(input_ids)))


def embed_bert(
    input_ids: Tensor, cu_seqlens: Tensor, token_type_ids: Tensor | None, tables: BertTables, out: Tensor
) -> None:
    """out [T, H] = LayerNorm(word[id] + position[offset + place in sequence] + token_type[type]).

    input_ids: i32[T]. cu_seqlens: i32[S+1]. token_type_ids: i32[T] or None (all zero).
    A table that is None counts as zeros, an id or type that its table has no row of as 0.
    Rows past cu_seqlens[-1] are written too, at place 0.
    """
    if dispatch.uses_triton(out):
        from rose.kernels.jit import embedding as jit

        jit.embed_bert(input_ids, cu_seqlens, token_type_ids, tables, out)
        return
    total = layer_input(input_ids, cu_seqlens, token_type_ids, tables)
    out.copy_(layer_normalized(total, tables.norm))


def layer_input(
    input_ids: Tensor, cu_seqlens: Tensor, token_type_ids: Tensor | None, tables: BertTables
) -> Tensor:
    """f32[T, H]: what `embed_bert` norms. Arguments as there."""
    total = tables.word[rows_of(input_ids, tables.word)].float()
    if tables.position is not None:
        places = token_positions(cu_seqlens, len(input_ids)).long() + tables.position_offset
        total = total + tables.position[places].float()
    if tables.token_type is not None:
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        total = total + tables.token_type[rows_of(types, tables.token_type)].float()
    return total


def rows_of(ids: Tensor, table: Tensor) -> Tensor:
    """i64[T]: the rows of `table` that are read for `ids`."""
    return torch.where((ids >= 0) & (ids < len(table)), ids, 0).long()


def write_positions(cu_seqlens: Tensor, out: Tensor) -> None:
    """out i32[T] = each token's place in its sequence; 0 past cu_seqlens[-1]. cu_seqlens: i32[S+1]."""
    if dispatch.uses_triton(out):
        from rose.kernels.jit import embedding as jit

        jit.write_positions(cu_seqlens, out)
    else:
        out.copy_(token_positions(cu_seqlens, len(out)))


def token_positions(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """i32[T]: each token's place in its sequence; 0 past cu_seqlens[-1]."""
    tokens = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    places = tokens - cu_seqlens[sequence]
    return torch.where(tokens < cu_seqlens[-1], places, torch.zeros_like(places)).int()

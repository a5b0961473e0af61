"""The first layer's queries, keys and values by lookup, in the place of the embedding and a product.

What comes before the first attention knows no other token: a decoder's QKV follows from the id alone, but for
its rotation; BERT's, where a position is added before the LayerNorm, from id, place and one factor a token.
Rows of tables are made in fp32 and rounded where a product would round its input.
Source: Graef, "Transformer tricks: precomputing the first layer", arXiv 2402.13388; BERT's sum is our own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rose.kernels import dispatch
from rose.kernels.embedding import layer_input, rows_of, token_positions
from rose.kernels.norm import layer_normalized
from rose.kernels.rope import rotated

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.embedding import BertTables
    from rose.kernels.rope import QkRope


@dataclass(frozen=True, slots=True)
class RotaryQkvTable:
    """qkv: [V, (Hq + 2 Hk) D], normed, not yet rotated. rope: how a row is laid out; without a bias."""

    qkv: Tensor
    rope: QkRope


@dataclass(frozen=True, slots=True)
class QkvRows:
    """Where `embed_rotary_qkv` writes: residual [T, H], qkv [T, (Hq + 2 Hk) D], positions i32[T]."""

    residual: Tensor
    qkv: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class BertQkvTables:
    """QKV [3H] = (word[id] + position[place] + token_type[type]) / deviation + constant.

    Deviation is that of the LayerNorm over the embeddings' sum. word: [V, 3H], with what all positions have
    in common and type 0's. position: [P, 3H] from a sequence's first token on, and token_type: [N, 3H], less
    these. constant: f32[3H].
    """

    word: Tensor
    position: Tensor
    token_type: Tensor
    constant: Tensor


def embed_rotary_qkv(
    input_ids: Tensor, cu_seqlens: Tensor, embeddings: Tensor, table: RotaryQkvTable, out: QkvRows
) -> None:
    """residual = embeddings[id], qkv = table's row, rotated, position = place of the token in its sequence.

    input_ids: i32[T]; one outside [0, V) counts as 0. cu_seqlens: i32[S+1]. embeddings: [V, H].
    Rows past cu_seqlens[-1] are written too, at position 0.
    """
    if dispatch.uses_triton(out.qkv):
        from rose.kernels.jit import token_qkv as jit

        jit.embed_rotary_qkv(input_ids, cu_seqlens, embeddings, table, out)
        return
    rows = rows_of(input_ids, embeddings)
    out.positions.copy_(token_positions(cu_seqlens, len(input_ids)))
    out.residual.copy_(embeddings[rows])
    heads = table.qkv[rows].view(len(rows), -1, table.rope.head_dim)
    turning = heads[:, : table.rope.rotated_heads].float()
    turned = rotated(turning, out.positions, table.rope).to(heads.dtype)
    out.qkv.copy_(torch.cat([turned, heads[:, table.rope.rotated_heads :]], dim=1).flatten(1))


def embed_bert_qkv(
    input_ids: Tensor,
    cu_seqlens: Tensor,
    token_type_ids: Tensor | None,
    tables: tuple[BertTables, BertQkvTables],
    out: tuple[Tensor, Tensor],
) -> None:
    """out = (hidden [T, H], as of `embed_bert`, and the first layer's QKV of it [T, 3H]).

    Arguments as of `embed_bert`.
    """
    (embeddings, products), (hidden, qkv) = tables, out
    if dispatch.uses_triton(hidden):
        from rose.kernels.jit import token_qkv as jit

        jit.embed_bert_qkv(input_ids, cu_seqlens, token_type_ids, tables, out)
        return
    total = layer_input(input_ids, cu_seqlens, token_type_ids, embeddings)
    hidden.copy_(layer_normalized(total, embeddings.norm))
    factor = torch.rsqrt(total.var(-1, correction=0, keepdim=True) + embeddings.norm.eps)
    places = token_positions(cu_seqlens, len(input_ids)).long()
    product = products.word[rows_of(input_ids, products.word)].float() + products.position[places].float()
    if token_type_ids is not None:
        product = product + products.token_type[rows_of(token_type_ids, products.token_type)].float()
    qkv.copy_(product * factor + products.constant)

"""Makes the tables of `rose.kernels.token_qkv` while a model loads, in fp32 and rounded once.

pplx-embed-0.6b's takes 1.2 GB and BGE-M3's 1.5: a small part of a large GPU's memory, where there is no KV
cache, for a hundredth of the arithmetic of all forwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rose.kernels.norm import rms_normalized
from rose.kernels.rope import normed
from rose.kernels.token_qkv import BertQkvTables, RotaryQkvTable

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.embedding import BertTables
    from rose.kernels.norm import RmsNorm
    from rose.kernels.rope import QkRope

log = logging.getLogger(__name__)

# Rows of a table that are made at once, in fp32.
_ROWS = 8192
# A table may take this part of a GPU's memory, and a few times as much must be free.
_SHARE, _FREE = 1 / 40, 4


def rotary_qkv_table(
    embeddings: Tensor, norm: RmsNorm, weight: Tensor | None, rope: QkRope
) -> RotaryQkvTable | None:
    """Of every row of `embeddings` [V, H] in a decoder's first layer; None where there is no room.

    norm: before that layer. weight: [(Hq + 2 Hk) D, H], of its QKV, if it is kept. Heads with a bias, which
    may be large, have none: it would be rounded with them.
    """
    if weight is None or rope.bias is not None or not _has_room(embeddings, len(weight)):
        return None
    product, rotating = weight.float().T, rope.rotated_heads * rope.head_dim

    def qkv(rows: Tensor) -> Tensor:
        made = rms_normalized(rows, norm) @ product
        heads = made[:, :rotating].view(len(made), -1, rope.head_dim)
        return torch.cat([normed(heads, rope).flatten(1), made[:, rotating:]], dim=1)

    return RotaryQkvTable(_table(embeddings, len(weight), qkv), rope)


def bert_qkv_tables(tables: BertTables, weight: Tensor | None, bias: Tensor) -> BertQkvTables | None:
    """Of every row of the embeddings in a BERT's first layer; None where there is no room.

    weight: [3H, H], of its QKV, if it is kept. bias: [3H]. What all positions have in common goes with the
    words, where it may take away from what they have in common: both tables are rounded.
    """
    word, position, token_type, norm = tables.word, tables.position, tables.token_type, tables.norm
    if weight is None or position is None or token_type is None or not _has_room(word, len(weight)):
        return None
    product = weight.float().T

    def qkv(rows: Tensor) -> Tensor:
        return ((rows - rows.mean(-1, keepdim=True)) * norm.weight.float()) @ product

    places, kinds = position[tables.position_offset :], token_type.float()
    common = places.float().mean(0)
    return BertQkvTables(
        word=_table(word, len(weight), lambda rows: qkv(rows + common + kinds[0])),
        position=_table(places, len(weight), lambda rows: qkv(rows - common)),
        token_type=qkv(kinds - kinds[0]).to(word.dtype),
        constant=norm.bias.float() @ product + bias.float(),
    )


def _table(rows: Tensor, width: int, made_of: Callable[[Tensor], Tensor]) -> Tensor:
    """[V, width] of rows [V, H], in their dtype."""
    table = rows.new_empty(len(rows), width)
    for start in range(0, len(rows), _ROWS):
        table[start : start + _ROWS] = made_of(rows[start : start + _ROWS].float())
    return table


def _has_room(embeddings: Tensor, width: int) -> bool:
    """Whether a table of `width` columns may be kept by `embeddings`: on a GPU with memory to spare."""
    if not embeddings.is_cuda:
        return False
    nbytes = len(embeddings) * width * embeddings.element_size()
    free, total = torch.cuda.mem_get_info(embeddings.device)
    fits = nbytes <= _SHARE * total and _FREE * nbytes <= free
    if not fits:
        log.info("no table of the first layer's QKV: it takes %d MiB of %d", nbytes >> 20, total >> 20)
    return fits

"""What the kernels of all layers for 129 to 512 rows have in common: see wide_share.cuh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from rose.kernels.cuda.plan import CHUNK
from rose.kernels.cuda.stack import BF16_A_WORD, TURNS, StackShape
from rose.kernels.cuda.views import rows_view

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.cuda.views import View

# Blocks have tiles of a quarter of so many rows.
WIDE = StackShape(tiles=(256, 512), sums=8, parts=5, groups=16, threads=384)
TOKEN_TILES = 4
QUERIES = 64  # of which a block has the attention


def heads_memory(width: int, device: torch.device) -> Tensor:
    """Two layers' heads of `width` dimensions a row, in turns; zeros."""
    return torch.zeros((TURNS, WIDE.max_tokens, width), dtype=torch.bfloat16, device=device)


def batch_views(rows: Iterable[Tensor], heads: Tensor, num_tokens: int) -> list[View]:
    """What the copy engine reads of a batch: all of its rows, three kinds, and heads in `heads_memory`."""
    kernel = WIDE.tile(num_tokens)
    tile, width = kernel // TOKEN_TILES, heads.shape[-1]
    row = width * BF16_A_WORD
    # The kernel for fewer rows has the second turn's heads where they end.
    sizes, strides = (width, num_tokens, TURNS), (row, kernel * row)
    return [
        *(rows_view(x.data_ptr(), x.shape, tile) for x in rows),
        *((heads.data_ptr(), sizes, strides, (CHUNK, box, 1)) for box in (QUERIES, tile)),
    ]

"""Launches decoder_wide.cu: all layers of a small Qwen3 in one cooperative kernel, for up to 512 rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rose.kernels.cuda.cubin import DECODER_WIDE
from rose.kernels.cuda.decoder_stack import QKV_WIDTH, DecoderKernels, DecoderRows
from rose.kernels.cuda.plan import CHUNK
from rose.kernels.cuda.stack import BF16_A_WORD, TURNS, StackShape
from rose.kernels.cuda.views import rows_view

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.cuda.views import View

# Blocks have tiles of a quarter of so many rows.
WIDE = StackShape(tiles=(256, 512), sums=8, parts=5, groups=16, threads=384)
_TOKEN_TILES = 4
_QUERIES = 64  # of which a block has the attention


class WideDecoderKernels(DecoderKernels):
    """See DecoderKernels; for batches of 1 to 512 rows."""

    source = DECODER_WIDE
    shape = WIDE

    def looked_at(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def plain_memory(self) -> dict[str, Tensor]:
        """See DecoderKernels."""
        shape = TURNS, WIDE.max_tokens, QKV_WIDTH
        return {"qkv": torch.zeros(shape, dtype=torch.bfloat16, device=self._angles.device)}

    def views(self, rows: DecoderRows) -> list[View]:
        """See DecoderKernels."""
        num_tokens = len(rows.hidden)
        kernel = WIDE.tile(num_tokens)
        tile, row = kernel // _TOKEN_TILES, QKV_WIDTH * BF16_A_WORD
        read = [rows_view(x.data_ptr(), x.shape, tile) for x in (rows.hidden, rows.context, rows.narrow)]
        # The kernel for fewer rows has the second turn's heads where they end.
        sizes, strides = (QKV_WIDTH, num_tokens, TURNS), (row, kernel * row)
        heads: list[View] = [
            (self._plain_memory["qkv"].data_ptr(), sizes, strides, (CHUNK, box, 1))
            for box in (_QUERIES, tile)
        ]
        return [*read, *heads]

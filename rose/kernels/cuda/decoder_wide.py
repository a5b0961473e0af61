"""Launches decoder_wide.cu: all layers of a small Qwen3 in one cooperative kernel, for up to 512 rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose.kernels.cuda.cubin import DECODER_WIDE
from rose.kernels.cuda.decoder_stack import QKV_WIDTH, DecoderKernels, DecoderRows
from rose.kernels.cuda.wide import WIDE, batch_views, heads_memory

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.cuda.views import View


class WideDecoderKernels(DecoderKernels):
    """See DecoderKernels; for batches of 1 to 512 rows."""

    source = DECODER_WIDE
    shape = WIDE

    def looked_at(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def plain_memory(self) -> dict[str, Tensor]:
        """See DecoderKernels."""
        return {"qkv": heads_memory(QKV_WIDTH, self._angles.device)}

    def views(self, rows: DecoderRows) -> list[View]:
        """See DecoderKernels."""
        read = rows.hidden, rows.context, rows.narrow
        return batch_views(read, self._plain_memory["qkv"], len(rows.hidden))

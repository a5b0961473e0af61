"""Launches encoder_wide.cu: all layers of a large BERT or XLM-R in one kernel, for up to 512 rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose.kernels.cuda.cubin import ENCODER_WIDE
from rose.kernels.cuda.encoder_stack import HEAD_DIM, QKV_WIDTH, EncoderKernels, EncoderRows, EncoderWeights
from rose.kernels.cuda.views import plain_view, thirds_view
from rose.kernels.cuda.wide import WIDE, batch_views, heads_memory

if TYPE_CHECKING:
    from torch import Tensor

    from rose.kernels.cuda.views import View

COLUMNS = 128  # of a block, in all products but the first


class WideEncoderKernels(EncoderKernels):
    """See EncoderKernels; for batches of 1 to 512 rows."""

    source = ENCODER_WIDE
    shape = WIDE

    def weight_views(self, layer: EncoderWeights) -> list[View]:
        """See EncoderKernels. A block has half a head of queries, of keys and of values."""
        qkv, others = layer.qkv, (layer.output, layer.wide, layer.narrow)
        return [
            thirds_view(qkv.data_ptr(), *qkv.shape, rows=HEAD_DIM // 2),
            *(plain_view(weight.data_ptr(), *weight.shape, rows=COLUMNS) for weight in others),
        ]

    def looked_at(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def plain_memory(self) -> dict[str, Tensor]:
        """See EncoderKernels."""
        return {"qkv": heads_memory(QKV_WIDTH, self._device)}

    def views(self, rows: EncoderRows) -> list[View]:
        """See EncoderKernels."""
        read = rows.hidden, rows.context, rows.wide
        return batch_views(read, self._plain_memory["qkv"], len(rows.hidden))

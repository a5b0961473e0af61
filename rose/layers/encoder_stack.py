"""All layers of a large BERT or XLM-R in one kernel, for batches of few tokens.

See encoder_stack.cu and encoder_wide.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from rose.kernels.cuda import encoder_stack, stack
from rose.kernels.cuda.encoder_stack import EncoderKernels, EncoderRows, EncoderWeights
from rose.kernels.cuda.encoder_wide import WideEncoderKernels

if TYPE_CHECKING:
    from torch import Tensor

    from rose.attention.base import AttentionSpec
    from rose.device_batch import DeviceBatch
    from rose.kernels.cuda.cubin import CudaSource
    from rose.kernels.cuda.library import CudaLibrary
    from rose.layers.encoder import EncoderBuffers, EncoderLayer


class EncoderStack:
    """The layers of one model: one launch for the seven a layer that they take apart."""

    def __init__(self, kernels: Sequence[EncoderKernels]) -> None:
        """kernels: at least one; a batch takes the first that has room for it."""
        self._kernels = kernels

    @classmethod
    def of(
        cls,
        layers: Sequence[EncoderLayer],
        spec: AttentionSpec,
        library_of: Callable[[CudaSource], CudaLibrary | None] | None = None,
    ) -> EncoderStack | None:
        """None if no kernel is built for this device, or none compiled for layers of this shape.

        library_of: the compiled kernels of a source, if not those of torch's current device.
        """
        if library_of is None and spec.device.type == "cuda":
            library_of = stack.stack_library
        if library_of is None or not fits(layers, spec):
            return None
        weights, eps = [_weights(layer) for layer in layers], layers[0].output.norm.eps
        kernels = [
            kind(library, weights, eps=eps, scale=spec.scale)
            for kind in (EncoderKernels, WideEncoderKernels)
            if (library := library_of(kind.source)) is not None
        ]
        return cls(kernels) if kernels else None

    def takes(self, num_tokens: int) -> bool:
        """Whether a kernel has room for so many rows."""
        return num_tokens <= self._kernels[-1].shape.max_tokens

    def __call__(self, batch: DeviceBatch, hidden: Tensor, buffers: EncoderBuffers) -> None:
        """hidden [T, H], embeddings, through all layers in place; bf16, T as `takes` says.

        buffers: for T rows.

        Raises:
            CudaError: the driver refused the launch.
        """
        context, wide = buffers.context, buffers.wide
        assert context is not None  # a GPU's buffers
        assert wide is not None
        rows = EncoderRows(hidden=hidden, context=context, wide=wide, offsets=batch.cu_seqlens)
        kernels = next(one for one in self._kernels if len(hidden) <= one.shape.max_tokens)
        kernels.launch(rows, torch.cuda.current_stream().cuda_stream)


def fits(layers: Sequence[EncoderLayer], spec: AttentionSpec) -> bool:
    """Whether the kernel is compiled for such layers, and all their norms share one eps."""
    heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
    if spec.causal or spec.window is not None or spec.dtype is not torch.bfloat16:
        return False
    if heads != (encoder_stack.HEADS, encoder_stack.HEADS, encoder_stack.HEAD_DIM):
        return False
    norms = [norm for layer in layers for norm in (layer.attention_output.norm, layer.output.norm)]
    return all(map(_fits, layers)) and len({norm.eps for norm in norms}) == 1


def _fits(layer: EncoderLayer) -> bool:
    shape = (stack.HIDDEN, encoder_stack.INNER)
    return layer.output.weight is not None and layer.output.weight.shape == shape


def _weights(layer: EncoderLayer) -> EncoderWeights:
    attended, output = layer.attention_output, layer.output
    products = layer.qkv.weight, attended.weight, layer.widen.weight, output.weight
    qkv, dense, wide, narrow = products
    if qkv is None or dense is None or wide is None or narrow is None:
        raise ValueError("a layer without weights of its own")
    return EncoderWeights(
        qkv=qkv,
        output=dense,
        wide=wide,
        narrow=narrow,
        qkv_bias=layer.qkv.bias,
        wide_bias=layer.widen.bias,
        output_bias=attended.bias,
        attended_norm=attended.norm.weight,
        attended_shift=attended.norm.bias,
        narrow_bias=output.bias,
        hidden_norm=output.norm.weight,
        hidden_shift=output.norm.bias,
    )

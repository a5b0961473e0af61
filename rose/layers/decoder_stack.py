"""All layers of a small Qwen3 in one kernel, for batches of few tokens.

See decoder_stack.cu and decoder_wide.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from rose.kernels.cuda import decoder_stack, stack
from rose.kernels.cuda.decoder_stack import DecoderKernels, DecoderRows, DecoderWeights
from rose.kernels.cuda.decoder_wide import WideDecoderKernels

if TYPE_CHECKING:
    from rose.attention.base import AttentionSpec
    from rose.device_batch import DeviceBatch
    from rose.kernels.cuda.cubin import CudaSource
    from rose.kernels.cuda.library import CudaLibrary
    from rose.layers.decoder import DecoderLayer
    from rose.layers.workspace import DecoderBuffers


class DecoderStack:
    """The layers of one model: one launch for the 223 that a launch a kernel takes at 1x128 on an H200."""

    def __init__(self, kernels: Sequence[DecoderKernels]) -> None:
        """kernels: at least one; a batch takes the first that has room for it."""
        self._kernels = kernels

    @classmethod
    def of(
        cls,
        layers: Sequence[DecoderLayer],
        spec: AttentionSpec,
        library_of: Callable[[CudaSource], CudaLibrary | None] | None = None,
    ) -> DecoderStack | None:
        """None if no kernel is built for this device, or none compiled for layers of this shape.

        library_of: the compiled kernels of a source, if not those of torch's current device.
        """
        if library_of is None and spec.device.type == "cuda":
            library_of = stack.stack_library
        if library_of is None or not fits(layers, spec):
            return None
        rope = layers[0].rope
        weights = [_weights(layer, after) for layer, after in pairwise([*layers, layers[0]])]
        kernels = [
            kind(library, weights, rope.cos_sin, eps=rope.eps, scale=spec.scale, causal=spec.causal)
            for kind in (DecoderKernels, WideDecoderKernels)
            if (library := library_of(kind.source)) is not None
        ]
        return cls(kernels) if kernels else None

    def takes(self, num_tokens: int) -> bool:
        """Whether a kernel has room for so many rows."""
        return num_tokens <= self._kernels[-1].shape.max_tokens

    def __call__(self, batch: DeviceBatch, rows: DecoderBuffers) -> torch.Tensor:
        """From embeddings in rows.residual [T, H], normed in rows.hidden [T, H], through all layers.

        bf16, T as `takes` says. Returns what is still to be added to rows.residual, as DecoderLayer.mix
        does.

        Raises:
            CudaError: the driver refused the launch.
        """
        given = DecoderRows(
            residual=rows.residual,
            hidden=rows.hidden,
            context=rows.context,
            narrow=rows.narrow,
            positions=rows.positions,
            offsets=batch.cu_seqlens,
        )
        num_tokens = len(rows.hidden)
        kernels = next(one for one in self._kernels if num_tokens <= one.shape.max_tokens)
        kernels.launch(given, torch.cuda.current_stream().cuda_stream)
        return rows.hidden


def fits(layers: Sequence[DecoderLayer], spec: AttentionSpec) -> bool:
    """Whether the kernel is compiled for such layers."""
    return spec.window is None and spec.dtype is torch.bfloat16 and all(map(_fits, layers))


def _fits(layer: DecoderLayer) -> bool:
    """Whether the kernel is compiled for such a layer, and its norms share one eps."""
    rope = layer.rope
    heads = (rope.num_heads, rope.num_kv_heads, rope.head_dim)
    if (
        heads != (decoder_stack.QUERY_HEADS, decoder_stack.KEY_HEADS, decoder_stack.HEAD_DIM)
        or rope.weight is None
        or rope.bias is not None
    ):
        return False
    if layer.down.weight is None or layer.down.weight.shape != (stack.HIDDEN, decoder_stack.INNER):
        return False
    return layer.input_norm.eps == layer.mlp_norm.eps == rope.eps


def _weights(layer: DecoderLayer, following: DecoderLayer) -> DecoderWeights:
    qkv, output = layer.qkv.weight, layer.output.weight
    gate_up, down, heads = layer.gate_up.weight, layer.down.weight, layer.rope.weight
    if qkv is None or output is None or gate_up is None or down is None or heads is None:
        raise ValueError("a layer without weights of its own")
    mlp, after = layer.mlp_norm.weight, following.input_norm.weight
    return DecoderWeights(qkv, output, gate_up, down, heads.contiguous(), mlp, after)

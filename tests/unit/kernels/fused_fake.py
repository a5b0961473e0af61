"""The fused kernels' nine-argument call in plain PyTorch, in the dtype of its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.aot.products import HEAD_EPS, ROW_EPS, Epilogue, ProductKernel
from rose.kernels.fused import FusedGemm

PROCESSORS = 132


def fake_gemm(kernel: ProductKernel) -> FusedGemm:
    """A FusedGemm whose kernel computes here."""

    def call(x, weight, out, residual, epilogue, schedule, varlen, scale_a, scale_b):
        assert schedule == (PROCESSORS // (kernel.cluster_m * kernel.cluster_n), None, 8, None, None, None)
        assert (varlen, scale_a, scale_b) == (None, None, None)
        *operands, flags, workspace = epilogue
        assert (flags, workspace) == (None, None)
        product = x.float() @ weight.float().T
        if kernel.epilogue.startswith("rms-"):
            place = SCALES[kernel.epilogue]
            sums = operands[place]
            assert sums.dtype is torch.float32 and sums.dim() == 2
            operands[place] = torch.rsqrt(sums.sum(1) / x.shape[1] + ROW_EPS)
        EPILOGUES[kernel.epilogue](kernel, product, out, residual, *operands)

    return FusedGemm(kernel, call, PROCESSORS)


def fake_lookup(epilogue: Epilogue, m: int, n: int, k: int) -> FusedGemm:
    """For every shape."""
    return fake_gemm(ProductKernel(epilogue, 128, 128, True, 1, 2))


def _plain(kernel, product, out, residual):
    assert residual is None
    out.copy_(product)


def _bias(kernel, product, out, residual, bias):
    assert residual is None
    out.copy_(product + bias.float())


def _swiglu(kernel, product, out, residual, target):
    assert out is None and residual is None
    gate, up = product.chunk(2, dim=1)
    target.copy_(torch.nn.functional.silu(gate) * up)


def _scaled_swiglu(kernel, product, out, residual, scale, target):
    assert scale.dtype is torch.float32 and scale.shape == (len(product),)
    _swiglu(kernel, product * scale[:, None], out, residual, target)


def _fp8(kernel, product, out, residual, scale, columns):
    assert residual is None and {scale.dtype, columns.dtype} == {torch.float32}
    assert (scale.shape, columns.shape) == ((len(product),), (product.shape[1],))
    out.copy_(product * scale[:, None] * columns)


def _fp8_swiglu(kernel, product, out, residual, scale, columns, target):
    halves = columns.view(-1, 2).t().flatten()  # as the halves of the weight, which are read in turns
    _swiglu(kernel, product * scale[:, None] * halves, out, residual, target)


def _fp8_swiglu_fp8(kernel, product, out, residual, scale, columns, target):
    assert out is None and residual is None and {scale.dtype, columns.dtype} == {torch.float32}
    gate, up = (product * columns.view(-1, 2).t().flatten()).chunk(2, dim=1)
    result = gate * up * torch.sigmoid(gate * scale[:, None])
    assert not (result.abs() > 448).any()  # the kernel would store 448
    target.copy_(result)


def _gelu(kernel, product, out, residual, bias):
    assert residual is None
    out.copy_(torch.nn.functional.gelu(product + bias.float()))


def _residual(kernel, product, out, residual, columns, stream, sums):
    assert stream.data_ptr() == residual.data_ptr()
    total = product + residual.float()
    out.copy_(total * columns.float())
    stream.copy_(total)
    parts = torch.stack([part.square().sum(1) for part in total.split(kernel.tile_n, dim=1)], dim=1)
    assert sums.shape == parts.shape and sums.dtype is torch.float32
    sums.copy_(parts)


def _rope(kernel, product, out, residual, angles, width, weight, keep, scale):
    _unscaled_rope(kernel, product * scale[:, None], out, residual, angles, width, weight, keep)


def _unscaled_rope(kernel, product, out, residual, angles, width, weight, keep):
    assert residual is None and width is None and angles.dtype is torch.float16
    heads: Tensor = product.view(len(product), -1, angles.shape[1])
    inverse = torch.rsqrt(heads.square().mean(-1, keepdim=True) + HEAD_EPS)
    weight, keep = (columns.float().view(heads.shape[1], -1) for columns in (weight, keep))
    first, second = (heads * (inverse * weight + keep)).unflatten(2, (-1, 2)).unbind(-1)
    cos, sin = angles.float().unsqueeze(1).unflatten(2, (-1, 2)).unbind(-1)
    kept = keep.unflatten(1, (-1, 2))[..., 0]
    cos, sin = cos * (1 - kept) + kept, sin * (1 - kept)
    out.copy_(torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(1))


EPILOGUES = {
    "plain": _plain,
    "bias": _bias,
    "swiglu": _swiglu,
    "scaled-swiglu": _scaled_swiglu,
    "gelu": _gelu,
    "residual": _residual,
    "rope": _rope,
    "unscaled-rope": _unscaled_rope,
    "rms-swiglu": _scaled_swiglu,
    "rms-rope": _rope,
    "fp8": _fp8,
    "fp8-swiglu": _fp8_swiglu,
    "fp8-swiglu-fp8": _fp8_swiglu_fp8,
}
# Where among the operands those that make a factor a row of sums of squares have the sums.
SCALES = {"rms-swiglu": 0, "rms-rope": 4}

"""The int8 quantiser of pplx-embed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rose.kernels import dispatch

if TYPE_CHECKING:
    from torch import Tensor


def tanh_int8(vectors: Tensor, out: Tensor) -> None:
    """out i8[S, D] = round(tanh(vectors) * 127), half to even; vectors: f32[S, D].

    Source: st_quantize.py of perplexity-ai/pplx-embed-v1-0.6b; its clamp to [-128, 127] never binds.
    """
    if dispatch.uses_triton(vectors):
        from rose.kernels.jit import pooling as jit

        jit.tanh_int8(vectors, out)
    else:
        out.copy_(torch.round(torch.tanh(vectors) * 127))

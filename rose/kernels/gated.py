"""The gated unit with GELU, exact (ModernBERT) or by tanh (Gemma); activation.py has the one with SiLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rose.kernels import dispatch

if TYPE_CHECKING:
    from torch import Tensor


def gelu_mul(gate_up: Tensor, out: Tensor, by_tanh: bool = False) -> None:
    """out [T, I] = gelu(gate) * up, in fp32 before the store.

    gate_up: [T, 2I], gate in the first I columns. by_tanh: approximated, instead of by erf.
    Source: Shazeer, arXiv 2002.05202; Hendrycks & Gimpel, arXiv 1606.08415.
    """
    if dispatch.uses_triton(out):
        from rose.kernels.jit import gated as jit

        jit.gelu_mul(gate_up, out, by_tanh)
    else:
        gate, up = gate_up.float().chunk(2, dim=-1)
        approximate = "tanh" if by_tanh else "none"
        out.copy_(torch.nn.functional.gelu(gate, approximate=approximate).mul_(up))

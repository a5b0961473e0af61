"""What follows a product: SiLU of the gate times up (Qwen3), its bias, and its bias with GELU (BERT)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rose.kernels import dispatch

if TYPE_CHECKING:
    from torch import Tensor


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out [T, I] = silu(gate) * up, in fp32 before the store.

    gate_up: [T, 2I], gate in the first I columns; or split-K partial sums [K, T, 2I].
    """
    if dispatch.uses_triton(out):
        from rose.kernels.jit import activation as jit

        jit.silu_mul(gate_up, out)
    else:
        total = gate_up.float().sum(0) if gate_up.dim() == 3 else gate_up.float()
        gate, up = total.chunk(2, dim=-1)
        out.copy_(torch.nn.functional.silu(gate).mul_(up))


def bias_gelu(x: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [T, I] = gelu(x + bias), the exact form with erf. bias: [I] or None.

    x: [T, I], may be `out`; or split-K partial sums [K, T, I].
    """
    if dispatch.uses_triton(out):
        from rose.kernels.jit import activation as jit

        jit.bias_gelu(x, bias, out)
    else:
        total = x.float().sum(0) if x.dim() == 3 else x.float()
        out.copy_(torch.nn.functional.gelu(total if bias is None else total + bias.float()))


def add_bias(x: Tensor, bias: Tensor, out: Tensor) -> None:
    """out [T, N] = x + bias [N]. x: [T, N], may be `out`; or split-K partial sums [K, T, N]."""
    if dispatch.uses_triton(out):
        from rose.kernels.jit import activation as jit

        jit.add_bias(x, bias, out)
    else:
        out.copy_((x.float().sum(0) if x.dim() == 3 else x.float()) + bias.float())

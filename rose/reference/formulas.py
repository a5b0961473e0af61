"""The formulas that the models are made of, each spelled out, and a reader of their weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rose.configs.rope import YarnScaling
from rose.reference.frequencies import scaled_frequencies

if TYPE_CHECKING:
    from rose.configs.rope import RopeScaling
    from rose.weights import WeightSource


class Reader:
    """Weights as fp32 on one device, each read once."""

    def __init__(self, weights: WeightSource, device: torch.device) -> None:
        self.device = device
        self._weights = weights
        self._read: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`."""
        if name not in self._read:
            self._read[name] = self._weights.tensor(name, shape).to(self.device, torch.float32)
        return self._read[name]

    def dense(self, x: Tensor, name: str, out_features: int, bias: bool = False) -> Tensor:
        """x Wᵀ, + b if it has one: f32[n, in] -> f32[n, out_features]."""
        y = x @ self(f"{name}.weight", out_features, x.shape[-1]).T
        return y + self(f"{name}.bias", out_features) if bias else y


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees: none later than itself if causal, none more than `window` places away."""

    causal: bool = False
    window: int | None = None

    def hidden(self, n: int, device: torch.device) -> Tensor | None:
        """bool[n, n]: what each query does not see; None if it sees all."""
        if not self.causal and self.window is None:
            return None
        ahead = torch.arange(n, device=device)[None] - torch.arange(n, device=device)[:, None]
        hidden = (ahead > 0) & self.causal
        return hidden if self.window is None else hidden | (ahead.abs() > self.window)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
    """q f32[n, Hq, D], k, v f32[n, Hk, D] -> f32[n, Hq * D]; query head h reads key head h // (Hq // Hk).

    scale: on q·k; None: D ** -0.5.
    """
    n, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    out, hidden = torch.empty_like(q), mask.hidden(n, q.device)
    for head in range(num_heads):
        scores = q[:, head] @ k[:, head // group].T * (head_dim**-0.5 if scale is None else scale)
        if hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        out[:, head] = scores.softmax(-1) @ v[:, head // group]
    return out.reshape(n, num_heads * head_dim)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | float, eps: float) -> Tensor:
    """Source: Ba et al., arXiv 1607.06450."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Source: Zhang & Sennrich, arXiv 1910.07467."""
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def silu(x: Tensor) -> Tensor:
    """x times its logistic function."""
    return x / (1.0 + torch.exp(-x))


def gelu_by_tanh(x: Tensor) -> Tensor:
    """The approximation of `gelu` in the same paper."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x: Tensor) -> Tensor:
    """The exact one, by erf. Source: Hendrycks and Gimpel, arXiv 1606.08415."""
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def rotate(x: Tensor, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """RoPE on f32[n, heads, D]: element i turns with element i + D/2. Source: Su et al., arXiv 2104.09864.

    YaRN's attention factor lengthens what has been turned.
    """
    n, _, head_dim = x.shape
    half = head_dim // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    if scaling is not None:
        scaled = scaled_frequencies(head_dim, theta, scaling)
        frequency = torch.tensor(scaled, device=x.device, dtype=torch.float64)
    angle = (torch.arange(n, device=x.device)[:, None] * frequency).float()[:, None]
    first, second = x[..., :half], x[..., half:]
    turned = torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1
    )
    return turned * scaling.attention_factor if isinstance(scaling, YarnScaling) else turned

"""The models in plain PyTorch, fp32, one sequence at a time: the specification that tests compare against.

Shares no code with the fast path: no layers, kernels, attention backends or heads of this project. Slow by
design. Every formula is spelled out; heads are looped so that 32 768 tokens need one [n, n] score matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rose.batch import Int32
    from rose.config import ModelConfig
    from rose.weights import WeightSource


def reference_vectors(
    config: ModelConfig,
    weights: WeightSource,
    sequences: Sequence[Int32],
    token_type_ids: Sequence[Int32] | None = None,
    device: str = "cpu",
) -> Tensor:
    """Pooled vectors f32[B, D], not normalised, of `sequences` (each i32[n]); zeros for an empty one."""
    read = _Reader(weights, torch.device(device))
    forward = _bert if config.architecture == "bert" else _qwen3
    vectors = torch.zeros(len(sequences), config.hidden_size)
    with torch.inference_mode():
        for row, sequence in enumerate(sequences):
            if len(sequence) == 0:
                continue
            ids = torch.as_tensor(sequence, dtype=torch.long, device=read.device)
            types = torch.zeros_like(ids)
            if token_type_ids is not None:
                types = torch.as_tensor(token_type_ids[row], dtype=torch.long, device=read.device)
            vectors[row] = _pool(forward(config, read, ids, types), config.pooling).cpu()
    return vectors


class _Reader:
    """Weights as fp32 on one device, each read once."""

    def __init__(self, weights: WeightSource, device: torch.device) -> None:
        self.device = device
        self._weights = weights
        self._read: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        if name not in self._read:
            self._read[name] = self._weights.tensor(name, shape).to(self.device, torch.float32)
        return self._read[name]


def _pool(hidden: Tensor, pooling: str) -> Tensor:
    """f32[n, H] -> f32[H]."""
    if pooling == "mean":
        return hidden.double().mean(0).float()
    return hidden[0 if pooling == "cls" else -1]


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """q f32[n, Hq, D], k, v f32[n, Hk, D] -> f32[n, Hq * D]; query head h reads key head h // (Hq // Hk)."""
    n, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    out = torch.empty_like(q)
    for head in range(num_heads):
        scores = q[:, head] @ k[:, head // group].T / math.sqrt(head_dim)
        if causal:
            scores.masked_fill_(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), -math.inf)
        out[:, head] = scores.softmax(-1) @ v[:, head // group]
    return out.reshape(n, num_heads * head_dim)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _gelu(x: Tensor) -> Tensor:
    """The exact one, by erf. Source: Hendrycks and Gimpel, arXiv 1606.08415."""
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _bert(config: ModelConfig, read: _Reader, ids: Tensor, types: Tensor) -> Tensor:
    """Hidden states f32[n, H] of BERT: post-norm layers. Source: Devlin et al., arXiv 1810.04805."""
    hidden_size, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps

    def dense(x: Tensor, name: str, width: int, height: int) -> Tensor:
        return x @ read(f"{name}.weight", height, width).T + read(f"{name}.bias", height)

    def norm(x: Tensor, name: str) -> Tensor:
        return _layer_norm(x, read(f"{name}.weight", hidden_size), read(f"{name}.bias", hidden_size), eps)

    def table(name: str, rows: int) -> Tensor:
        return read(f"embeddings.{name}_embeddings.weight", rows, hidden_size)

    positions = torch.arange(len(ids), device=ids.device) + config.position_offset
    hidden = table("word", config.vocab_size)[ids] + table("position", config.max_positions)[positions]
    hidden = norm(hidden + table("token_type", config.type_vocab_size)[types], "embeddings.LayerNorm")
    for index in range(config.num_layers):
        layer = f"encoder.layer.{index}"
        q, k, v = (
            dense(hidden, f"{layer}.attention.self.{part}", hidden_size, hidden_size).view(
                len(ids), config.num_heads, config.head_dim
            )
            for part in ("query", "key", "value")
        )
        mixed = dense(_attend(q, k, v, False), f"{layer}.attention.output.dense", hidden_size, hidden_size)
        hidden = norm(hidden + mixed, f"{layer}.attention.output.LayerNorm")
        widened = _gelu(dense(hidden, f"{layer}.intermediate.dense", hidden_size, inner))
        hidden = norm(
            hidden + dense(widened, f"{layer}.output.dense", inner, hidden_size), f"{layer}.output.LayerNorm"
        )
    return hidden


def _rotate(x: Tensor, theta: float) -> Tensor:
    """RoPE on f32[n, heads, D]: element i turns with element i + D/2. Source: Su et al., arXiv 2104.09864."""
    n, _, head_dim = x.shape
    half = head_dim // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = (torch.arange(n, device=x.device)[:, None] * frequency).float()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1
    )


def _qwen3(config: ModelConfig, read: _Reader, ids: Tensor, types: Tensor) -> Tensor:
    """Hidden states f32[n, H] of Qwen3 after its final norm: pre-norm, q/k norm a head, RoPE, SwiGLU.

    Source: Qwen3 technical report, arXiv 2505.09388; transformers' modeling_qwen3.
    """
    del types  # Qwen3 has none
    hidden_size, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
    head_dim, q_size, kv_size = (
        config.head_dim,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    hidden = read("embed_tokens.weight", config.vocab_size, hidden_size)[ids]
    for index in range(config.num_layers):
        layer, attention = f"layers.{index}", f"layers.{index}.self_attn"
        x = _rms_norm(hidden, read(f"{layer}.input_layernorm.weight", hidden_size), eps)
        q = (x @ read(f"{attention}.q_proj.weight", q_size, hidden_size).T).view(len(ids), -1, head_dim)
        k = (x @ read(f"{attention}.k_proj.weight", kv_size, hidden_size).T).view(len(ids), -1, head_dim)
        v = (x @ read(f"{attention}.v_proj.weight", kv_size, hidden_size).T).view(len(ids), -1, head_dim)
        q = _rotate(_rms_norm(q, read(f"{attention}.q_norm.weight", head_dim), eps), config.rope_theta)
        k = _rotate(_rms_norm(k, read(f"{attention}.k_norm.weight", head_dim), eps), config.rope_theta)
        mixed = _attend(q, k, v, config.causal)
        hidden = hidden + mixed @ read(f"{attention}.o_proj.weight", hidden_size, q_size).T
        x = _rms_norm(hidden, read(f"{layer}.post_attention_layernorm.weight", hidden_size), eps)
        gate = x @ read(f"{layer}.mlp.gate_proj.weight", inner, hidden_size).T
        up = x @ read(f"{layer}.mlp.up_proj.weight", inner, hidden_size).T
        gated = gate / (1.0 + torch.exp(-gate)) * up
        hidden = hidden + gated @ read(f"{layer}.mlp.down_proj.weight", hidden_size, inner).T
    return _rms_norm(hidden, read("norm.weight", hidden_size), eps)

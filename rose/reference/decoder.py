"""Qwen3, Qwen2, Llama and Mistral."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rose.reference.formulas import Mask, Reader, attend, rms_norm, rotate, silu

if TYPE_CHECKING:
    from rose.config import ModelConfig


def decoder(config: ModelConfig, read: Reader, ids: Tensor, types: Tensor) -> Tensor:
    """Hidden states f32[n, H] after the final norm: pre-norm, RoPE, SwiGLU; Qwen3 norms q and k a head.

    Source: Qwen3 technical report, arXiv 2505.09388; transformers' modeling_qwen3, _qwen2 and _llama.
    """
    del types  # none of these has any
    n, size, eps, bias = len(ids), config.hidden_size, config.norm_eps, config.attention_bias
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    hidden = read("embed_tokens.weight", config.vocab_size, size)[ids]
    for index in range(config.num_layers):
        layer, attention = f"layers.{index}", f"layers.{index}.self_attn"
        x = rms_norm(hidden, read(f"{layer}.input_layernorm.weight", size), eps)
        q, k, v = (
            read.dense(x, f"{attention}.{part}_proj", count * config.head_dim, bias).view(n, count, -1)
            for part, count in heads.items()
        )
        if config.architecture == "qwen3":
            q = rms_norm(q, read(f"{attention}.q_norm.weight", config.head_dim), eps)
            k = rms_norm(k, read(f"{attention}.k_norm.weight", config.head_dim), eps)
        q, k = (rotate(y, config.rope_theta, config.rope_scaling) for y in (q, k))
        hidden = hidden + read.dense(attend(q, k, v, Mask(config.causal)), f"{attention}.o_proj", size)
        x = rms_norm(hidden, read(f"{layer}.post_attention_layernorm.weight", size), eps)
        gate = read.dense(x, f"{layer}.mlp.gate_proj", config.intermediate_size)
        up = read.dense(x, f"{layer}.mlp.up_proj", config.intermediate_size)
        hidden = hidden + read.dense(silu(gate) * up, f"{layer}.mlp.down_proj", size)
    return rms_norm(hidden, read("norm.weight", size), eps)

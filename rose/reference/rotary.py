"""Encoders with rotation: Nomic BERT, ModernBERT and Gemma 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from rose.reference.formulas import (
    Mask,
    Reader,
    attend,
    gelu,
    gelu_by_tanh,
    layer_norm,
    rms_norm,
    rotate,
    silu,
)

if TYPE_CHECKING:
    from rose.config import ModelConfig

Norm = Callable[[Tensor, str], Tensor]


def _norm_of(read: Reader, config: ModelConfig, bias: bool) -> Norm:
    size = config.hidden_size

    def norm(x: Tensor, name: str) -> Tensor:
        shift = read(f"{name}.bias", size) if bias else 0.0
        return layer_norm(x, read(f"{name}.weight", size), shift, config.norm_eps)

    return norm


def nomic_bert(config: ModelConfig, read: Reader, ids: Tensor, types: Tensor) -> Tensor:
    """Hidden states f32[n, H]: post-norm, RoPE, SwiGLU. Source: Nussbaum et al., arXiv 2402.01613."""
    size, inner, norm = config.hidden_size, config.intermediate_size, _norm_of(read, config, bias=True)
    hidden = read("embeddings.word_embeddings.weight", config.vocab_size, size)[ids]
    hidden = hidden + read("embeddings.token_type_embeddings.weight", config.type_vocab_size, size)[types]
    hidden = norm(hidden, "emb_ln")
    for index in range(config.num_layers):
        name = f"encoder.layers.{index}"
        qkv = read.dense(hidden, f"{name}.attn.Wqkv", 3 * size)
        q, k, v = qkv.view(len(ids), 3, config.num_heads, config.head_dim).unbind(1)
        context = attend(rotate(q, config.rope_theta), rotate(k, config.rope_theta), v, Mask())
        hidden = norm(hidden + read.dense(context, f"{name}.attn.out_proj", size), f"{name}.norm1")
        up, gate = (
            read.dense(hidden, f"{name}.mlp.fc11", inner),
            read.dense(hidden, f"{name}.mlp.fc12", inner),
        )
        hidden = norm(hidden + read.dense(silu(gate) * up, f"{name}.mlp.fc2", size), f"{name}.norm2")
    return hidden


def modernbert(config: ModelConfig, read: Reader, ids: Tensor, types: Tensor) -> Tensor:
    """Hidden states f32[n, H]: pre-norm, RoPE, GeGLU, windows. Source: Warner et al., arXiv 2412.13663."""
    del types  # it has none
    size, inner, norm = config.hidden_size, config.intermediate_size, _norm_of(read, config, config.norm_bias)
    hidden = norm(read("embeddings.tok_embeddings.weight", config.vocab_size, size)[ids], "embeddings.norm")
    for index, window in enumerate(config.windows):
        name = f"layers.{index}"
        theta = config.rope_theta if window is None else config.local_rope_theta
        x = hidden if index == 0 else norm(hidden, f"{name}.attn_norm")
        qkv = read.dense(x, f"{name}.attn.Wqkv", 3 * size, config.attention_bias)
        q, k, v = qkv.view(len(ids), 3, config.num_heads, config.head_dim).unbind(1)
        context = attend(rotate(q, theta), rotate(k, theta), v, Mask(window=window))
        hidden = hidden + read.dense(context, f"{name}.attn.Wo", size, config.attention_bias)
        wide = read.dense(norm(hidden, f"{name}.mlp_norm"), f"{name}.mlp.Wi", 2 * inner, config.mlp_bias)
        gate, up = wide.chunk(2, dim=-1)
        hidden = hidden + read.dense(gelu(gate) * up, f"{name}.mlp.Wo", size, config.mlp_bias)
    return norm(hidden, "final_norm")


def gemma3(config: ModelConfig, read: Reader, ids: Tensor, types: Tensor) -> Tensor:
    """Hidden states f32[n, H]: norms before and after each part, RoPE, GeGLU by tanh, windows.

    Source: Gemma 3 technical report, arXiv 2503.19786.
    """
    del types  # it has none
    size, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, 1.0 + read(f"{name}.weight", x.shape[-1]), config.norm_eps)

    hidden = read("embed_tokens.weight", config.vocab_size, size)[ids] * size**0.5
    for index, window in enumerate(config.windows):
        name, attention = f"layers.{index}", f"layers.{index}.self_attn"
        theta = config.rope_theta if window is None else config.local_rope_theta
        x = norm(hidden, f"{name}.input_layernorm")
        q, k, v = (
            read.dense(x, f"{attention}.{part}_proj", count * head_dim).view(len(ids), count, head_dim)
            for part, count in heads.items()
        )
        q, k = (rotate(norm(y, f"{attention}.{part}_norm"), theta) for part, y in (("q", q), ("k", k)))
        context = attend(q, k, v, Mask(config.causal, window), config.attention_scale)
        mixed = read.dense(context, f"{attention}.o_proj", size)
        hidden = hidden + norm(mixed, f"{name}.post_attention_layernorm")
        x = norm(hidden, f"{name}.pre_feedforward_layernorm")
        gate, up = (read.dense(x, f"{name}.mlp.{part}_proj", inner) for part in ("gate", "up"))
        narrowed = read.dense(gelu_by_tanh(gate) * up, f"{name}.mlp.down_proj", size)
        hidden = hidden + norm(narrowed, f"{name}.post_feedforward_layernorm")
    return norm(hidden, "norm")

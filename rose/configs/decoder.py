"""Qwen3, Qwen2, Llama and Mistral: one decoder, with or without a norm on q and k, and a bias on q, k, v."""

from __future__ import annotations

from dataclasses import replace

from rose.configs.fields import Fields
from rose.configs.model import Architecture, Head, ModelConfig
from rose.configs.rope import read_rope


def read_qwen3(fields: Fields, head: Head) -> ModelConfig:
    """From config.json. transformers' Qwen3Config has heads of 128 whatever the hidden size."""
    fields.require("attention_bias", False)
    fields.require("use_sliding_window", False)
    return _read("qwen3", fields, head, fields.integer("head_dim", 128))


def read_pplx(fields: Fields, head: Head) -> ModelConfig:
    """From config.json; every token sees every other one, whatever the file says.

    Source: pplx-embed's modeling.py sets is_causal to False of every layer, and asks no field.
    """
    return replace(read_qwen3(fields, head), causal=False)


def read_qwen2(fields: Fields, head: Head) -> ModelConfig:
    """From config.json; q, k and v have a bias whatever the file says."""
    fields.require("use_sliding_window", False)
    return _read("qwen2", fields, head, _default_head_dim(fields))


def read_llama(fields: Fields, head: Head) -> ModelConfig:
    """From config.json of Llama or Mistral."""
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    return _read("llama", fields, head, _default_head_dim(fields))


def _default_head_dim(fields: Fields) -> int:
    if fields.get("head_dim") is not None:
        return fields.integer("head_dim")
    return fields.head_dim(fields.integer("hidden_size"), fields.integer("num_attention_heads"))


def _read(architecture: Architecture, fields: Fields, head: Head, head_dim: int) -> ModelConfig:
    if head.pooling not in ("mean", "cls", "last"):
        raise fields.refuse(f"pooling {head.pooling} is not supported for this architecture")
    fields.require("hidden_act", "silu")
    num_heads = fields.integer("num_attention_heads")
    rope = read_rope(fields, fields.integer("max_position_embeddings"))
    longest = rope.max_positions
    if architecture == "llama" and fields.get("sliding_window") is not None:
        longest = min(longest, fields.integer("sliding_window"))  # up to there Mistral's window hides nothing
    return ModelConfig(
        architecture=architecture,
        task=head.task,
        hidden_size=fields.integer("hidden_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_positions=rope.max_positions,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_model_len=fields.max_model_len(longest),
        causal=_causal(fields),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        attention_bias=architecture == "qwen2",
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
    )


def _causal(fields: Fields) -> bool:
    """Whether later tokens are hidden: two spellings of "no", and gte-Qwen2, whose own code says it.

    Source: transformers' use_bidirectional_attention; vLLM's is_causal; the modeling_qwen.py that
    gte-Qwen2's auto_map names calls its attention with is_causal=False.
    """
    if fields.get("is_causal") is not None:
        return bool(fields.get("is_causal"))
    auto_map = fields.get("auto_map")
    own_code = auto_map.get("AutoModel") if isinstance(auto_map, dict) else None
    return not (fields.get("use_bidirectional_attention") or own_code == "modeling_qwen.Qwen2Model")

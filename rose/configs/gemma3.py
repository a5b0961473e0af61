"""Gemma 3's text model, bidirectional in EmbeddingGemma."""

from __future__ import annotations

import math

from rose.configs.fields import Fields
from rose.configs.model import Head, ModelConfig
from rose.configs.windows import local_layers, rope_thetas


def read(fields: Fields, head: Head) -> ModelConfig:
    """From config.json; see `rose.config.load_config`."""
    fields.require("hidden_activation", "gelu_pytorch_tanh")
    fields.require("attention_bias", False)
    fields.require("attn_logit_softcapping", None)
    num_layers = fields.integer("num_hidden_layers")
    max_positions = fields.integer("max_position_embeddings")
    every = fields.integer("_sliding_window_pattern", fields.integer("sliding_window_pattern", 6))
    local = local_layers(fields, [(index + 1) % every != 0 for index in range(num_layers)])
    causal = not fields.get("use_bidirectional_attention", False)
    # The whole of a causal window lies before the token, itself included; a bidirectional one is halved.
    span = fields.integer("sliding_window", 4096)
    window = span - 1 if causal else span // 2
    scalar = fields.number("query_pre_attn_scalar", 256)
    if not 0 < scalar < math.inf:
        raise fields.refuse(f"query_pre_attn_scalar {scalar:g} is no number of more than 0")
    theta, local_theta = rope_thetas(fields, ("rope_theta", 1e6), ("rope_local_base_freq", 1e4))
    return ModelConfig(
        architecture="gemma3",
        task=head.task,
        hidden_size=fields.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim", 256),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_positions=max_positions,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_model_len=fields.max_model_len(max_positions),
        causal=causal,
        rope_theta=theta,
        windows=tuple(window if is_local else None for is_local in local),
        local_rope_theta=local_theta,
        norm_offset=1.0,
        attention_scale=scalar**-0.5,
        tie_embeddings=bool(fields.get("tie_word_embeddings", True)),
    )

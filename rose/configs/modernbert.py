"""ModernBERT: every third layer sees all, the others a window, each kind with a rotation of its own."""

from __future__ import annotations

from rose.configs.fields import Fields
from rose.configs.model import Head, ModelConfig
from rose.configs.windows import local_layers, rope_thetas


def read(fields: Fields, head: Head) -> ModelConfig:
    """From config.json; see `rose.config.load_config`."""
    fields.require("hidden_activation", "gelu")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    max_positions = fields.integer("max_position_embeddings")
    every = fields.integer("global_attn_every_n_layers", 3)
    local = local_layers(fields, [index % every != 0 for index in range(num_layers)])
    window = fields.integer("local_attention", 128) // 2
    theta, local_theta = rope_thetas(fields, ("global_rope_theta", 160000.0), ("local_rope_theta", 10000.0))
    return ModelConfig(
        architecture="modernbert",
        task=head.task,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=fields.head_dim(hidden_size, num_heads),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_positions=max_positions,
        norm_eps=fields.number("norm_eps", 1e-5),
        max_model_len=fields.max_model_len(max_positions),
        rope_theta=theta,
        windows=tuple(window if is_local else None for is_local in local),
        local_rope_theta=local_theta,
        attention_bias=bool(fields.get("attention_bias", False)),
        mlp_bias=bool(fields.get("mlp_bias", False)),
        norm_bias=bool(fields.get("norm_bias", False)),
    )

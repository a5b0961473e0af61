"""Nomic BERT: nomic-embed-text, in the spelling of its own code and in transformers'."""

from __future__ import annotations

from rose.configs.fields import Fields
from rose.configs.model import Head, ModelConfig

# What the published code can also do, and at which values it does nothing of the kind.
_ONLY = {
    "activation_function": "swiglu",
    "hidden_act": "silu",
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "prenorm": False,
    "parallel_block": False,
    "use_rms_norm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "num_experts": 0,
}


def read(fields: Fields, head: Head) -> ModelConfig:
    """From config.json; see `rose.config.load_config`."""
    for key, only in _ONLY.items():
        fields.require(key, only)
    own = fields.get("n_embd") is not None

    def size(own_key: str, key: str) -> int:
        return fields.integer(own_key if own else key)

    hidden_size = size("n_embd", "hidden_size")
    num_heads = size("n_head", "num_attention_heads")
    max_positions = size("n_positions", "max_position_embeddings")
    if fields.get("rotary_scaling_factor") is not None:
        # Past this length the angles depend on the longest sequence of the batch: on what else is in it.
        max_positions = min(max_positions, fields.integer("max_trained_positions", 2048))
    return ModelConfig(
        architecture="nomic_bert",
        task=head.task,
        hidden_size=hidden_size,
        num_layers=size("n_layer", "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=fields.head_dim(hidden_size, num_heads),
        intermediate_size=size("n_inner", "intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_positions=max_positions,
        norm_eps=fields.number("layer_norm_epsilon" if own else "layer_norm_eps", 1e-12),
        max_model_len=fields.max_model_len(max_positions),
        rope_theta=fields.number("rotary_emb_base") if own else fields.rope_theta(1000.0),
        type_vocab_size=fields.integer("type_vocab_size", 2),
    )

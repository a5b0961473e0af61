"""The least time of a forward on an H200: reading the weights once, or the arithmetic, if that is longer."""

from __future__ import annotations

from rose.config import ModelConfig

# What large copies and large BF16 products reach on this GPU, rather than its data sheet's 4.8 and 989.
BYTES_PER_S = 4.3e12
FLOPS_PER_S = 790e12
BF16_BYTES = 2
# Whose feed-forward part has a gate beside the product up.
GATED = ("qwen3", "qwen2", "llama", "gemma3", "modernbert", "nomic_bert")


def floor_s(config: ModelConfig, sequences: int, length: int) -> float:
    """Seconds for `sequences` of `length` tokens together, in BF16; tables and norms cost nothing."""
    weights = config.num_layers * _weights_per_layer(config)
    products = 2.0 * weights * sequences * length
    seen = 0.5 if config.causal else 1.0
    scores = 4.0 * length**2 * config.num_heads * config.head_dim * seen
    flops = products + config.num_layers * sequences * scores
    return max(weights * BF16_BYTES / BYTES_PER_S, flops / FLOPS_PER_S)


def _weights_per_layer(config: ModelConfig) -> int:
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    keys_and_values = 2 * config.num_kv_heads * config.head_dim
    feed_forward = (3 if config.architecture in GATED else 2) * config.intermediate_size
    return hidden * (2 * heads + keys_and_values + feed_forward)

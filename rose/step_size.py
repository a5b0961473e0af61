"""How many tokens a step of a GPU takes where no flag says so. Pure arithmetic: no torch, no device."""

from __future__ import annotations

from rose.config import ModelConfig
from rose.engine_options import DEFAULT_BATCH_TOKENS, MOST_BATCH_TOKENS

# Of the memory, for activations: of an H200 5.8 GiB. The rest is for weights, graphs and what comes and goes.
_SHARE = 1 / 24
_MOST_VALUES = (1 << 31) - 1  # of one tensor, which kernels count in int32
_BYTES = 2  # of a value, in bfloat16


def activation_bytes(config: ModelConfig) -> int:
    """What one token's activations take in a decoder's workspace, in bytes; elsewhere it is about as much."""
    query = config.num_heads * config.head_dim
    qkv = query + 2 * config.num_kv_heads * config.head_dim
    return _BYTES * (3 * config.hidden_size + qkv + query + 3 * config.intermediate_size)


def device_batch_tokens(config: ModelConfig, free_bytes: int) -> int:
    """The most tokens of a step on a GPU that has `free_bytes` of memory before the model is loaded.

    Larger steps take less time a token (docs/benchmarks/log.md), so a large request is one step where its
    activations are no matter. A sparse model's logits grow with the tokens, too: it gets what others have.
    """
    tokens = DEFAULT_BATCH_TOKENS
    if config.task == "sparse":
        return tokens
    widest = max(2 * config.intermediate_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    allowed = min(_SHARE * free_bytes / activation_bytes(config), _MOST_VALUES // widest)
    while tokens < MOST_BATCH_TOKENS and 2 * tokens <= allowed:
        tokens *= 2
    return tokens

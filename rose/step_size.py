"""How many tokens a step of a GPU takes where no flag says so. Pure arithmetic: no torch, no device."""

from __future__ import annotations

from rose.config import ModelConfig
from rose.engine_options import DEFAULT_BATCH_TOKENS, MOST_BATCH_TOKENS

# Of the device's memory, for activations: of an H200 5.8 GiB. What is left is for weights and graphs.
_SHARE = 1 / 24
_MOST_VALUES = 1 << 31  # of one tensor, which kernels count in int32
_BYTES = 2  # of a value, in bfloat16


def activation_bytes(config: ModelConfig) -> int:
    """What one token's activations take in a workspace, in bytes: the most of all architectures."""
    query = config.num_heads * config.head_dim
    qkv = query + 2 * config.num_kv_heads * config.head_dim
    return _BYTES * (3 * config.hidden_size + qkv + query + 3 * config.intermediate_size)


def device_batch_tokens(config: ModelConfig, device_bytes: int) -> int:
    """The most tokens of a step on a GPU with `device_bytes` of memory.

    Larger steps take less time a token (docs/benchmarks/log.md), so a large request is one step where its
    activations are no matter. A sparse model's logits grow with the tokens, too: it gets what others have.
    """
    tokens = DEFAULT_BATCH_TOKENS
    if config.task == "sparse":
        return tokens
    widest = max(2 * config.intermediate_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    allowed = min(_SHARE * device_bytes / activation_bytes(config), _MOST_VALUES // widest)
    while tokens < MOST_BATCH_TOKENS and 2 * tokens <= allowed:
        tokens *= 2
    return tokens

"""BERT, and RoBERTa and XLM-R, which differ in where positions start."""

from __future__ import annotations

from rose.configs.fields import Fields
from rose.configs.model import Head, ModelConfig


def read(fields: Fields, head: Head) -> ModelConfig:
    """From config.json; see `rose.config.load_config`."""
    fields.require("hidden_act", "gelu")
    fields.require("position_embedding_type", "absolute")
    if fields.get("is_decoder"):
        raise fields.refuse("is_decoder true is not supported")
    if head.task == "sparse":  # words are weighed by the word embedding
        fields.require("tie_word_embeddings", True)
    roberta = "roberta" in str(fields.get("model_type"))
    offset = fields.integer("pad_token_id", 1, least=0) + 1 if roberta else 0
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    max_positions = fields.integer("max_position_embeddings")
    return ModelConfig(
        architecture="bert",
        task=head.task,
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=fields.head_dim(hidden_size, num_heads),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_positions=max_positions,
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        max_model_len=fields.max_model_len(max_positions - offset),
        type_vocab_size=fields.integer("type_vocab_size", 2),
        position_offset=offset,
    )

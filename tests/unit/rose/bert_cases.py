"""Small BERT and XLM-R models of odd shapes, with random weights; transformers as their oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import BertConfig, XLMRobertaConfig
from transformers import BertModel as HfBert
from transformers import XLMRobertaModel as HfXlmRoberta

from rose.attention.base import AttentionBackend
from rose.attention.sdpa import SdpaAttention
from rose.batch import Int32, RaggedBatch
from rose.config import ModelConfig
from rose.device_batch import DeviceBatch, Outputs
from rose.models.registry import Model, build_model
from rose.weights import MappedWeights, WeightSource

CPU = torch.device("cpu")
# No width is a multiple of 16, so that every vector loop has a tail.
BERT = ModelConfig(
    architecture="bert",
    task="embed",
    hidden_size=60,
    num_layers=3,
    num_heads=5,
    num_kv_heads=5,
    head_dim=12,
    intermediate_size=92,
    vocab_size=101,
    max_positions=512,
    norm_eps=1e-12,
    max_model_len=512,
    type_vocab_size=2,
)
XLMR = replace(BERT, norm_eps=1e-5, max_positions=514, type_vocab_size=1, position_offset=2, pooling="cls")


@dataclass(frozen=True)
class BertCase:
    """One model three times: transformers', the same weights by name, and what ours is built from."""

    config: ModelConfig
    oracle: HfBert | HfXlmRoberta
    weights: WeightSource


def make_case(config: ModelConfig, seed: int = 0) -> BertCase:
    """Random weights of a scale at which attention is far from uniform and norms are far from 1."""
    fields = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "layer_norm_eps": config.norm_eps,
        "type_vocab_size": config.type_vocab_size,
    }
    torch.manual_seed(seed)
    oracle: HfBert | HfXlmRoberta
    if config.position_offset:
        oracle = HfXlmRoberta(XLMRobertaConfig(**fields, pad_token_id=1), add_pooling_layer=False)
    else:
        oracle = HfBert(BertConfig(**fields, pad_token_id=0), add_pooling_layer=False)
    for name, tensor in oracle.named_parameters():
        scale = 1.5 * tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 0.3
        tensor.data = torch.randn_like(tensor) * scale + (1.0 if name.endswith("LayerNorm.weight") else 0.0)
    return BertCase(config, oracle.eval(), MappedWeights(oracle.state_dict(), "memory"))


def build(case: BertCase, dtype: torch.dtype = torch.float32) -> Model:
    """Our model on the CPU."""
    return build_model(case.config, case.weights, dtype, CPU, max_tokens=1 << 16)


def run(
    model: Model,
    sequences: Sequence[Int32],
    types: Sequence[Int32] | None = None,
    quantize: bool = False,
    attention: AttentionBackend | None = None,
) -> Outputs:
    """Ours on one packed batch; what it leaves unwritten stays NaN (int8: 77)."""
    batch = RaggedBatch.pack(sequences, types)
    vectors = torch.full((batch.num_seqs, model.config.dimensions), float("nan"))
    outputs = Outputs(vectors, torch.full(vectors.shape, 77, dtype=torch.int8) if quantize else None)
    device_batch = DeviceBatch(
        input_ids=torch.from_numpy(batch.input_ids),
        cu_seqlens=torch.from_numpy(batch.cu_seqlens),
        token_type_ids=None if batch.token_type_ids is None else torch.from_numpy(batch.token_type_ids),
        host_cu_seqlens=batch.cu_seqlens,
        max_seqlen=max(map(len, sequences)),
        attention=attention or SdpaAttention(model.attention_spec),
    )
    with torch.inference_mode():
        model.forward(device_batch, outputs)
    return outputs


def oracle_vectors(
    case: BertCase, sequences: Sequence[Int32], types: Sequence[Int32] | None = None
) -> torch.Tensor:
    """transformers' on one padded batch, pooled here: f32[B, H]."""
    width, pad = max(map(len, sequences)), case.oracle.config.pad_token_id
    ids = torch.full((len(sequences), width), pad)
    mask, type_ids = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.from_numpy(sequence)
        mask[row, : len(sequence)] = 1
        if types is not None:
            type_ids[row, : len(sequence)] = torch.from_numpy(types[row])
    with torch.no_grad():
        hidden = case.oracle(ids, attention_mask=mask, token_type_ids=type_ids).last_hidden_state
    if case.config.pooling == "cls":
        return hidden[:, 0]
    return (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)


def random_sequences(config: ModelConfig, lengths: Sequence[int], seed: int = 0) -> list[Int32]:
    """Ids from 2 up: 0 and 1 are padding to transformers' models, which skip the positions of padding."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, config.vocab_size, length, dtype=np.int32) for length in lengths]


def least_cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of all pairs of rows, in fp64."""
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1).min().item()

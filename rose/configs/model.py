"""The one description of a model that everything in this package builds from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rose.batch import TokenOutput
from rose.configs.rope import RopeScaling

Architecture = Literal["bert", "nomic_bert", "modernbert", "qwen3", "qwen2", "llama", "gemma3"]
Pooling = Literal["mean", "cls", "last", "max", "weightedmean", "splade"]
Task = Literal["embed", "score", "sparse"]
Activation = Literal["identity", "tanh", "relu", "gelu", "silu", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer over pooled vectors, with what follows it. folder: holds its weights, e.g. "2_Dense"."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: Activation


@dataclass(frozen=True, slots=True)
class Head:
    """What follows the transformer: the part of ModelConfig that modules.json decides."""

    task: Task
    pooling: Pooling = "mean"
    normalize: bool = False
    quantizer: Literal["tanh_int8"] | None = None
    dense: tuple[Dense, ...] = ()


@dataclass(frozen=True, slots=True)
class Scorer:
    """From the pooled token to logits, one a label.

    kind: "pooler": BERT's pooler (a layer and tanh) and its classifier. "roberta": the same two as its
        classification head. "modernbert": a layer, GELU, LayerNorm and a classifier. "linear": one layer
        named score. "tokens": the logit of the token true_id, less that of false_id.
    labels: what the logits are called, in their order.
    true_id, false_id: of kind "tokens"; false_id None: nothing is taken off.
    bias: whether the first layer of kind "modernbert" has one.
    template: how a query and a document become one text: "pair" as the tokenizer does it, or "qwen3" as
        Qwen3-Reranker's authors wrote it.
    """

    kind: Literal["pooler", "roberta", "modernbert", "linear", "tokens"]
    labels: tuple[str, ...]
    true_id: int = 0
    false_id: int | None = None
    template: Literal["pair", "qwen3"] = "pair"
    bias: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and outputs of one model. Lengths in tokens.

    architecture: which file of rose/models builds it; "bert" is also RoBERTa and XLM-R.
    task: "embed"; "score" for rerankers and classifiers; "sparse" for SPLADE.
    head_dim: as the file says; not always hidden_size / num_heads.
    max_positions: rows of the position table, or the longest position RoPE was trained for.
    position_offset: position of a sequence's first token (RoBERTa and XLM-R: pad_token_id + 1).
    causal: whether a token sees only itself and earlier ones.
    windows: of each layer: how many places away the farthest token is that one sees; None: any number.
        Empty: every layer sees all.
    rope_scaling: what changes the frequencies that rope_theta gives; None: nothing.
    local_rope_theta: rope_theta of the layers that have a window.
    norm_offset: what norms add to their weight before it is a factor (Gemma: 1).
    attention_scale: factor on q·k; None: head_dim ** -0.5.
    attention_bias: whether the projections to q, k and v have a bias (ModernBERT: that of the output too).
    mlp_bias, norm_bias: whether the feed-forward part's layers and the LayerNorms have one (ModernBERT).
    normalize: whether vectors are L2-normalised unless a request says not to.
    quantizer: "tanh_int8" = round(tanh(x) * 127), or None.
    dense: linear layers after pooling, in order.
    chunk_separator: see `rose.batch.EngineInfo`.
    scorer: what follows the pooled token when the task is "score".
    max_model_len: the longest sequence the model takes, special tokens included.
    token_heads: heads that give something for each token; the transformer's own states are none of them.
    prompts, default_prompt_name, unweighted_ids: see `rose.batch.EngineInfo`.
    fp8_weights: whether the folder holds the weights of products as e4m3 with a scale a row.
    """

    architecture: Architecture
    task: Task
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    max_model_len: int
    pooling: Pooling = "mean"
    normalize: bool = False
    quantizer: Literal["tanh_int8"] | None = None
    causal: bool = False
    rope_theta: float = 0.0
    rope_scaling: RopeScaling | None = None
    type_vocab_size: int = 0
    position_offset: int = 0
    tie_embeddings: bool = False
    windows: tuple[int | None, ...] = ()
    local_rope_theta: float = 0.0
    norm_offset: float = 0.0
    attention_scale: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    dense: tuple[Dense, ...] = ()
    chunk_separator: int | None = None
    scorer: Scorer | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    token_heads: tuple[TokenOutput, ...] = ()
    unweighted_ids: tuple[int, ...] = ()
    fp8_weights: bool = False

    @property
    def token_outputs(self) -> Mapping[TokenOutput, int]:
        """What the model gives for each token, and how many values: nothing, unless it is an embedder."""
        if self.task != "embed":
            return {}
        widths: dict[TokenOutput, int] = {"lexical": 1, "multi_vector": self.hidden_size}
        return {**{kind: widths[kind] for kind in self.token_heads}, "hidden": self.hidden_size}

    @property
    def dimensions(self) -> int:
        """Elements of a vector: for a scorer, its logits; for SPLADE, its words."""
        if self.task == "sparse":
            return self.vocab_size
        if self.scorer is not None:
            return len(self.scorer.labels)
        return self.dense[-1].out_features if self.dense else self.hidden_size

"""What a model folder says about its model, read from Hugging Face files into one frozen dataclass.

Reads config.json, modules.json, 1_Pooling/config.json and sentence_bert_config.json; knows neither torch nor
weights. Whatever it cannot honour it refuses, so that no vector is ever silently wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rose.errors import ModelLoadError

Pooling = Literal["mean", "cls", "last"]
Task = Literal["embed", "score"]
Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and outputs of one model. Lengths in tokens.

    architecture: "bert" (BERT, RoBERTa, XLM-R) or "qwen3" (bidirectional and causal).
    task: "embed", or "score" for rerankers.
    head_dim: as the file says; not always hidden_size / num_heads.
    max_positions: rows of the position table, or the longest position RoPE was trained for.
    position_offset: position of a sequence's first token (RoBERTa and XLM-R: pad_token_id + 1).
    causal: whether a token sees only itself and earlier ones.
    normalize: whether vectors are L2-normalised unless a request says not to.
    quantizer: "tanh_int8" = round(tanh(x) * 127), or None.
    max_model_len: the longest sequence the model takes, special tokens included.
    """

    architecture: Literal["bert", "qwen3"]
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
    hidden_act: str
    max_model_len: int
    pooling: Pooling = "mean"
    normalize: bool = False
    quantizer: Literal["tanh_int8"] | None = None
    causal: bool = False
    rope_theta: float = 0.0
    type_vocab_size: int = 0
    position_offset: int = 0
    tie_embeddings: bool = False


@dataclass(frozen=True, slots=True)
class _Head:
    """What follows the transformer: the part of ModelConfig that modules.json decides."""

    task: Task
    pooling: Pooling = "mean"
    normalize: bool = False
    quantizer: Literal["tanh_int8"] | None = None


# What each class computes when no modules.json says more. As in sentence-transformers, a bare encoder gives
# its mean; a bare causal language model is more likely a scorer than an embedder, so it is read as one.
_PPLX = _Head("embed", "mean", False, "tanh_int8")
_CLASSES: dict[str, tuple[Literal["bert", "qwen3"], _Head]] = {
    "BertModel": ("bert", _Head("embed")),
    "BertForMaskedLM": ("bert", _Head("embed")),
    "BertForSequenceClassification": ("bert", _Head("score", "cls")),
    "RobertaModel": ("bert", _Head("embed")),
    "RobertaForMaskedLM": ("bert", _Head("embed")),
    "RobertaForSequenceClassification": ("bert", _Head("score", "cls")),
    "XLMRobertaModel": ("bert", _Head("embed")),
    "XLMRobertaForMaskedLM": ("bert", _Head("embed")),
    "XLMRobertaForSequenceClassification": ("bert", _Head("score", "cls")),
    "Qwen3ForCausalLM": ("qwen3", _Head("score", "last")),
    "Qwen3ForSequenceClassification": ("qwen3", _Head("score", "last")),
    "Qwen3Model": ("qwen3", _Head("embed", "last")),
    "PPLXQwen3Model": ("qwen3", _PPLX),
    "PPLXQwen3ContextualModel": ("qwen3", _PPLX),
}

# Both spellings of sentence-transformers: booleans before 5.3, one name since.
_POOLINGS: dict[str, Pooling] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
}


def load_config(folder: Path) -> ModelConfig:
    """Read the folder's configuration files.

    Raises:
        ModelLoadError: a file is missing or malformed, or names something that is not supported; the message
            names the file and the value.
    """
    path = folder / "config.json"
    fields = _read_object(path)
    name = _class_name(fields, path)
    family, default_head = _CLASSES[name]
    head = _read_head(folder, default_head)
    config = _bert(fields, path, head) if family == "bert" else _qwen3(fields, path, head)
    return config


def _class_name(fields: Json, path: Path) -> str:
    """The first known class of `architectures`, or the one that auto_map names."""
    architectures = fields.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    auto_map = fields.get("auto_map")
    if not names and isinstance(auto_map, dict):
        names = [str(auto_map.get("AutoModel", "")).rpartition(".")[2]]
    for name in names:
        if name in _CLASSES:
            return name
    known = ", ".join(sorted(_CLASSES))
    raise ModelLoadError(f"{path}: architecture {names or 'not named'} is not supported; known: {known}")


def _bert(fields: Json, path: Path, head: _Head) -> ModelConfig:
    """BERT, and RoBERTa and XLM-R, which differ in where positions start."""
    _require_value(fields, path, "hidden_act", "gelu")
    _require_value(fields, path, "position_embedding_type", "absolute")
    if fields.get("is_decoder"):
        raise ModelLoadError(f"{path}: is_decoder true is not supported")
    offset = (
        _integer(fields, path, "pad_token_id", 1, 0) + 1 if "roberta" in str(fields.get("model_type")) else 0
    )
    hidden_size = _integer(fields, path, "hidden_size")
    num_heads = _integer(fields, path, "num_attention_heads")
    if hidden_size % num_heads:
        raise ModelLoadError(f"{path}: hidden_size {hidden_size} is no multiple of {num_heads} heads")
    max_positions = _integer(fields, path, "max_position_embeddings")
    return ModelConfig(
        architecture="bert",
        task=head.task,
        hidden_size=hidden_size,
        num_layers=_integer(fields, path, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=_integer(fields, path, "intermediate_size"),
        vocab_size=_integer(fields, path, "vocab_size"),
        max_positions=max_positions,
        norm_eps=_number(fields, path, "layer_norm_eps", 1e-12),
        hidden_act="gelu",
        max_model_len=_max_model_len(path.parent, max_positions - offset),
        pooling=head.pooling,
        normalize=head.normalize,
        quantizer=head.quantizer,
        type_vocab_size=_integer(fields, path, "type_vocab_size", 2),
        position_offset=offset,
    )


def _qwen3(fields: Json, path: Path, head: _Head) -> ModelConfig:
    """Qwen3, causal unless use_bidirectional_attention says otherwise (pplx-embed)."""
    _require_value(fields, path, "hidden_act", "silu")
    _require_value(fields, path, "attention_bias", False)
    _require_value(fields, path, "use_sliding_window", False)
    hidden_size = _integer(fields, path, "hidden_size")
    num_heads = _integer(fields, path, "num_attention_heads")
    max_positions = _integer(fields, path, "max_position_embeddings")
    return ModelConfig(
        architecture="qwen3",
        task=head.task,
        hidden_size=hidden_size,
        num_layers=_integer(fields, path, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_integer(fields, path, "num_key_value_heads", num_heads),
        # transformers' Qwen3Config defaults to 128 whatever the hidden size; 4B has 32 heads of 128 at 2560.
        head_dim=_integer(fields, path, "head_dim", 128),
        intermediate_size=_integer(fields, path, "intermediate_size"),
        vocab_size=_integer(fields, path, "vocab_size"),
        max_positions=max_positions,
        norm_eps=_number(fields, path, "rms_norm_eps", 1e-6),
        hidden_act="silu",
        max_model_len=_max_model_len(path.parent, max_positions),
        pooling=head.pooling,
        normalize=head.normalize,
        quantizer=head.quantizer,
        causal=not fields.get("use_bidirectional_attention", False),
        rope_theta=_rope_theta(fields, path),
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
    )


def _rope_theta(fields: Json, path: Path) -> float:
    """From rope_parameters (transformers 5) or rope_theta; scaled variants (YaRN, linear) are refused."""
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ModelLoadError(f"{path}: rope_parameters is not an object")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ModelLoadError(f"{path}: rope_type {kind!r} is not supported; only 'default' is")
    source = parameters if "rope_theta" in parameters else fields
    return _number(source, path, "rope_theta", 10000.0)


def _read_head(folder: Path, default: _Head) -> _Head:
    """Follow modules.json: Transformer, Pooling, then Normalize or the int8 quantiser, in any number."""
    path = folder / "modules.json"
    if not path.is_file():
        return default
    modules = _read(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"{path}: not a list of modules")
    pooling: Pooling | None = None
    normalize, quantizer = False, None
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling" and pooling is None:
            pooling = _read_pooling(folder / str(module.get("path", "")) / "config.json")
        elif kind == "Normalize" and pooling is not None:
            normalize = True
        elif kind == "FlexibleQuantizer" and pooling is not None:
            quantizer = "tanh_int8"
        elif kind != "Transformer" or pooling is not None:
            raise ModelLoadError(f"{path}: module {module.get('type')!r} is not supported at its place")
    if pooling is None:
        raise ModelLoadError(f"{path}: no Pooling module; only models that pool their tokens are supported")
    return _Head("embed", pooling, normalize, "tanh_int8" if quantizer else None)


def _read_pooling(path: Path) -> Pooling:
    fields = _read_object(path)
    if fields.get("include_prompt", True) is not True:
        raise ModelLoadError(f"{path}: include_prompt false is not supported")
    named = fields.get("pooling_mode")
    if named is None:
        prefix = "pooling_mode_"
        modes = [
            key.removeprefix(prefix) for key, on in fields.items() if key.startswith(prefix) and on is True
        ]
    else:
        modes = [str(mode) for mode in named] if isinstance(named, list) else [str(named)]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelLoadError(f"{path}: pooling {modes} is not supported; one of mean, cls, lasttoken is")
    return _POOLINGS[modes[0]]


def _max_model_len(folder: Path, max_positions: int) -> int:
    """The smaller of what positions allow and what sentence_bert_config.json and the tokenizer declare."""
    limits = [max_positions]
    for name, key in (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        declared = _read_object(folder / name).get(key) if (folder / name).is_file() else None
        if isinstance(declared, int | float) and declared > 0:
            limits.append(int(declared))
    return min(limits)


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing: not a model folder in Hugging Face layout") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from None


def _read_object(path: Path) -> Json:
    fields = _read(path)
    if not isinstance(fields, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return fields


def _require_value(fields: Json, path: Path, key: str, only: object) -> None:
    """Refuse any value of `key` but `only`, which is also what an absent key means."""
    if fields.get(key, only) not in (only, None):
        raise ModelLoadError(f"{path}: {key} {fields[key]!r} is not supported; only {only!r} is")


def _number(fields: Json, path: Path, key: str, default: float | None = None) -> float:
    value = fields.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelLoadError(
            f"{path}: {key} is {'missing' if value is None else repr(value)}; a number is needed"
        )
    return float(value)


def _integer(fields: Json, path: Path, key: str, default: int | None = None, least: int = 1) -> int:
    value = _number(fields, path, key, default)
    if value != int(value) or value < least:
        raise ModelLoadError(f"{path}: {key} is {value:g}; a whole number of at least {least} is needed")
    return int(value)

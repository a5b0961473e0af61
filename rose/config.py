"""What a model folder says about its model, read from Hugging Face files into one frozen dataclass.

Reads config.json and what sentence-transformers puts beside it; knows neither torch nor weights. Whatever it
cannot honour it refuses, so that no vector is ever silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rose.configs import bert, decoder, gemma3, modernbert, nomic_bert
from rose.configs.fields import Fields
from rose.configs.model import Dense as Dense
from rose.configs.model import Head
from rose.configs.model import ModelConfig as ModelConfig
from rose.configs.model import Scorer as Scorer
from rose.configs.pipeline import check_dense, read_head, read_prompts
from rose.configs.quantization import has_fp8_weights
from rose.configs.scorer import read_scorer, scored_pooling
from rose.configs.token_heads import read_token_heads, unweighted_ids
from rose.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class _Class:
    """A class that `architectures` may name. head: what it computes when no modules.json says more."""

    read: Callable[[Fields, Head], ModelConfig]
    head: Head


# As in sentence-transformers, a bare encoder gives its mean; a bare causal language model is more likely a
# scorer than an embedder, so it is read as one.
_ENCODES, _SCORES = Head("embed"), Head("score", "cls")
_LAST, _GENERATES = Head("embed", "last"), Head("score", "last")
_PPLX = Head("embed", "mean", quantizer="tanh_int8")
_CLASSES: dict[str, _Class] = {
    "BertModel": _Class(bert.read, _ENCODES),
    "BertForMaskedLM": _Class(bert.read, _ENCODES),
    "BertForSequenceClassification": _Class(bert.read, _SCORES),
    "RobertaModel": _Class(bert.read, _ENCODES),
    "RobertaForMaskedLM": _Class(bert.read, _ENCODES),
    "RobertaForSequenceClassification": _Class(bert.read, _SCORES),
    "XLMRobertaModel": _Class(bert.read, _ENCODES),
    "XLMRobertaForMaskedLM": _Class(bert.read, _ENCODES),
    "XLMRobertaForSequenceClassification": _Class(bert.read, _SCORES),
    "NomicBertModel": _Class(nomic_bert.read, _ENCODES),
    "ModernBertModel": _Class(modernbert.read, _ENCODES),
    "ModernBertForMaskedLM": _Class(modernbert.read, _ENCODES),
    "ModernBertForSequenceClassification": _Class(modernbert.read, _SCORES),
    "Qwen3ForCausalLM": _Class(decoder.read_qwen3, _GENERATES),
    "Qwen3ForSequenceClassification": _Class(decoder.read_qwen3, _GENERATES),
    "Qwen3Model": _Class(decoder.read_qwen3, _LAST),
    "PPLXQwen3Model": _Class(decoder.read_pplx, _PPLX),
    "PPLXQwen3ContextualModel": _Class(decoder.read_pplx, _PPLX),
    "Qwen2Model": _Class(decoder.read_qwen2, _LAST),
    "Qwen2ForCausalLM": _Class(decoder.read_qwen2, _GENERATES),
    "LlamaModel": _Class(decoder.read_llama, _LAST),
    "LlamaForCausalLM": _Class(decoder.read_llama, _GENERATES),
    "MistralModel": _Class(decoder.read_llama, _LAST),
    "MistralForCausalLM": _Class(decoder.read_llama, _GENERATES),
    "Gemma3TextModel": _Class(gemma3.read, _ENCODES),
}


def load_config(folder: Path) -> ModelConfig:
    """Read the folder's configuration files.

    Raises:
        ModelLoadError: a file is missing or malformed, or names something that is not supported; the message
            names the file and the value.
    """
    try:
        return _read(folder)
    except OSError as error:  # asked whether a file is there that need not be
        raise ModelLoadError(f"{folder} cannot be read: {error}") from None


def _read(folder: Path) -> ModelConfig:
    fields = Fields.read(folder / "config.json")
    class_name = _class_name(fields)
    known = _CLASSES[class_name]
    head = read_head(folder, known.head)
    if head.task == "sparse" and class_name != "BertForMaskedLM":
        raise fields.refuse(f"SpladePooling needs the head of BertForMaskedLM; this is {class_name}")
    config = known.read(fields, head)
    _check_heads(config, fields)
    check_dense(head, config.hidden_size, fields.path)
    prompts, default_prompt_name = read_prompts(folder)
    token_heads = read_token_heads(class_name, fields)
    return replace(
        config,
        pooling=scored_pooling(fields, head.pooling) if head.task == "score" else head.pooling,
        normalize=head.normalize,
        quantizer=head.quantizer,
        dense=head.dense,
        chunk_separator=_chunk_separator(class_name, fields),
        scorer=read_scorer(class_name, fields) if head.task == "score" else None,
        prompts=prompts,
        default_prompt_name=default_prompt_name,
        token_heads=token_heads,
        unweighted_ids=unweighted_ids(fields) if token_heads else (),
        fp8_weights=has_fp8_weights(fields),
    )


def _check_heads(config: ModelConfig, fields: Fields) -> None:
    """Refuse heads that cannot be grouped, or cannot turn."""
    if config.num_heads % config.num_kv_heads:
        raise fields.refuse(f"{config.num_heads} heads cannot share {config.num_kv_heads} of keys and values")
    if config.rope_theta and config.head_dim % 2:
        raise fields.refuse(f"head_dim {config.head_dim} is odd; rotation turns pairs")


def _chunk_separator(class_name: str, fields: Fields) -> int | None:
    """<|endoftext|> in Qwen's vocabulary, unless the file says otherwise.

    Source: pplx-embed-context's modeling.py joins the chunks of a document by its tokenizer's sep_token.
    """
    if class_name != "PPLXQwen3ContextualModel":
        return None
    separator, vocab_size = fields.integer("sep_token_id", 151_643, least=0), fields.integer("vocab_size")
    if separator >= vocab_size:
        raise fields.refuse(f"sep_token_id {separator} is out of range; vocab_size is {vocab_size}")
    return separator


def _class_name(fields: Fields) -> str:
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
    raise fields.refuse(f"architecture {names or 'not named'} is not supported; known: {known}")

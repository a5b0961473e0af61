"""How a scoring model gets from its pooled token to logits: read from config.json and what lies beside it."""

from __future__ import annotations

from pathlib import Path

from rose.configs.fields import Fields, read_json
from rose.configs.model import Pooling, Scorer

_KINDS = {
    "BertForSequenceClassification": "pooler",
    "RobertaForSequenceClassification": "roberta",
    "XLMRobertaForSequenceClassification": "roberta",
    "ModernBertForSequenceClassification": "modernbert",
    "Qwen3ForSequenceClassification": "linear",
}
# Ids of "yes" and "no" in Qwen's vocabulary, for folders without a tokenizer.
# Source: the model card of Qwen/Qwen3-Reranker-0.6B.
_QWEN_VOCAB = 151_643
_QWEN_YES, _QWEN_NO = 9693, 2152


def read_scorer(class_name: str, fields: Fields) -> Scorer:
    """The scorer of a model whose task is "score".

    Raises:
        ModelLoadError: the labels are malformed, or nothing says which tokens mean yes and no.
    """
    kind, module = _KINDS.get(class_name), _logit_score(fields.path.parent)
    if kind is not None and module is not None:
        raise module.refuse(f"LogitScore does not fit {class_name}, which has a head of its own")
    if kind == "pooler":
        return Scorer("pooler", _labels(fields))
    if kind == "roberta":
        return Scorer("roberta", _labels(fields))
    if kind == "modernbert":
        fields.require("classifier_activation", "gelu")
        return Scorer("modernbert", _labels(fields), bias=bool(fields.get("classifier_bias", False)))
    if kind == "linear":
        labels = _labels(fields)
        return Scorer("linear", labels, template="qwen3" if len(labels) == 1 else "pair")
    true_id, false_id = _token_ids(class_name, fields, module)
    vocab_size = fields.integer("vocab_size")
    for token_id in (true_id, false_id or 0):
        if not 0 <= token_id < vocab_size:
            raise fields.refuse(f"scoring token {token_id} is out of range; vocab_size is {vocab_size}")
    return Scorer(
        "tokens", ("score",), true_id, false_id, "qwen3" if class_name.startswith("Qwen3") else "pair"
    )


def scored_pooling(fields: Fields, default: Pooling) -> Pooling:
    """Which tokens a scorer looks at: ModernBERT's config says it; of others the class does."""
    named = fields.get("classifier_pooling", default)
    if named == "cls":
        return "cls"
    if named == "mean":
        return "mean"
    if named != default:
        raise fields.refuse(f"classifier_pooling {named!r} is not supported; 'cls' and 'mean' are")
    return default


def _labels(fields: Fields) -> tuple[str, ...]:
    """id2label in the order of its ids; transformers gives a file without any two of them."""
    named = fields.get("id2label")
    if named is None:
        count = fields.integer("num_labels", 2)
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(named, dict) or sorted(named) != sorted(map(str, range(len(named)))) or not named:
        raise fields.refuse("id2label does not name labels 0, 1, 2, ...")
    return tuple(str(named[str(index)]) for index in range(len(named)))


def _token_ids(class_name: str, fields: Fields, module: Fields | None) -> tuple[int, int | None]:
    """Ids of the tokens that mean relevant and not: as LogitScore says, or those of yes and no."""
    if module is not None:
        true_id = module.integer("true_token_id", least=0)
        has_false = module.get("false_token_id") is not None
        return true_id, module.integer("false_token_id", least=0) if has_false else None
    if not class_name.startswith("Qwen3"):
        raise fields.refuse(
            f"{class_name} is a language model: to embed with it, modules.json must name a Pooling module;"
            " to score with it, a LogitScore module"
        )
    vocabulary = _vocabulary(fields.path.parent)
    if vocabulary is None and fields.integer("vocab_size") >= _QWEN_VOCAB:
        return _QWEN_YES, _QWEN_NO
    yes, no = ((vocabulary or {}).get(word) for word in ("yes", "no"))
    if not isinstance(yes, int) or not isinstance(no, int):
        raise fields.refuse('to score, the tokenizer\'s vocabulary must have tokens "yes" and "no"')
    return yes, no


def _logit_score(folder: Path) -> Fields | None:
    """The settings of the LogitScore module; read_head has checked the list."""
    path = folder / "modules.json"
    modules = read_json(path) if path.is_file() else []
    for module in modules if isinstance(modules, list) else []:
        if str(module.get("type", "")).endswith(".LogitScore"):
            return Fields.read(folder / str(module.get("path", "")) / "config.json")
    return None


def _vocabulary(folder: Path) -> dict[str, object] | None:
    """Tokens to ids; of vocab.json if it is there, which is a quarter of tokenizer.json."""
    if (folder / "vocab.json").is_file():
        vocabulary = read_json(folder / "vocab.json")
    elif (folder / "tokenizer.json").is_file():
        tokenizer = read_json(folder / "tokenizer.json")
        model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
    else:
        return None
    return vocabulary if isinstance(vocabulary, dict) else {}

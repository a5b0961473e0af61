"""`server.py verify` on a model of every task, with a tokenizer of its kind; wrong ones must fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    MistralConfig,
    MistralModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

import rose.oracle
import server
from gateway.verification_texts import TEXTS
from rose.config import load_config
from tests.unit.rose.parity import save_oracle

WORDS = 600
SHAPES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 92,
    "max_position_embeddings": 300,
    "pad_token_id": 0,
}
DECODER = SHAPES | {"num_key_value_heads": 1, "head_dim": 24, "max_position_embeddings": 400}
NLI = {"id2label": {0: "contradiction", 1: "entailment", 2: "neutral"}}


@cache
def word_pieces() -> Tokenizer:
    """BERT's kind: pairs in [CLS] and [SEP], with token types. Once: its trainer breaks ties at random."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=WORDS, special_tokens=specials))
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def roberta_pieces() -> Tokenizer:
    """RoBERTa's kind: two separators between a pair, no types."""
    tokenizer = byte_pairs()
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|>:0 $A:0 <|im_end|>:0",
        pair="<|im_start|>:0 $A:0 <|im_end|>:0 <|im_end|>:0 $B:0 <|im_end|>:0",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    return tokenizer


def byte_pairs() -> Tokenizer:
    """Qwen's kind: nothing added, and words that are in the chat of its reranker."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS - 2,
        special_tokens=[AddedToken(token, special=True) for token in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    chat = "yes no Judge whether the Document meets the requirements based on the Query and the Instruct"
    tokenizer.train_from_iterator([chat] * 200 + ["yes", "no"] * 200, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def bert(**fields: Any) -> Any:
    return BertForSequenceClassification(BertConfig(**SHAPES, num_labels=1, **fields))


def xlm_roberta(**fields: Any) -> Any:
    config = XLMRobertaConfig(**SHAPES, num_labels=1, type_vocab_size=1, **fields)
    return XLMRobertaForSequenceClassification(config)


def roberta(**fields: Any) -> Any:
    return RobertaForSequenceClassification(RobertaConfig(**SHAPES, type_vocab_size=1, **NLI, **fields))


def modernbert(**fields: Any) -> Any:
    config = ModernBertConfig(**SHAPES, num_labels=1, local_attention=16, cls_token_id=2, **fields)
    return ModernBertForSequenceClassification(config)


def qwen3(**fields: Any) -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**DECODER, **fields))


def qwen3_classifier(**fields: Any) -> Any:
    return Qwen3ForSequenceClassification(Qwen3Config(**DECODER, num_labels=1, **fields))


def splade(**fields: Any) -> Any:
    return BertForMaskedLM(BertConfig(**SHAPES, **fields))


MODELS: dict[str, tuple[Callable[..., Any], Callable[[], Tokenizer]]] = {
    "ms-marco-MiniLM": (bert, word_pieces),
    "bge-reranker": (xlm_roberta, roberta_pieces),
    "labels": (roberta, roberta_pieces),
    "gte-reranker-modernbert": (modernbert, word_pieces),
    "qwen3-reranker": (qwen3, byte_pairs),
    "qwen3-classifier": (qwen3_classifier, byte_pairs),
    "splade": (splade, word_pieces),
}


def save(folder: Path, name: str, seed: int = 3) -> Path:
    """The model, its tokenizer, and for SPLADE its modules, in a folder."""
    make, tokenizer = MODELS[name]
    save_oracle(folder, make(), seed=seed)
    (folder / "modules.json").unlink()
    fast: Any = PreTrainedTokenizerFast
    own = {"pad_token": "[PAD]", "model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    settings = own if tokenizer is word_pieces else {}
    fast(tokenizer_object=tokenizer(), **settings).save_pretrained(folder)
    if name == "splade":
        kinds = {"": "models.Transformer", "1_SpladePooling": "sparse_encoder.models.SpladePooling"}
        modules = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds.items()]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_SpladePooling").mkdir()
        (folder / "1_SpladePooling" / "config.json").write_text("{}")
    return folder


def run(folder: Path, *flags: str) -> int:
    return server.main(["verify", "--model", str(folder), "--device", "cpu", "--threads", "1", *flags])


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "set_up_logging", lambda level: None)


def test_without_its_packages_it_says_how_to_install_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "model", next(iter(MODELS)))
    monkeypatch.setitem(sys.modules, "transformers", None)
    capsys.readouterr()
    assert run(folder) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: this needs the extra `verify`: pip install -e '.[verify]' (")
    assert printed.count("\n") == 1


@pytest.mark.parametrize("name", MODELS)
def test_every_task_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """0, and 27 texts, 27 pairs, or both; then 1 against the same model with other weights."""
    folder = save(tmp_path / "model", name)
    status, out = run(folder), capsys.readouterr().out
    count = 27 if name in ("splade", "qwen3-reranker", "qwen3-classifier") else 54
    assert out.startswith(f"{count} texts, worst difference 0.0000") and out.endswith("the same\n"), out
    assert status == 0


@pytest.mark.parametrize("name", MODELS)
def test_other_weights_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, other = save(tmp_path / "model", name), save(tmp_path / "other", name, seed=4)
    right = rose.oracle.TransformersOracle
    monkeypatch.setattr(rose.oracle, "TransformersOracle", lambda _, config: right(other, config))
    assert run(folder) == 1
    out = capsys.readouterr().out
    assert out.endswith("NOT the same\n") and "other tokens" not in out


def test_settings_that_name_no_types_are_honoured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Authors' code then runs pairs with all types zero, and so does this server."""
    folder = save(tmp_path, "ms-marco-MiniLM")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_input_names": ["input_ids"]}))
    assert run(folder) == 0
    assert "other tokens: " not in capsys.readouterr().out


def test_a_class_that_gives_no_types_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Authors' code would then run pairs with all types zero; only tokenizer.json says otherwise."""
    folder = save(tmp_path, "ms-marco-MiniLM")
    path = folder / "tokenizer_config.json"
    settings = {k: v for k, v in json.loads(path.read_text()).items() if k != "model_input_names"}
    path.write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert run(folder) == 1
    out = capsys.readouterr().out
    assert out.count("other tokens: ") == 27 and "worst difference 0.0000" in out


def test_an_end_that_only_the_settings_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """e5-mistral: both sides end texts with the token that is pooled."""
    oracle = MistralModel(MistralConfig(**DECODER))
    folder = save_oracle(tmp_path, oracle, "last")
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=byte_pairs(), eos_token="<|im_end|>").save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_eos_token": True}))
    tokens = rose.oracle.TransformersOracle(folder, load_config(folder)).tokens(["yes"], 100)
    assert tokens is not None and tokens[0].tolist()[1:] == [2]
    capsys.readouterr()
    assert run(folder) == 0
    assert "27 texts, worst cosine" in capsys.readouterr().out


def test_16_bits_pass_with_their_own_tolerance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path, "ms-marco-MiniLM")
    assert run(folder, "--dtype", "bfloat16") == 0
    assert "at most 0.25 wanted" in capsys.readouterr().out
    assert run(folder, "--dtype", "bfloat16", "--tolerance", "1e-6") == 1


@pytest.mark.parametrize("name", ["ms-marco-MiniLM", "qwen3-reranker", "splade"])
def test_a_damaged_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    folder = save(tmp_path, name)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    capsys.readouterr()
    assert run(folder) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_the_oracle_is_sentence_transformers_cross_encoder(tmp_path: Path) -> None:
    folder = save(tmp_path, "ms-marco-MiniLM")
    oracle = rose.oracle.TransformersOracle(folder, load_config(folder))
    pairs = list(zip(TEXTS, [*TEXTS[1:], TEXTS[0]], strict=True))
    tokens = [oracle.tokens(pair, 300) for pair in pairs]
    ours = [oracle.result(*row).vectors[0, 0] for row in tokens if row is not None]
    encoder = CrossEncoder(str(folder), max_length=300, device="cpu", activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(ours, encoder.predict(pairs), atol=1e-4)

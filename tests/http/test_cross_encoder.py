"""Scoring models behind the server, on the real CPU engine: what transformers scores, on every route."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gateway.options import GatewayOptions
from gateway.templates import QWEN3_BODY, QWEN3_INSTRUCTION, QWEN3_PREFIX, QWEN3_SUFFIX
from gateway.tokenization.ends import SPACE, end_of
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from rose.batch import Engine, Int32
from rose.engine import load_engine
from rose.engine_options import EngineOptions
from tests.fakes import FakeEngine, fake_info
from tests.http.served import Served, byte_tokenizer, serving

QUERY = "what is a rose"
TEXTS = ["a flower", "a rose is a rose", "steel, and how to make it: " + "blow " * 20, "A Flower"]
LONG = "word " * 200_000  # a million characters
LABELS = {0: "contradiction", 1: "entailment", 2: "neutral"}
YES, NO = 261, 262


def bert_tokenizer() -> Tokenizer:
    """Bytes in BERT's template, with token types."""
    backend = _bytes({"[CLS]": 256, "[SEP]": 257})
    backend.post_processor = processors.BertProcessing(("[SEP]", 257), ("[CLS]", 256))
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    return backend


def chat_tokenizer() -> Tokenizer:
    """Bytes, and the marks that Qwen3-Reranker's template has."""
    backend = _bytes({})
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    backend.add_tokens(["<think>", "</think>"])
    return backend


def _bytes(more: dict[str, int]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)} | more
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def _save(model: Any, folder: Path) -> Any:
    torch.manual_seed(4)
    for name, tensor in model.named_parameters():
        scale = 1.5 * tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 0.3
        is_norm = "norm" in name.lower() and name.endswith("weight")
        tensor.data = torch.randn_like(tensor) * scale + (1.0 if is_norm else 0.0)
    model.tie_weights()
    model.eval().save_pretrained(folder)
    return model


def _bert(folder: Path, **fields: Any) -> Any:
    sizes = {"hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 92}
    config = BertConfig(**sizes, vocab_size=258, max_position_embeddings=64, **fields)
    return _save(BertForSequenceClassification(config), folder)


def _qwen3(folder: Path) -> Any:
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}
    config = Qwen3Config(
        **sizes,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=263,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    (folder / "vocab.json").write_text(json.dumps({"yes": YES, "no": NO}))
    return _save(Qwen3ForCausalLM(config), folder)


def _engine(folder: Path) -> Engine:
    options = EngineOptions(device="cpu", num_threads=1)
    return load_engine(folder, options, dummy=False, model_name="scorer")


async def _serve(folder: Path, backend: Tokenizer) -> AsyncIterator[Served]:
    engine = _engine(folder)
    async with serving(engine=engine, tokenizer=HuggingFaceTokenizer(backend)) as served:  # type: ignore[arg-type]
        yield served
    engine.close()


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bert")


@pytest.fixture(scope="module")
def bert(bert_folder: Path) -> Any:
    return _bert(bert_folder, num_labels=1)


@pytest.fixture
async def server(bert: Any, bert_folder: Path) -> AsyncIterator[Served]:
    async for served in _serve(bert_folder, bert_tokenizer()):
        yield served


def _logits(model: Any, *texts: str, max_tokens: int = 64) -> np.ndarray:
    backend = bert_tokenizer()
    backend.enable_truncation(max_tokens, strategy="longest_first")
    encoding = backend.encode(*texts)
    with torch.no_grad():
        output = model(torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.type_ids]))
    logits: np.ndarray = output.logits[0].double().numpy()
    return logits


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


async def test_rerank_gives_the_models_scores(server: Served, bert: Any) -> None:
    logits = np.array([_logits(bert, QUERY, text)[0] for text in TEXTS])
    order = np.argsort(-logits)
    body = {"query": QUERY, "texts": TEXTS, "truncate": True}
    raw = (await server.embed({**body, "raw_scores": True}, path="/rerank")).value
    assert [rank["index"] for rank in raw] == order.tolist()
    np.testing.assert_allclose([rank["score"] for rank in raw], logits[order], atol=1e-4)
    squashed = (await server.embed(body, path="/rerank")).value
    np.testing.assert_allclose([rank["score"] for rank in squashed], _sigmoid(logits[order]), atol=1e-5)
    assert np.ptp(logits) > 0.1
    info = (await server.send("GET", "/info")).value
    names = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    assert info["model_type"] == {"reranker": names}


async def test_each_query_with_its_document(server: Served, bert: Any) -> None:
    queries = [QUERY, "steel", "x", "yy"]
    body = {"text_1": queries, "text_2": TEXTS, "truncate_prompt_tokens": -1}
    reply = (await server.embed(body, path="/v1/score")).value
    logits = [_logits(bert, query, text)[0] for query, text in zip(queries, TEXTS, strict=True)]
    np.testing.assert_allclose(
        [item["score"] for item in reply["data"]], _sigmoid(np.array(logits)), atol=1e-5
    )
    raw = (await server.embed({**body, "use_activation": False}, path="/score")).value
    np.testing.assert_allclose([item["score"] for item in raw["data"]], logits, atol=1e-4)


async def test_a_scorer_compares_no_words(server: Served) -> None:
    body = {"query": QUERY, "documents": TEXTS, "score_by": "sparse"}
    reply = await server.embed(body, path="/v2/rerank")
    assert (reply.status, "does not compare them by sparse" in reply.value["message"]) == (400, True)


@pytest.mark.parametrize("path", ["/similarity", "/"])
async def test_a_scorer_has_no_vectors_whose_cosine_could_be_told(server: Served, path: str) -> None:
    reply = await server.embed({"inputs": {"source_sentence": QUERY, "sentences": TEXTS}}, path=path)
    assert reply.status == 422
    assert "does not give cosines; it scores texts: /rerank, /score and /predict" in reply.value["error"]


async def test_usage_counts_whole_pairs(server: Served) -> None:
    reply = (await server.embed({"query": "ab", "documents": ["c", "def"]}, path="/v1/rerank")).value
    assert reply["usage"]["prompt_tokens"] == (3 + 2 + 1) + (3 + 2 + 3)


async def test_too_long_pairs_are_refused_or_cut(server: Served, bert: Any) -> None:
    body = {"query": QUERY, "texts": ["ok", "y" * 70]}
    refused = await server.embed(body, path="/rerank")
    assert refused.status == 422
    assert "texts[1] has 84 tokens and 3 around them" in refused.value["error"]
    cut = (await server.embed({**body, "truncate": True, "raw_scores": True}, path="/rerank")).value
    score = next(rank["score"] for rank in cut if rank["index"] == 1)
    assert score == pytest.approx(_logits(bert, QUERY, "y" * 70)[0], abs=1e-4)


async def test_a_limit_below_the_template_is_refused(server: Served) -> None:
    body = {"text_1": QUERY, "text_2": ["x"], "truncate_prompt_tokens": 3}
    refused = await server.embed(body, path="/score")
    assert refused.status == 400
    assert "3 around them; this model takes at most 3" in refused.error["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
async def test_a_scorer_gives_no_vectors(server: Served, path: str) -> None:
    refused = await server.embed({"input": "a", "inputs": "a"}, path=path)
    assert refused.status in (400, 422)
    assert "scores texts" in str(refused.value)


async def test_predict_names_the_labels(tmp_path: Path) -> None:
    model = _bert(tmp_path, id2label=LABELS)
    async for server in _serve(tmp_path, bert_tokenizer()):
        alone = (await server.embed({"inputs": "a flower"}, path="/predict")).value
        _assert_predictions(alone, _logits(model, "a flower"))
        pair = (await server.embed({"inputs": ["a flower", "a rose"]}, path="/predict")).value
        _assert_predictions(pair, _logits(model, "a flower", "a rose"))
        body = {"inputs": [["x"], ["a flower", "a rose"], ["yy"]], "raw_scores": True}
        one, two, three = (await server.embed(body, path="/predict")).value
        _assert_predictions(one, _logits(model, "x"), raw=True)
        _assert_predictions(two, _logits(model, "a flower", "a rose"), raw=True)
        _assert_predictions(three, _logits(model, "yy"), raw=True)
        refused = await server.embed({"query": QUERY, "texts": TEXTS}, path="/rerank")
        assert (refused.status, "3 labels" in str(refused.value)) == (422, True)
        info = (await server.send("GET", "/info")).value
        assert info["model_type"]["classifier"]["id2label"] == {str(i): LABELS[i] for i in range(3)}


def _assert_predictions(given: list[dict[str, Any]], logits: np.ndarray, raw: bool = False) -> None:
    scores = logits if raw else np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-scores)
    assert [item["label"] for item in given] == [LABELS[index] for index in order]
    np.testing.assert_allclose([item["score"] for item in given], scores[order], atol=1e-4)


@pytest.mark.parametrize("inputs", [None, "", [], [[]], ["a", "b", "c", ""], [["a", "b", "c"]], [["a", ""]]])
async def test_bad_inputs_are_refused(server: Served, inputs: object) -> None:
    refused = await server.embed({"inputs": inputs}, path="/predict")
    assert (refused.status, refused.value["error_type"]) == (422, "Validation")


async def test_qwen3_reranker_says_yes_or_no(tmp_path: Path) -> None:
    model, backend = _qwen3(tmp_path), chat_tokenizer()
    instruction = "Is it about plants?"
    expected = [_yes(model, backend, instruction, text) for text in TEXTS]
    async for server in _serve(tmp_path, chat_tokenizer()):
        body = {"query": QUERY, "texts": TEXTS, "raw_scores": True, "instruction": instruction}
        ranks = (await server.embed(body, path="/rerank")).value
        given = {rank["index"]: rank["score"] for rank in ranks}
        np.testing.assert_allclose([given[index] for index in range(len(TEXTS))], expected, atol=1e-4)
        assert np.ptp(expected) > 0.1
        own_words = _yes(model, backend, QWEN3_INSTRUCTION, TEXTS[0])
        reply = await server.embed({"text_1": QUERY, "text_2": TEXTS[0]}, path="/score")
        assert reply.value["data"][0]["score"] == pytest.approx(_sigmoid(own_words), abs=1e-5)


def _yes(model: Any, backend: Tokenizer, instruction: str, document: str) -> float:
    body = QWEN3_BODY.format(instruction=instruction, query=QUERY, document=document)
    ids = [i for text in (QWEN3_PREFIX, body, QWEN3_SUFFIX) for i in backend.encode(text).ids]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    return float(logits[YES] - logits[NO])


async def test_the_template_of_a_chat_is_never_cut() -> None:
    info = replace(fake_info(dimensions=1), task="score", labels=("score",), score_template="qwen3")
    engine, backend = FakeEngine(info=info), chat_tokenizer()
    async with serving(engine=engine, tokenizer=HuggingFaceTokenizer(backend)) as server:
        body = {"query": QUERY, "texts": ["x" * 2000], "truncate": True}
        assert (await server.embed(body, path="/rerank")).status == 200
    [batch] = engine.batches
    prefix, suffix = backend.encode(QWEN3_PREFIX).ids, backend.encode(QWEN3_SUFFIX).ids
    ids = batch.input_ids.tolist()
    assert len(ids) == 512
    assert (ids[: len(prefix)], ids[-len(suffix) :]) == (prefix, suffix)
    body_text = QWEN3_BODY.format(instruction=QWEN3_INSTRUCTION, query=QUERY, document="x" * 2000)
    assert ids[len(prefix) : -len(suffix)] == backend.encode(body_text).ids[: 512 - len(prefix) - len(suffix)]


class Counting(HuggingFaceTokenizer):
    """It parts texts as the compiled tokenizers do. chars: of all that it was given to tokenise."""

    chars = 0

    def encode(self, texts: Sequence[str], max_tokens: int | None = None) -> list[Int32]:
        self.chars += sum(map(len, texts))
        return super().encode(texts, max_tokens)

    def encode_ends(self, texts: Sequence[str], max_tokens: int) -> list[Int32]:
        return self.encode([end_of(text, 6 * max_tokens, SPACE) for text in texts])


@pytest.mark.parametrize(
    ("path", "body", "template"),
    [
        ("/rerank", {"query": QUERY, "texts": [LONG]}, "pair"),
        ("/rerank", {"query": QUERY, "texts": [LONG]}, "qwen3"),
        ("/score", {"text_1": QUERY, "text_2": LONG}, "pair"),
        ("/predict", {"inputs": LONG}, "pair"),
        ("/predict", {"inputs": [[QUERY, LONG]]}, "pair"),
    ],
)
async def test_a_beginning_that_is_cut_off_is_not_tokenised(
    path: str, body: dict[str, Any], template: str
) -> None:
    info = replace(fake_info(dimensions=1), task="score", labels=("score",), score_template=template)
    engine, tokenizer = (
        FakeEngine(info=info),
        Counting(chat_tokenizer() if template == "qwen3" else bert_tokenizer()),
    )
    async with serving(engine=engine, tokenizer=tokenizer) as server:
        cut_left = {**body, "truncate": True, "truncation_direction": "left"}
        assert (await server.embed(cut_left, path=path)).status == 200
    [batch] = engine.batches
    assert len(batch.input_ids) == 512
    assert tokenizer.chars < 20_000


async def test_pairs_of_many_requests_share_batches_by_tokens() -> None:
    """Everything that waits while a step runs goes into the next one, whichever request it is of."""
    info = replace(fake_info(dimensions=1), task="score", labels=("score",), type_vocab_size=2)
    engine = FakeEngine(info=info)
    async with serving(GatewayOptions(), engine=engine, tokenizer=byte_tokenizer()) as server:
        reply = await server.embed({"query": "q", "texts": [f"text {i}" for i in range(40)]}, path="/rerank")
    assert (reply.status, len(reply.value)) == (200, 40)
    assert [batch.num_seqs for batch in engine.batches] == [40]


async def test_a_scorer_without_tokenizer_takes_no_text() -> None:
    info = replace(fake_info(dimensions=1), task="score", labels=("score",))
    async with serving(engine=FakeEngine(info=info)) as server:
        refused = await server.embed({"text_1": "a", "text_2": "b"}, path="/score")
    assert (refused.status, refused.error["code"]) == (400, "text_not_supported")


async def test_scores_are_sentence_transformers(tmp_path: Path) -> None:
    """From one folder: their CrossEncoder and our server, pairs that are too long among them."""
    _bert(tmp_path, num_labels=1)
    files = PreTrainedTokenizerFast(
        tokenizer_object=bert_tokenizer(),
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[SEP]",
        model_max_length=64,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    files.save_pretrained(tmp_path)
    long = ["word " * 30, "other " * 25]
    pairs = [(QUERY, text) for text in TEXTS] + [(long[0], long[1]), (long[0], "short"), ("short", long[1])]
    expected = CrossEncoder(str(tmp_path), device="cpu").predict(pairs)
    engine = _engine(tmp_path)
    assert engine.info.max_model_len == 64
    tokenizer = HuggingFaceTokenizer.from_file(tmp_path / "tokenizer.json")
    async with serving(engine=engine, tokenizer=tokenizer) as server:  # type: ignore[arg-type]
        body = {"text_1": [pair[0] for pair in pairs], "text_2": [pair[1] for pair in pairs]}
        reply = (await server.embed({**body, "truncate": True}, path="/score")).value
    engine.close()
    np.testing.assert_allclose([item["score"] for item in reply["data"]], expected, atol=1e-5)
    assert np.ptp(expected) > 0.02

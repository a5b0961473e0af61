"""Chunks within their documents: one forward a document, a mean a chunk, separators that no text can fake."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import Qwen3Config, Qwen3Model

from gateway.tokenization.huggingface import HuggingFaceTokenizer
from rose.batch import RaggedBatch
from rose.engine import load_engine
from rose.engine_options import EngineOptions
from tests.fakes import FakeEngine, fake_info, fake_vectors
from tests.http.served import Reply, Served, byte_tokenizer, serving

PATH = "/v1/contextualizedembeddings"
SEPARATOR = "<|endoftext|>"
DOCUMENTS = [["The rose", " is red.", f"a {SEPARATOR} b"], ["Steel"], ["x", "y" * 40]]
WIDTH = 48


def tokenizer() -> Tokenizer:
    """Bytes; the separator is one more token, which the library finds in any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([SEPARATOR])
    return backend


def _save(folder: Path) -> Any:
    config = Qwen3Config(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=80,
        vocab_size=257,
        max_position_embeddings=128,
        use_bidirectional_attention=True,
        sep_token_id=256,
    )
    torch.manual_seed(6)
    model = Qwen3Model(config).eval()
    for name, tensor in model.named_parameters():
        scale = 1.5 * tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 0.3
        tensor.data = torch.randn_like(tensor) * scale + (1.0 if "norm" in name else 0.0)
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"Qwen3Model"', '"PPLXQwen3ContextualModel"'))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("context")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return _save(folder)


@pytest.fixture
async def server(model: Any, folder: Path) -> AsyncIterator[Served]:
    engine: Any = load_engine(
        folder, EngineOptions(device="cpu", num_threads=1), dummy=False, model_name="context"
    )
    async with serving(engine=engine, tokenizer=HuggingFaceTokenizer(tokenizer())) as served:
        yield served
    engine.close()


def _chunk_ids(text: str) -> list[int]:
    """The ids of a text that spells out the separator: its letters."""
    backend = tokenizer()
    backend.encode_special_tokens = True
    return list(backend.encode(text).ids)


def _expected(model: Any, chunks: list[str]) -> np.ndarray:
    """f64[k, WIDTH]: the whole document through transformers' model, and the mean of each chunk's rows."""
    ids: list[int] = []
    bounds: list[tuple[int, int]] = []
    for index, chunk in enumerate(chunks):
        ids += [256] if index else []
        bounds.append((len(ids), len(ids) + len(_chunk_ids(chunk))))
        ids += _chunk_ids(chunk)
    with torch.no_grad():
        mask = torch.zeros(1, 1, len(ids), len(ids))
        hidden = model(torch.tensor([ids]), attention_mask=mask).last_hidden_state[0].double()
    return np.stack([hidden[start:end].mean(0).numpy() for start, end in bounds])


def _values(reply: Reply, dtype: str = "<i1") -> list[np.ndarray]:
    """Of each document [k, bytes]; the shape of the answer is looked at on the way."""
    assert reply.status == 200, reply.body
    documents = reply.value["data"]
    assert [document["index"] for document in documents] == list(range(len(documents)))
    for document in documents:
        assert document["object"] == "list"
        assert [chunk["index"] for chunk in document["data"]] == list(range(len(document["data"])))
        assert all(chunk["object"] == "embedding" for chunk in document["data"])
    return [
        np.array([np.frombuffer(base64.b64decode(chunk["embedding"]), dtype) for chunk in document["data"]])
        for document in documents
    ]


async def test_chunks_are_means_within_the_whole_document(server: Served, model: Any) -> None:
    reply = await server.embed({"input": DOCUMENTS}, path=PATH)
    for given, chunks in zip(_values(reply), DOCUMENTS, strict=True):
        expected = np.round(np.tanh(_expected(model, chunks)) * 127)
        assert given.shape == (len(chunks), WIDTH)
        # Halves may round either way when the last digit of a float32 sum differs.
        assert np.abs(given - expected).max() <= 1
        assert (given == expected).mean() > 0.99
    tokens = sum(sum(len(_chunk_ids(c)) for c in chunks) + len(chunks) - 1 for chunks in DOCUMENTS)
    assert reply.value["usage"]["prompt_tokens"] == tokens


async def test_bits_and_fewer_dimensions(server: Served, model: Any) -> None:
    body = {"input": DOCUMENTS, "encoding_format": "base64_binary", "dimensions": 16}
    given = _values(await server.embed(body, path=PATH), "<u1")
    for bits, chunks in zip(given, DOCUMENTS, strict=True):
        expected = np.packbits(_expected(model, chunks)[:, :16] >= 0, axis=1, bitorder="little")
        assert bits.tolist() == expected.tolist()


async def test_a_document_of_one_chunk_is_an_ordinary_embedding(server: Served) -> None:
    """A query: the same vector from both routes, also when it spells out the separator."""
    text = f"one {SEPARATOR} two"
    [document] = _values(await server.embed({"input": [[text]]}, path=PATH))
    plain = await server.embed({"input": text, "encoding_format": "base64_int8"})
    embedding = plain.value["data"][0]["embedding"]
    assert base64.b64decode(embedding) == document[0].tobytes()


async def test_the_context_matters(server: Served) -> None:
    first, second = _values(await server.embed({"input": [["a", "bank"], ["b", "bank"]]}, path=PATH))
    assert (first[1] != second[1]).any()


async def test_too_long_documents_and_too_many_chunks_are_named(server: Served) -> None:
    reply = await server.embed({"input": [["a"], ["b" * 100, "c" * 28]]}, path=PATH)
    assert reply.status == 422
    assert reply.value["detail"][0]["msg"].startswith("input[1] has 129 tokens; this model takes at most 128")
    limited = FakeEngine(info=fake_info(max_batch_seqs=4, has_int8=True))
    async with serving(engine=limited, tokenizer=byte_tokenizer()) as other:
        reply = await other.embed({"input": [["a"], ["b"] * 5]}, path=PATH)
        assert reply.value["detail"][0]["msg"].startswith(
            "input[1] has 5 chunks; this server takes at most 4"
        )
        assert (await other.embed({"input": [["b"] * 4]}, path=PATH)).status == 200


async def test_any_model_that_pools_by_mean_can() -> None:
    """With the tokenizer's own template around the whole document, which belongs to no chunk."""
    engine = FakeEngine(info=fake_info(dimensions=8, has_int8=True))
    async with serving(engine=engine, tokenizer=byte_tokenizer()) as server:
        [document] = _values(await server.embed({"input": [["ab", "cde"]]}, path=PATH))
    [batch] = engine.batches
    assert batch.num_tokens == 1 + 2 + 3 + 1
    assert batch.spans is not None
    assert batch.spans.tolist() == [[1, 3], [3, 6]]
    expected = np.rint(np.tanh(fake_vectors(batch, 8)) * 127)
    np.testing.assert_array_equal(document, expected)


async def test_a_chunk_of_no_tokens_is_zeros_in_its_place(model: Any, folder: Path) -> None:
    backend = tokenizer()
    backend.normalizer = normalizers.Strip()
    engine: Any = load_engine(folder, EngineOptions(device="cpu"), dummy=False, model_name="context")
    async with serving(engine=engine, tokenizer=HuggingFaceTokenizer(backend)) as server:
        with_blank, without = _values(
            await server.embed({"input": [["ab", "  ", "cd"], ["ab", "cd"]]}, path=PATH)
        )
        assert not with_blank[1].any()
        assert with_blank[0].any() and with_blank[2].any()
        assert with_blank.shape == (3, WIDTH) and without.shape == (2, WIDTH)
        refused = await server.embed({"input": [["a"], ["  "]]}, path=PATH)
        assert refused.value["detail"][0]["msg"] == "input[1] has no tokens"
    engine.close()


async def test_chunks_and_plain_texts_share_a_batch(folder: Path, model: Any) -> None:
    """Documents of one request, and whatever else waits, go into the same steps."""
    info = replace(fake_info(has_int8=True), chunk_separator=9)
    engine = FakeEngine(info=info)
    async with serving(engine=engine, tokenizer=byte_tokenizer()) as server:
        assert (await server.embed({"input": [["a", "b"], ["c"], ["d", "e", "f"]]}, path=PATH)).status == 200
    assert [(batch.num_seqs, batch.num_rows) for batch in engine.batches] == [(3, 6)]
    whole = RaggedBatch(engine.batches[0].input_ids, engine.batches[0].cu_seqlens)
    assert np.count_nonzero(whole.input_ids == 9) == 3

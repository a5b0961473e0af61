"""Words that weigh and vectors of tokens: what is asked for comes from one pass, in every form alike."""

from __future__ import annotations

import asyncio
import base64
import gc
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from gateway.options import GatewayOptions
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from rose.batch import BatchResult, Float32, RaggedBatch
from rose.engine import load_engine
from rose.engine_options import EngineOptions
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine, fake_info, fake_tokens
from tests.http.served import BOS, EOS, Served, expected, serving, text_ids, until
from tests.unit.rose.parity import oracle_hidden
from tests.unit.rose.test_token_outputs import save_m3

INFO = fake_info(token_outputs={"lexical": 1, "multi_vector": 4, "hidden": 8})
TEXTS = ["a rose is a rose", "steel", "a"]
DENSE, SPARSE, MULTI = "dense", "sparse", "multi_vector"


@pytest.fixture
async def m3(tokenizer: HuggingFaceTokenizer) -> AsyncIterator[Served]:
    async with serving(engine=FakeEngine(info=INFO), tokenizer=tokenizer) as served:
        yield served


def tokens_of(text: str, kind: str, width: int) -> Float32:
    batch = RaggedBatch.pack([np.array(text_ids(text), np.int32)])
    return fake_tokens(batch, kind, width)  # type: ignore[arg-type]


def words_of(text: str) -> dict[int, float]:
    """By the definition: the largest weight of each id, special ones and zeros left out."""
    words: dict[int, float] = {}
    for token, weight in zip(text_ids(text), tokens_of(text, "lexical", 1)[:, 0].tolist(), strict=True):
        if token not in INFO.unweighted_ids and weight > 0:
            words[token] = max(weight, words.get(token, 0.0))
    return words


def assert_words(given: dict[int, float], text: str) -> None:
    words = words_of(text)
    assert list(given) == sorted(words)
    np.testing.assert_allclose(list(given.values()), [words[index] for index in given], rtol=1e-6)


def blocks(block: dict[str, Any], name: str, dtype: str) -> list[np.ndarray]:
    """One array a text, of a block with offsets."""
    values = np.frombuffer(block[name], dtype)
    if "shape" in block:
        values = values.reshape(block["shape"])
    return np.split(values, np.frombuffer(block["offsets"], "<i4")[1:-1])


def test_the_words_of_a_text_are_some_and_some_ids_come_twice() -> None:
    """Else the tests below show little."""
    assert 2 < len(words_of(TEXTS[0])) < len(set(text_ids(TEXTS[0])))
    assert {BOS, EOS} <= set(INFO.unweighted_ids)


async def test_json_holds_all_three_from_one_pass(m3: Served) -> None:
    reply = await m3.embed({"input": TEXTS, "outputs": [MULTI, DENSE, SPARSE]})
    assert reply.status == 200, reply.body
    assert len(m3.engine.batches) == 1
    assert m3.engine.batches[0].token_outputs == {"lexical", "multi_vector"}
    for item, text in zip(reply.value["data"], TEXTS, strict=True):
        np.testing.assert_allclose(item["embedding"], expected(text_ids(text)), rtol=1e-6)
        assert_words(dict(zip(item["sparse"]["indices"], item["sparse"]["values"], strict=True)), text)
        vectors = tokens_of(text, "multi_vector", 4)
        np.testing.assert_allclose(item["multi_vector"], vectors[1:], rtol=1e-6)


async def test_msgpack_holds_blocks(m3: Served) -> None:
    reply = await m3.pack({"input": TEXTS, "outputs": [DENSE, SPARSE, MULTI]})
    answer = reply.value
    assert answer["shape"] == [3, 8]
    dense = np.frombuffer(answer["embeddings"], "<f4").reshape(3, 8)
    np.testing.assert_allclose(dense, [expected(text_ids(text)) for text in TEXTS], rtol=1e-6)
    indices, values = (
        blocks(answer["sparse"], name, dtype) for name, dtype in (("indices", "<i4"), ("values", "<f4"))
    )
    for text, own_indices, own_values in zip(TEXTS, indices, values, strict=True):
        assert_words(dict(zip(own_indices.tolist(), own_values.tolist(), strict=True)), text)
    for text, vectors in zip(TEXTS, blocks(answer["multi_vector"], "vectors", "<f4"), strict=True):
        np.testing.assert_array_equal(vectors, tokens_of(text, "multi_vector", 4)[1:])


@pytest.mark.parametrize("outputs", [[SPARSE], [MULTI], [SPARSE, MULTI], [MULTI, MULTI]])
async def test_what_is_not_asked_for_is_not_there(m3: Served, outputs: list[str]) -> None:
    item = (await m3.embed({"input": "a rose", "outputs": outputs})).value["data"][0]
    assert set(item) == {"object", "index", *outputs}
    answer = (await m3.pack({"input": "a rose", "outputs": outputs})).value
    assert set(answer) == {"object", "model", "dtype", "usage", *outputs}


async def test_dense_alone_is_as_ever(m3: Served) -> None:
    named, plain = [await m3.embed({"input": TEXTS, **more}) for more in ({"outputs": [DENSE]}, {})]
    assert named.body == plain.body
    assert not any(batch.token_outputs for batch in m3.engine.batches)


@pytest.mark.parametrize(("dtype", "code", "tolerance"), [("float16", "<f2", 1e-3), ("int8", "i1", 0.01)])
async def test_vectors_of_tokens_come_in_the_types_of_dense_ones(
    m3: Served, dtype: str, code: str, tolerance: float
) -> None:
    body = {"input": TEXTS, "outputs": [MULTI], "embed_dtype": dtype}
    packed = (await m3.pack(body)).value
    coded = await m3.embed({**body, "encoding_format": "base64"})
    given = blocks(packed["multi_vector"], "vectors", code)
    assert packed["dtype"] == dtype
    for text, values, item in zip(TEXTS, given, coded.value["data"], strict=True):
        exact = tokens_of(text, "multi_vector", 4)[1:]
        scale = np.abs(exact).max(axis=1, keepdims=True) / 127 if dtype == "int8" else 1
        np.testing.assert_allclose(values * scale, exact, atol=tolerance)
        assert item["multi_vector_shape"] == list(exact.shape)
        assert base64.b64decode(item["multi_vector"]) == values.tobytes()


async def test_a_text_of_one_token_has_no_vectors(m3: Served) -> None:
    reply = await m3.embed({"input": [[7], [5, 6]], "outputs": [MULTI]})
    assert [len(item["multi_vector"]) for item in reply.value["data"]] == [0, 1]
    packed = (await m3.pack({"input": [7], "outputs": [MULTI, SPARSE]})).value
    assert (packed["multi_vector"]["shape"], packed["multi_vector"]["vectors"]) == ([0, 4], b"")


async def test_tei_gives_words_and_all_tokens(m3: Served) -> None:
    sparse = await m3.embed({"inputs": TEXTS}, path="/embed_sparse")
    for text, given in zip(TEXTS, sparse.value, strict=True):
        assert_words({item["index"]: item["value"] for item in given}, text)
    every = await m3.embed({"inputs": TEXTS}, path="/embed_all")
    for text, rows in zip(TEXTS, every.value, strict=True):
        np.testing.assert_allclose(rows, tokens_of(text, "hidden", 8), rtol=1e-6)
    assert every.headers["x-compute-tokens"] == str(sum(len(text_ids(text)) for text in TEXTS))
    headers = {"Content-Type": "application/msgpack"}
    body = msgspec.msgpack.encode({"inputs": TEXTS})
    packed = (await m3.send("POST", "/embed_all", data=body, headers=headers)).value
    for text, values in zip(TEXTS, blocks(packed["tokens"], "vectors", "<f4"), strict=True):
        np.testing.assert_array_equal(values, tokens_of(text, "hidden", 8))


async def test_info_tells_what_can_be_asked_for(m3: Served, server: Served) -> None:
    asked = [(await one.send("GET", "/info")).value["model"]["outputs"] for one in (m3, server)]
    assert asked == [[DENSE, SPARSE, MULTI, "hidden"], [DENSE]]


async def test_requests_for_different_outputs_share_a_batch(tokenizer: HuggingFaceTokenizer) -> None:
    engine, one_at_a_time = FakeEngine(info=INFO, service_s=None), SchedulerOptions(max_in_flight=1)
    async with serving(engine=engine, scheduling=one_at_a_time, tokenizer=tokenizer) as server:
        first = asyncio.create_task(server.embed({"input": "keeps the engine busy"}))
        await until(lambda: len(engine.running) == 1)
        together = asyncio.gather(
            server.embed({"input": TEXTS}),
            server.embed({"input": TEXTS, "outputs": [SPARSE]}),
            server.embed({"inputs": TEXTS}, path="/embed_all"),
        )
        await until(lambda: server.batcher.metrics.waiting_seqs == 9)
        engine.finish()
        await until(lambda: len(engine.running) == 1)
        engine.finish()
        dense, words, every = await together
        await first
    assert engine.batches[-1].num_seqs == 9
    assert engine.batches[-1].token_outputs == {"lexical", "hidden"}
    np.testing.assert_allclose(dense.vectors, [expected(text_ids(text)) for text in TEXTS], rtol=1e-6)
    np.testing.assert_allclose(every.value[1], tokens_of(TEXTS[1], "hidden", 8), rtol=1e-6)
    item = words.value["data"][0]["sparse"]
    assert_words(dict(zip(item["indices"], item["values"], strict=True)), TEXTS[0])


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"outputs": []}, "invalid_value", "outputs has an empty list"),
        ({"outputs": ["colbert"]}, "invalid_value", "outputs has 'colbert'; this server knows dense, sparse"),
        ({"outputs": "sparse"}, "invalid_body", "$.outputs"),
        ({"outputs": [SPARSE], "encoding_format": "bytes"}, "invalid_value", "holds dense vectors alone"),
        ({"outputs": [MULTI], "embed_dtype": "binary"}, "invalid_value", "4 dimensions do not fill bytes"),
    ],
)
async def test_what_makes_no_sense_is_refused(m3: Served, body: Any, code: str, words: str) -> None:
    reply = await m3.embed({"input": "a", **body})
    assert (reply.status, reply.error["code"]) == (400, code)
    assert words in reply.error["message"]
    assert not m3.engine.batches


async def test_perplexity_s_formats_hold_dense_vectors_alone(m3: Served) -> None:
    body = {"input": "a", "outputs": [SPARSE], "encoding_format": "base64_int8"}
    assert (await m3.embed(body)).value["detail"][0]["loc"] == ["body", "outputs"]


@pytest.mark.parametrize(("output", "called"), [(SPARSE, "sparse vectors"), (MULTI, "multi-vectors")])
async def test_models_without_such_a_head_say_so(server: Served, output: str, called: str) -> None:
    reply = await server.embed({"input": "a", "outputs": [output]})
    assert (reply.status, reply.error["code"]) == (400, "not_supported")
    assert reply.error["message"] == f"model fake gives dense vectors; it gives no {called}"
    assert not server.engine.batches


async def test_a_request_may_not_have_more_than_a_step_gives(tokenizer: HuggingFaceTokenizer) -> None:
    info = replace(INFO, max_token_bytes=8 * 4 * 20)
    async with serving(engine=FakeEngine(info=info), tokenizer=tokenizer) as server:
        fits = await server.embed({"inputs": [[5] * 10, [6] * 10]}, path="/embed_all")
        more = await server.embed({"inputs": [[5] * 10, [6] * 11]}, path="/embed_all")
        words = await server.embed({"inputs": [[5] * 10, [6] * 11]}, path="/embed_sparse")
    assert (fits.status, words.status, more.status) == (200, 200, 422)
    assert more.value["error"].startswith("what 21 tokens give takes 672 bytes; this server gives 640 bytes")


async def test_requests_may_not_have_more_together_than_the_server_holds() -> None:
    engine = FakeEngine(info=INFO, service_s=None)
    async with serving(GatewayOptions(max_outstanding_token_bytes=8 * 4 * 20), engine=engine) as server:
        waiting = asyncio.create_task(server.embed({"inputs": [5] * 15}, path="/embed_all"))
        await until(lambda: len(engine.batches) == 1)
        refused = await server.embed({"inputs": [5] * 6}, path="/embed_all")
        engine.finish()
        assert (await waiting).status == 200
        gc.collect()  # of the refusal's own traceback
        later = asyncio.create_task(server.embed({"inputs": [5] * 18}, path="/embed_all"))
        await until(lambda: len(engine.batches) == 2)
        engine.finish()
        assert (await later).status == 200
    assert refused.status == 429
    assert "192 bytes beside 480 of other requests; at most 640" in refused.value["error"]
    assert int(refused.headers["Retry-After"]) >= 1


class Overflowing(FakeEngine):
    """Its tokens' states hold an infinity, though the vectors do not."""

    def _outcome(self, batch: RaggedBatch) -> Any:
        outcome = super()._outcome(batch)
        assert isinstance(outcome, BatchResult)
        for values in outcome.tokens.values():
            values[-1, -1] = np.inf
        return outcome


async def test_what_is_not_finite_is_never_served() -> None:
    async with serving(engine=Overflowing(info=INFO)) as server:
        for path, body in (
            ("/embed_all", {"inputs": [5, 6]}),
            ("/v1/embeddings", {"input": [5, 6], "outputs": [MULTI]}),
        ):
            reply = await server.embed(body, path=path)
            assert reply.status == 500
            assert b"is not finite" in reply.body
        assert (await server.embed({"input": [5, 6]})).status == 200


async def test_a_small_bge_m3_from_its_files_to_the_answer(tmp_path: Path) -> None:
    """The engine itself: what its authors' definition gives of the same weights."""
    oracle, sparse, colbert = save_m3(tmp_path)
    options = EngineOptions(device="cpu", num_threads=1)
    engine = load_engine(tmp_path, options, dummy=False, model_name="m3")
    sequences = [[0, 5, 9, 5, 3, 60, 2], [0, 77, 2]]
    async with serving(engine=engine) as server:
        reply = await server.embed({"input": sequences, "outputs": [DENSE, SPARSE, MULTI]})
    engine.close()
    assert reply.status == 200, reply.body
    for item, ids in zip(reply.value["data"], sequences, strict=True):
        hidden = oracle_hidden(oracle, np.array(ids, np.int32))
        with torch.no_grad():
            weights = torch.relu(sparse(hidden))[:, 0].tolist()
            vectors = torch.nn.functional.normalize(colbert(hidden[1:]), dim=-1)
        words: dict[int, float] = {}
        for token, weight in zip(ids, weights, strict=True):
            if token not in (0, 1, 2, 3) and weight > 0:
                words[token] = max(weight, words.get(token, 0.0))
        given = dict(zip(item["sparse"]["indices"], item["sparse"]["values"], strict=True))
        assert given == pytest.approx({token: words[token] for token in sorted(words)}, abs=2e-4)
        np.testing.assert_allclose(item["multi_vector"], vectors, atol=2e-4)
        np.testing.assert_allclose(item["embedding"], hidden[0], atol=5e-4)

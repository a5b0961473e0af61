"""Clients of OpenAI's API: its own, LangChain's, LlamaIndex's, Haystack's; what vLLM's benchmark sends."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import urllib.request

import numpy as np
import openai
import pytest
from conftest import EATING, KEY, MODEL, TEXTS, Server, check_exact
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.dataclasses import Document
from haystack.utils import Secret
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai_like import OpenAILikeEmbedding


@pytest.mark.parametrize("encoding", [openai.omit, "float", "base64"])
def test_openai(server: Server, encoding: object) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    answer = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format=encoding)  # type: ignore[arg-type]
    vectors = [item.embedding for item in answer.data]
    if encoding == "base64":  # asked for by name, the client hands it on as it came
        vectors = [np.frombuffer(base64.b64decode(text), "<f4") for text in vectors]
    check_exact(vectors)
    assert answer.usage.total_tokens == 25
    assert [model.id for model in client.models.list()] == [MODEL]


def test_openai_async(server: Server) -> None:
    async def embed() -> list[list[float]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
            answers = await asyncio.gather(
                *(client.embeddings.create(model=MODEL, input=text) for text in TEXTS)
            )
            return [answer.data[0].embedding for answer in answers]

    check_exact(asyncio.run(embed()))


def test_openai_errors(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    with pytest.raises(openai.BadRequestError, match="input is an empty string"):
        client.embeddings.create(model=MODEL, input="")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").embeddings.create(model=MODEL, input="a")


def test_langchain_strings(server: Server) -> None:
    client = OpenAIEmbeddings(
        base_url=f"{server.url}/v1", api_key=KEY, model=MODEL, check_embedding_ctx_length=False
    )
    check_exact(client.embed_documents(TEXTS))
    check_exact([client.embed_query(text) for text in TEXTS])


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="tiktoken's ranks are not at hand")
def test_langchain_token_arrays(server: Server) -> None:
    """By default it sends cl100k ids, whatever the model is: they are used as they are."""
    client = OpenAIEmbeddings(base_url=f"{server.url}/v1", api_key=KEY, model=MODEL)
    ids = [15339, 1917]
    direct = server.ask("/v1/embeddings", {"input": [ids]})["data"][0]["embedding"]
    np.testing.assert_allclose(client.embed_documents(["hello world"]), [direct], atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="token id"):
        client.embed_documents(["Ünïcödé 漢字"])


def test_llama_index(server: Server) -> None:
    client = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{server.url}/v1", api_key=KEY)
    check_exact(client.get_text_embedding_batch(TEXTS))
    check_exact([client.get_query_embedding(text) for text in TEXTS])


def test_haystack(server: Server) -> None:
    place = {"api_base_url": f"{server.url}/v1", "api_key": Secret.from_token(KEY), "model": MODEL}
    documents = OpenAIDocumentEmbedder(**place, progress_bar=False).run([Document(content=t) for t in TEXTS])
    check_exact([document.embedding for document in documents["documents"]])
    check_exact([OpenAITextEmbedder(**place).run(text)["embedding"] for text in TEXTS])


def test_what_vllm_bench_serve_sends(server: Server) -> None:
    """backend openai-embeddings and vllm-rerank: truncate_prompt_tokens -1, usage read from the answer.

    Source: vLLM 0.22, benchmarks/lib/endpoint_request_func.py.
    """
    long = "word " * 2000
    body = {"model": MODEL, "input": long, "truncate_prompt_tokens": -1}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    headers["x-request-id"] = "bench-0"
    request = urllib.request.Request(f"{server.url}/v1/embeddings", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
        assert answer.headers["x-request-id"] == "bench-0"
        assert json.load(answer)["usage"]["prompt_tokens"] == 256
    bench = {"model": MODEL, "input": TEXTS, "encoding_format": "bytes"}
    request = urllib.request.Request(f"{server.url}/v1/embeddings", json.dumps(bench).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        metadata = json.loads(answer.headers["metadata"])
        block = answer.read()
    assert metadata["usage"]["prompt_tokens"] == 25
    check_exact([np.frombuffer(block[item["start"] : item["end"]], "<f4") for item in metadata["data"]])
    body = {"model": MODEL, "query": EATING, "documents": [long, *TEXTS], "truncate_prompt_tokens": -1}
    ranked = server.ask("/v1/rerank", body)
    assert ranked["results"][0]["index"] == 1
    assert ranked["usage"]["prompt_tokens"] > 256

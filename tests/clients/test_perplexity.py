"""Perplexity's own client, and LangChain's for it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import perplexity
import pytest
from conftest import KEY, MODEL, TEXTS, Server, check_vectors, cosine, start
from langchain_perplexity import PerplexityEmbeddings

# The client takes no other names than these; the server goes by them as well.
NAMES = ("pplx-embed-v1-0.6b", "pplx-embed-context-v1-0.6b", MODEL)


def named(*flags: str) -> Iterator[Server]:
    yield from start(*flags, *(flag for name in NAMES for flag in ("--served-model-name", name)))


@pytest.fixture(scope="module")
def pplx() -> Iterator[Server]:
    """One whose own dialect is Perplexity's."""
    yield from named("--api-dialect", "perplexity")


@pytest.fixture(scope="module")
def other() -> Iterator[Server]:
    """One whose own dialect is OpenAI's."""
    yield from named()


def bytes_of(answer: Any, dtype: str) -> Any:
    return [np.frombuffer(base64.b64decode(item.embedding), dtype) for item in answer.data]


@pytest.mark.parametrize("fields", [{}, {"encoding_format": "base64_int8"}])
def test_int8(pplx: Server, fields: dict[str, Any]) -> None:
    client = perplexity.Perplexity(base_url=pplx.url, api_key=KEY)
    answer = client.embeddings.create(input=TEXTS, model=NAMES[0], **fields)
    check_vectors(bytes_of(answer, "<i1"), tolerance=0.02)
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert answer.model == NAMES[0]
    assert (answer.usage.total_tokens, answer.usage.cost.total_cost) == (25, 0.0)


def test_bits(other: Server) -> None:
    """Also from a server in OpenAI's dialect: the format says whose it is."""
    client = perplexity.Perplexity(base_url=other.url, api_key=KEY)
    answer = client.embeddings.create(input=TEXTS, model=NAMES[0], encoding_format="base64_binary")
    bits = [np.unpackbits(row, bitorder="little") for row in bytes_of(answer, "u1")]
    floats = other.ask("/v1/embeddings", {"input": TEXTS})["data"]
    for row, item in zip(bits, floats, strict=True):
        np.testing.assert_array_equal(row, np.array(item["embedding"]) >= 0)


def test_errors(pplx: Server) -> None:
    client = perplexity.Perplexity(base_url=pplx.url, api_key=KEY, max_retries=0)
    with pytest.raises(perplexity.UnprocessableEntityError, match="input is an empty string"):
        client.embeddings.create(input="", model=NAMES[0])
    with pytest.raises(perplexity.AuthenticationError):
        client.with_options(api_key="wrong").embeddings.create(input="a", model=NAMES[0])
    with pytest.raises(perplexity.NotFoundError):
        client.embeddings.create(input="a", model="pplx-embed-v1-4b")
    with pytest.raises(perplexity.UnprocessableEntityError, match="empty"):
        client.contextualized_embeddings.create(input=[["a", ""]], model=NAMES[1])


def test_chunks(pplx: Server) -> None:
    client = perplexity.Perplexity(base_url=pplx.url, api_key=KEY)
    answer = client.contextualized_embeddings.create(input=[TEXTS, ["alone"]], model=NAMES[1])
    assert [document.index for document in answer.data] == [0, 1]
    assert [len(document.data) for document in answer.data] == [3, 1]
    assert {len(row) for document in answer.data for row in bytes_of(document, "<i1")} == {384}
    inside = bytes_of(answer.data[0], "<i1")
    assert cosine(inside[0], inside[1]) > cosine(inside[0], bytes_of(answer.data[1], "<i1")[0])


def test_langchain(pplx: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERPLEXITY_BASE_URL", pplx.url)
    client = PerplexityEmbeddings(model=NAMES[0], pplx_api_key=KEY)
    check_vectors(client.embed_documents(TEXTS), tolerance=0.02)

"""OpenAI's own client, unmodified, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import numpy as np
import openai
import pytest

from gateway.options import GatewayOptions
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from scheduler.errors import Backlog, QueueFull
from tests.http.served import Served, expected, serving, text_ids

KEY = "the key"


@pytest.fixture
async def locked(tokenizer: HuggingFaceTokenizer) -> AsyncIterator[Served]:
    options = GatewayOptions(api_keys=(KEY,), served_model_names=("small",))
    async with serving(options, tokenizer=tokenizer) as server:
        yield server


def check(
    reply: openai.types.CreateEmbeddingResponse, rows: Iterable[list[int]], dimensions: int = 8
) -> None:
    """What the client made of an answer is what the server owes."""
    wanted = [expected(row, dimensions) for row in rows]
    np.testing.assert_allclose([item.embedding for item in reply.data], wanted, rtol=1e-6)
    assert [item.index for item in reply.data] == list(range(len(wanted)))
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, rows))
    assert reply.model == "small"


async def test_async_client(locked: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{locked.url}/v1", api_key=KEY) as client:
        texts = ["hello", "world"]
        rows = [text_ids(text) for text in texts]
        check(await client.embeddings.create(model="small", input=texts), rows)  # base64 by default
        check(await client.embeddings.create(model="small", input=texts, encoding_format="float"), rows)
        check(await client.embeddings.create(model="small", input=texts, dimensions=3, user="me"), rows, 3)
        check(await client.embeddings.create(model="small", input=[[1, 2], [3]]), [[1, 2], [3]])
        assert [model.id async for model in client.models.list()] == ["small"]


async def test_sync_client(locked: Served) -> None:
    def use() -> openai.types.CreateEmbeddingResponse:
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=KEY) as client:
            return client.embeddings.create(model="small", input="hello")

    check(await asyncio.to_thread(use), [text_ids("hello")])


@pytest.mark.parametrize(
    ("key", "model", "value", "error", "code"),
    [
        (KEY, "small", "", openai.BadRequestError, "invalid_value"),
        (KEY, "other", "a", openai.NotFoundError, "model_not_found"),
        ("wrong", "small", "a", openai.AuthenticationError, "invalid_api_key"),
        (KEY, "small", "a" * 600, openai.BadRequestError, "context_length_exceeded"),
    ],
)
async def test_errors_reach_the_client_as_its_own(
    locked: Served, key: str, model: str, value: str, error: type[openai.APIStatusError], code: str
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0) as client:
        with pytest.raises(error) as caught:
            await client.embeddings.create(model=model, input=value)
    assert caught.value.code == code
    assert caught.value.request_id


@pytest.mark.interpreted
async def test_the_client_comes_back_when_told_to(locked: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    run, refused = locked.batcher.run, []

    async def full_once(*arguments: object) -> object:
        if not refused:
            refused.append(True)
            raise QueueFull(1, 1, Backlog(1, 1, 1, 1), 0.01)
        return await run(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(locked.batcher, "run", full_once)
    async with openai.AsyncOpenAI(base_url=f"{locked.url}/v1", api_key=KEY) as client:
        check(await client.embeddings.create(model="small", input=[1, 2]), [[1, 2]])
    assert refused

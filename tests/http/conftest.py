"""Every HTTP test runs on uvloop, as the server does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from gateway.tokenization.huggingface import HuggingFaceTokenizer
from tests.blocking import nothing_blocks_the_loop as nothing_blocks_the_loop
from tests.http.served import Served, byte_tokenizer, serving


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def tokenizer() -> HuggingFaceTokenizer:
    return byte_tokenizer()


@pytest.fixture
async def server(tokenizer: HuggingFaceTokenizer) -> AsyncIterator[Served]:
    """A server that takes text, with the default options."""
    async with serving(tokenizer=tokenizer) as served:
        yield served

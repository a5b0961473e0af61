"""/tokenize and /decode of many tokens: made beside the loop, in parts, while somebody waits."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable, Iterator, Sequence

import pytest

from gateway.tokenization.base import TextTokens, Token
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from rose.batch import Int32
from tests.http.served import Served, byte_backend, serving, text_ids, until

# Of several runs, and as many parts of an answer; and of a few tokens.
TEXTS = ["x" * 9000 + "wörld", "ab"]


class Gated(HuggingFaceTokenizer):
    """Its tokens come in runs, each of which waits for the gate; so do texts of ids."""

    def __init__(self) -> None:
        super().__init__(byte_backend())
        self.begun = 0
        self.gate = threading.Event()

    def tokens(self, texts: Sequence[str], *, special_tokens: bool) -> Iterator[TextTokens]:
        """See Tokenizer."""
        for text in super().tokens(texts, special_tokens=special_tokens):
            yield TextTokens(text.count, map(self._wait, text.runs))

    def decode(self, sequences: Iterable[Int32], *, skip_special_tokens: bool) -> list[str]:
        """See Tokenizer."""
        self._wait([])
        return super().decode(sequences, skip_special_tokens=skip_special_tokens)

    def _wait(self, run: list[Token]) -> list[Token]:
        self.begun += 1
        assert self.gate.wait(10)
        return run


@pytest.mark.parametrize("special_tokens", [True, False])
@pytest.mark.parametrize("media", ["application/json", "application/msgpack"])
async def test_many_tokens_are_those_of_the_text(server: Served, media: str, special_tokens: bool) -> None:
    body = {"inputs": TEXTS, "add_special_tokens": special_tokens}
    reply = await server.embed(body, path="/tokenize", headers={"Accept": media})
    assert (reply.status, reply.headers["content-type"]) == (200, media)
    for text, row in zip(TEXTS, reply.value, strict=True):
        ids = text_ids(text)
        assert [token["id"] for token in row] == (ids if special_tokens else ids[1:-1])
        assert [token["special"] for token in (row[0], row[-1])] == [special_tokens] * 2
        own = [token for token in row if not token["special"]]
        assert all(token["text"] == text[token["start"] : token["stop"]] for token in own)
        assert (own[0]["start"], own[-1]["stop"]) == (0, len(text))


async def test_the_loop_serves_others_while_tokens_are_made() -> None:
    tokenizer = Gated()
    async with serving(tokenizer=tokenizer) as server:
        asked = asyncio.create_task(server.embed({"inputs": TEXTS}, path="/tokenize"))
        await until(lambda: tokenizer.begun == 1)
        assert (await server.send("GET", "/health")).status == 200
        tokenizer.gate.set()
        assert (await asked).status == 200
        assert tokenizer.begun > len(TEXTS)


async def test_no_more_tokens_are_made_for_a_client_that_left() -> None:
    tokenizer = Gated()
    body = json.dumps({"inputs": TEXTS[0]}).encode()
    async with serving(tokenizer=tokenizer) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: tokenizer.begun == 1)
        writer.close()
        await until(lambda: server.connections == 0)
        tokenizer.gate.set()
        assert (await server.embed({"ids": [1]}, path="/decode")).status == 200  # the threads are free
        assert tokenizer.begun == 2


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {"inputs": TEXTS}, "before its tokens were there"),
        ("/decode", {"ids": [1]}, "before its texts were there"),
    ],
)
async def test_the_deadline_holds_while_tokens_or_texts_are_made(
    path: str, body: dict[str, object], words: str
) -> None:
    tokenizer = Gated()
    async with serving(tokenizer=tokenizer) as server:
        reply = await server.embed(body, path=path, headers={"x-request-timeout-ms": "200"})
        tokenizer.gate.set()
        assert (reply.status, reply.value["error_type"]) == (504, "Overloaded"), reply.body
        assert words in reply.value["error"]
        assert tokenizer.begun <= 1  # none where even the first came too late
        assert (await server.embed(body, path=path)).status == 200

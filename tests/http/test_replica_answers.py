"""A gateway over replicas: its answers are those of a server alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.app import create_app
from gateway.listener import listen
from gateway.options import GatewayOptions
from gateway.replicas.endpoints import Listing
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from rose.batch import EngineInfo, TokenOutput
from tests.fakes import FakeEngine, fake_info
from tests.http.fleets import fleet
from tests.http.served import Served, expected, serving, text_ids, until

pytestmark = pytest.mark.timeout(30)


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": ["a", "bc"], "embed_dtype": "int8"}),
    ("/v1/embeddings", {"input": [[1, 2], [3]], "dimensions": 4, "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": ["a", "bcd"], "outputs": ["dense", "sparse", "multi_vector"]}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64_int8"}),
    ("/v1/contextualizedembeddings", {"input": [["a", "bc"], ["def"]]}),
    ("/embed_all", {"inputs": ["abc", "d"]}),
    ("/embed_sparse", {"inputs": ["abc", "d"]}),
    ("/rerank", {"query": "a", "texts": ["b", "a"]}),
    ("/rerank", {"query": "a", "texts": ["b", "a"], "score_by": "multi_vector"}),
    ("/score", {"text_1": "a", "text_2": ["b", "c"]}),
]
OUTPUTS: dict[TokenOutput, int] = {"lexical": 1, "multi_vector": 8, "hidden": 8}
EMBEDS = replace(fake_info(has_int8=True, token_outputs=OUTPUTS), type_vocab_size=2)
SCORES = replace(fake_info(dimensions=1), task="score", labels=("yes",), type_vocab_size=2)


@pytest.mark.parametrize(
    ("info", "path", "body"),
    [(EMBEDS, *item) for item in BODIES]
    + [
        (SCORES, "/rerank", {"query": "a", "texts": ["b", "c"]}),
        (SCORES, "/predict", {"inputs": [["a", "b"], ["c"]]}),
    ],
)
async def test_every_answer_is_that_of_the_server_alone(
    info: EngineInfo, path: str, body: dict[str, Any], tokenizer: HuggingFaceTokenizer
) -> None:
    alone: Callable[[], Any] = lambda: serving(engine=FakeEngine(info=info), tokenizer=tokenizer)  # noqa: E731
    async with alone() as one, alone() as two, fleet(one, two) as fleeting:
        app = create_app(
            GatewayOptions(), fleeting.balancer, fleeting.fleet.info, tokenizer, fleet=fleeting.fleet
        )
        runner = await listen(app, "127.0.0.1", 0)
        gateway = Served(runner, one.engine, one.batcher)
        wanted = await one.embed(body, path=path)
        got = await gateway.embed(body, path=path)
        assert (got.status, got.body) == (wanted.status, wanted.body) or _same(got.value, wanted.value)
        assert got.status == 200
        await gateway.session.close()
        await runner.cleanup()


def _same(one: Any, other: Any) -> bool:
    """But for what is made for each answer: its id, and the second it was made in."""
    made = {"id": "", "created": 0}
    if not (one.keys() == other.keys() and 0 <= one.get("created", 0) - other.get("created", 0) <= 60):
        return False
    return {**one, **made} == {**other, **made}


async def test_texts_go_through_and_probes_and_figures_tell_of_replicas(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    async with serving() as one, fleet(one) as fleeting:
        app = create_app(
            GatewayOptions(), fleeting.balancer, fleeting.fleet.info, tokenizer, fleet=fleeting.fleet
        )
        runner = await listen(app, "127.0.0.1", 0)
        gateway = Served(runner, one.engine, one.batcher)
        reply = await gateway.embed({"input": ["abc"]})
        np.testing.assert_allclose(reply.vectors, [expected(text_ids("abc"))], rtol=1e-5)
        assert (await gateway.send("GET", "/ready")).status == 200
        page = (await gateway.send("GET", "/metrics")).body.decode()
        assert f'ivy_replica_tokens_total{{replica="{one.url}"}} 5' in page
        assert f'ivy_replica_state{{replica="{one.url}",state="ready"}} 1' in page
        fleeting.replica(one).eject("for a test")
        fleeting.fleet._listing = Listing((), None)
        await until(lambda: not fleeting.fleet.replicas)
        assert (await gateway.send("GET", "/ready")).status == 503
        assert (await gateway.send("GET", "/health")).status == 200
        reply = await gateway.embed({"input": ["abc"]})
        assert (reply.status, reply.error["code"]) == (503, "unavailable")
        assert int(reply.headers["Retry-After"]) >= 1
        await gateway.session.close()
        await runner.cleanup()

"""Clients that generators made from API descriptions: TEI's and Infinity's. They check what they read."""

from __future__ import annotations

import numpy as np
from conftest import CLOSE, EATING, EATING_TOO, FAR, KEY, MODEL, MOVIE, TEXTS, Server, check_exact
from infinity_client import AuthenticatedClient as InfinityClient
from infinity_client.api.default import embeddings, health, rerank
from infinity_client.models import EmbeddingEncodingFormat, OpenAIEmbeddingInputText, RerankInput
from text_embeddings_inference_client import AuthenticatedClient as TEIClient
from text_embeddings_inference_client.api.text_embeddings_inference import embed, get_model_info
from text_embeddings_inference_client.models import EmbedRequest, ErrorType


def test_infinity_embeddings(server: Server) -> None:
    """Its defaults are dimensions 0 and modality text. It cannot read the base64 that it can ask for."""
    client = InfinityClient(base_url=server.url, token=KEY)
    body = OpenAIEmbeddingInputText(TEXTS, MODEL, EmbeddingEncodingFormat.FLOAT)
    answer = embeddings.sync(client=client, body=body)
    check_exact([item.embedding for item in answer.data])
    assert answer.usage.total_tokens == 25


def test_infinity_rerank(server: Server) -> None:
    client = InfinityClient(base_url=server.url, token=KEY)
    body = RerankInput(query=EATING, documents=[MOVIE, EATING_TOO], model=MODEL)
    ranked = rerank.sync(client=client, body=body)
    assert [result.index for result in ranked.results] == [1, 0]
    np.testing.assert_allclose([result.relevance_score for result in ranked.results], [CLOSE, FAR], atol=2e-3)


def test_probes(server: Server) -> None:
    client = InfinityClient(base_url=server.url, token="none is needed")
    assert health.sync_detailed(client=client).status_code == 200


def test_tei(server: Server) -> None:
    client = TEIClient(base_url=server.url, token=KEY)
    check_exact(embed.sync(client=client, json_body=EmbedRequest(TEXTS)))
    assert get_model_info.sync_detailed(client=client).status_code == 200


def test_tei_errors(server: Server) -> None:
    client = TEIClient(base_url=server.url, token=KEY)
    refused = embed.sync(client=client, json_body=EmbedRequest(""))
    assert refused.error.startswith("inputs is an empty string")
    assert refused.error_type is ErrorType.VALIDATION

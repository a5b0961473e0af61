"""Clients of Cohere, Voyage and TEI."""

from __future__ import annotations

import cohere
import pytest
import voyageai
from conftest import (
    CLOSE,
    EATING,
    EATING_TOO,
    FAR,
    KEY,
    MODEL,
    MOVIE,
    TEXTS,
    Server,
    check_exact,
    check_vectors,
)
from huggingface_hub import InferenceClient
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference as TEIRerank

DOCUMENTS = [MOVIE, EATING_TOO, "Steel is an alloy."]


def check_ranks(ranks: list[tuple[int, float]], count: int = 3) -> None:
    """(index, score) of DOCUMENTS for EATING, the best first."""
    assert len(ranks) == count
    assert ranks[0][0] == 1
    assert abs(ranks[0][1] - CLOSE) < 2e-3
    assert [score for _, score in ranks] == sorted((score for _, score in ranks), reverse=True)
    assert abs(dict(ranks).get(0, FAR) - FAR) < 2e-3


def test_cohere_v2(server: Server) -> None:
    client = cohere.ClientV2(api_key=KEY, base_url=server.url)
    answer = client.embed(
        texts=TEXTS, model=MODEL, input_type="search_document", embedding_types=["float", "int8", "ubinary"]
    )
    check_exact(answer.embeddings.float_)
    check_vectors(answer.embeddings.int8, tolerance=0.02)
    assert {len(row) for row in answer.embeddings.ubinary} == {48}
    inputs = [cohere.EmbedInput(content=[cohere.TextEmbedContent(text=text)]) for text in TEXTS]
    answer = client.embed(inputs=inputs, model=MODEL, input_type="search_document", embedding_types=["float"])
    check_exact(answer.embeddings.float_)
    ranked = client.rerank(model=MODEL, query=EATING, documents=DOCUMENTS, top_n=2)
    check_ranks([(result.index, result.relevance_score) for result in ranked.results], 2)


def test_cohere_v1(server: Server) -> None:
    client = cohere.Client(api_key=KEY, base_url=server.url)
    check_exact(client.embed(texts=TEXTS, model=MODEL, input_type="search_query").embeddings)
    ranked = client.rerank(model=MODEL, query=EATING, documents=DOCUMENTS, return_documents=True)
    check_ranks([(result.index, result.relevance_score) for result in ranked.results])
    assert ranked.results[0].document.text == EATING_TOO


def test_cohere_errors(server: Server) -> None:
    client = cohere.ClientV2(api_key="wrong", base_url=server.url)
    with pytest.raises(cohere.errors.UnauthorizedError):
        client.embed(texts=TEXTS, model=MODEL, input_type="search_query", embedding_types=["float"])
    client = cohere.ClientV2(api_key=KEY, base_url=server.url)
    with pytest.raises(cohere.errors.BadRequestError) as caught:
        client.rerank(model=MODEL, query="", documents=DOCUMENTS)
    assert "query is an empty string" in caught.value.body["message"]


def test_voyage(server: Server) -> None:
    client = voyageai.Client(api_key=KEY, base_url=f"{server.url}/v1")
    check_exact(client.embed(TEXTS, model=MODEL, input_type="document").embeddings)
    check_vectors(client.embed(TEXTS, model=MODEL, output_dtype="int8").embeddings, tolerance=0.02)
    ranked = client.rerank(EATING, DOCUMENTS, model=MODEL, top_k=2)
    check_ranks([(result.index, result.relevance_score) for result in ranked.results], 2)
    assert ranked.results[0].document == EATING_TOO


def test_the_hub_s_client(server: Server) -> None:
    for place in ({"model": f"{server.url}/embed"}, {"base_url": server.url}):
        client = InferenceClient(token=KEY, **place)
        check_exact([client.feature_extraction(text)[0] for text in TEXTS])
    client = InferenceClient(model=f"{server.url}/similarity", token=KEY)
    scores = client.sentence_similarity(EATING, [EATING_TOO, MOVIE])
    assert abs(scores[0] - CLOSE) < 2e-3
    assert abs(scores[1] - FAR) < 2e-3


def test_llama_index_tei(server: Server) -> None:
    client = TextEmbeddingsInference(
        model_name=MODEL, base_url=server.url, auth_token=KEY, timeout=60, embed_batch_size=3
    )
    check_exact(client.get_text_embedding_batch(TEXTS))


@pytest.mark.parametrize("kind", ["tei", "cohere"])
def test_llama_index_rerank(server: Server, kind: str) -> None:
    if kind == "tei":
        ranker = TEIRerank(base_url=server.url, model_name=MODEL, top_n=3, auth_token=f"Bearer {KEY}")
    else:
        ranker = CohereRerank(api_key=KEY, base_url=server.url, model=MODEL, top_n=3)
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in DOCUMENTS]
    ranked = ranker.postprocess_nodes(nodes, QueryBundle(EATING))
    check_ranks([(DOCUMENTS.index(node.node.text), node.score) for node in ranked])

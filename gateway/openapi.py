"""The description of the API in OpenAPI 3.1, made from the Structs that decode requests and the error table.

python -m gateway.openapi > docs/openapi.json
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway import error_bodies
from gateway.errors import ErrorKind, ErrorShape
from gateway.media import Media
from gateway.replicas.wire import SequencesRequest, SequencesResponse
from gateway.routes import (
    cohere,
    dashboard,
    health,
    metrics,
    models,
    openai,
    perplexity,
    predict,
    rerank,
    score,
    sequences,
    tei,
    tei_tokens,
    tokens,
)
from gateway.schemas import (
    EmbeddingBlock,
    EmbeddingRequest,
    EmbeddingResponse,
    ModelList,
    Status,
    TokenEmbeddings,
)

_REF = "#/components/schemas/{name}"
# Said of every path once, not in each route's table.
_NOT_OF_ROUTES = {
    ErrorKind.NOT_FOUND,
    ErrorKind.METHOD_NOT_ALLOWED,
    ErrorKind.INVALID_HTTP,
    ErrorKind.HEAD_TIMEOUT,
    ErrorKind.EXPECTATION_FAILED,
    ErrorKind.UNKNOWN_TRANSFER_CODING,
}


@dataclass(frozen=True, slots=True)
class Work:
    """One POST route: its paths, what it is for, what it takes and gives, and how it tells errors.

    also: how it does when the body is in another dialect than the path's own.
    """

    paths: tuple[str, ...]
    summary: str
    requests: tuple[Any, ...]
    responses: tuple[Any, ...]
    shape: ErrorShape = ErrorShape.OPENAI
    also: tuple[ErrorShape, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """One GET route. response: a Struct, or the content type of what is none."""

    path: str
    summary: str
    response: Any
    keyed: bool


class Words(msgspec.Struct, kw_only=True):
    """What clients read where we write `schemas.SparseVector`: ids of words, and what each weighs."""

    indices: list[int]
    values: list[float]


class Embedding(msgspec.Struct, kw_only=True):
    """What clients read where we write `schemas.EmbeddingItem`: numbers, or base64 of their bytes."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str | msgspec.UnsetType = msgspec.UNSET
    sparse: Words | msgspec.UnsetType = msgspec.UNSET
    multi_vector: list[list[float]] | str | msgspec.UnsetType = msgspec.UNSET
    multi_vector_shape: tuple[int, int] | msgspec.UnsetType = msgspec.UNSET


_RANKED = (list[rerank.TEIRank], rerank.RerankResponse, rerank.VoyageResponse)
_VECTORS = (list[list[float]], EmbeddingBlock)
WORK = (
    Work(
        openai.PATHS,
        "Vectors of texts or token ids: OpenAI's dialect, and Perplexity's for its encoding formats",
        (EmbeddingRequest,),
        (EmbeddingResponse, perplexity.PerplexityResponse, EmbeddingBlock),
        also=(ErrorShape.PERPLEXITY,),
    ),
    Work(
        (perplexity.CONTEXT_PATH,),
        "Vectors of chunks within their document; models that pool by mean only",
        (perplexity.ContextualizedRequest,),
        (perplexity.ContextualizedResponse,),
        ErrorShape.PERPLEXITY,
    ),
    Work((tei.EMBED_PATH,), "Vectors as bare lists", (tei.EmbedRequest,), _VECTORS, ErrorShape.TEI),
    Work(
        (tei.ROOT_PATH,),
        "As /embed or /similarity",
        (tei.EmbedRequest, tei.SimilarityRequest),
        (*_VECTORS, list[float]),
        ErrorShape.TEI,
    ),
    Work((tei.SIMILARITY_PATH,), "Cosines", (tei.SimilarityRequest,), (list[float],), ErrorShape.TEI),
    Work(
        (tei_tokens.ALL_PATH,),
        "A vector for each token; models that give vectors only",
        (tei_tokens.EmbedTokensRequest,),
        (list[list[list[float]]], TokenEmbeddings),
        ErrorShape.TEI,
    ),
    Work(
        (tei_tokens.SPARSE_PATH,),
        "Words that weigh; models that give them only",
        (tei_tokens.EmbedTokensRequest,),
        (list[list[tei_tokens.SparseValue]],),
        ErrorShape.TEI,
    ),
    Work(
        (predict.PREDICT_PATH,),
        "Classes; models that give them only",
        (predict.PredictRequest,),
        (list[predict.Prediction], list[list[predict.Prediction]]),
        ErrorShape.TEI,
    ),
    Work(
        (tokens.TOKENIZE_PATH,),
        "Tokens",
        (tokens.TokenizeRequest,),
        (list[list[tokens.Token]],),
        ErrorShape.TEI,
    ),
    Work((tokens.DECODE_PATH,), "Texts of token ids", (tokens.DecodeRequest,), (list[str],), ErrorShape.TEI),
    *(
        Work(
            (path,),
            "Documents by how well they answer",
            (rerank.RerankRequest,),
            _RANKED,
            shape,
            (ErrorShape.JINA if shape is ErrorShape.TEI else ErrorShape.TEI,),
        )
        for path, shape in rerank.PATHS.items()
    ),
    Work(score.PATHS, "Scores of pairs", (score.ScoreRequest,), (score.ScoreResponse,)),
    *(
        Work(
            (path,),
            "Vectors by number type",
            (cohere.CohereEmbedRequest,),
            (cohere.CohereEmbedResponse,),
            ErrorShape.COHERE,
        )
        for path in (cohere.V1_PATH, cohere.V2_PATH)
    ),
    Work(
        (sequences.PATH,),
        "Rows of token ids as the engine gives them: what gateways ask of replicas",
        (SequencesRequest,),
        (SequencesResponse,),
    ),
)
PAGES = (
    Page(models.PATH, "The names under which the model is served", ModelList, keyed=True),
    Page(health.INFO_PATH, "Model, limits, settings and counters", dict[str, Any], keyed=True),
    Page(health.HEALTH_PATH, "200 while the process can do its work", Status, keyed=False),
    Page(health.READY_PATH, "200 while new work is accepted", Status, keyed=False),
    Page(metrics.PATH, "Counters for Prometheus", "text/plain", keyed=False),
    Page("/openapi.json", "This description", dict[str, Any], keyed=False),
    Page("/docs", "This description, to read and try", "text/html", keyed=False),
    Page(dashboard.PATH, "A page for people, unless --no-dashboard", "text/html", keyed=False),
    Page(dashboard.EVENTS_PATH, "Its numbers, as server-sent events", "text/event-stream", keyed=True),
)
# Their `data` are embeddings, encoded beforehand, which hides their type.
_OF_EMBEDDINGS = ("EmbeddingResponse", "PerplexityResponse", "PerplexityDocument")


def describe() -> dict[str, Any]:
    """The whole document."""
    types = [kind for work in WORK for kind in (*work.requests, *work.responses)]
    types += [page.response for page in PAGES if not isinstance(page.response, str)]
    types += [Embedding, *error_bodies.ERROR_STRUCTS.values()]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = {repr(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, Any] = {
        path: {"post": _work(work, path, by_type)} for work in WORK for path in work.paths
    }
    for page in PAGES:
        paths.setdefault(page.path, {})["get"] = _page(page, by_type)
    for name in _OF_EMBEDDINGS:
        components[name]["properties"]["data"]["items"] = {"$ref": _REF.format(name="Embedding")}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Bouquet",
            "version": "1",
            "description": "Embeddings in OpenAI's, Perplexity's, TEI's, Cohere's and others' dialects.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "responses": {
                _response_name(shape, status): _error_response([shape], status)
                for shape in ErrorShape
                for status in statuses(shape)
            },
        },
    }


def statuses(shape: ErrorShape) -> dict[int, list[ErrorKind]]:
    """What a route of this dialect may answer besides 200."""
    table: dict[int, list[ErrorKind]] = {}
    for kind in ErrorKind:
        if kind not in _NOT_OF_ROUTES or kind is ErrorKind.NOT_FOUND:
            table.setdefault(int(shape.status(kind)), []).append(kind)
    return dict(sorted(table.items()))


def _work(work: Work, path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    responses = _errors((work.shape, *work.also))
    if work.responses:
        content = _both_codecs(_any_of(work.responses, schemas))
        responses = {"200": {"description": "Done", "content": content}, **responses}
    return {
        "summary": work.summary,
        "operationId": "post" + path.replace("/", "_"),
        "tags": [work.shape.value],
        "security": [{}, {"key": []}],
        "requestBody": {"required": True, "content": _both_codecs(_any_of(work.requests, schemas))},
        "responses": responses,
    }


def _any_of(kinds: tuple[Any, ...], schemas: dict[str, Any]) -> dict[str, Any]:
    given: list[dict[str, Any]] = [schemas[repr(kind)] for kind in kinds]
    return given[0] if len(given) == 1 else {"anyOf": given}


def _errors(shapes: tuple[ErrorShape, ...]) -> dict[str, Any]:
    """The error answers of a route that speaks so."""
    responses: dict[str, Any] = {}
    for status in sorted({status for shape in shapes for status in statuses(shape)}):
        speaking = [shape for shape in shapes if status in statuses(shape)]
        if len(speaking) == 1:
            name = _response_name(speaking[0], status)
            responses[str(status)] = {"$ref": f"#/components/responses/{name}"}
        else:
            responses[str(status)] = _error_response(speaking, status)
    return responses


def _page(page: Page, schemas: dict[str, Any]) -> dict[str, Any]:
    if isinstance(page.response, str):
        content: dict[str, Any] = {page.response: {"schema": {"type": "string"}}}
    else:
        content = {Media.JSON.value: {"schema": schemas[repr(page.response)]}}
    responses: dict[str, Any] = {"200": {"description": "Done", "content": content}}
    for status in _page_statuses(page):
        name = _response_name(ErrorShape.OPENAI, status)
        responses[str(status)] = {"$ref": f"#/components/responses/{name}"}
    return {
        "summary": page.summary,
        "operationId": "get" + page.path.replace("/", "_"),
        "tags": ["Pages"],
        "security": [{}, {"key": []}] if page.keyed else [],
        "responses": responses,
    }


def _page_statuses(page: Page) -> tuple[int, ...]:
    """What it answers besides 200. Streams are few, and end with the server."""
    if page.response == "text/event-stream":
        return 401, 429, 503
    return (401,) if page.keyed else (503,) if page.response is Status else ()


def _both_codecs(schema: Any) -> dict[str, Any]:
    return {media.value: {"schema": schema} for media in Media}


def _response_name(shape: ErrorShape, status: int) -> str:
    return f"{shape.value}{status}"


def _error_response(shapes: list[ErrorShape], status: int) -> dict[str, Any]:
    codes = ", ".join(kind.code for kind in statuses(shapes[0])[status])
    bodies = [{"$ref": _REF.format(name=error_bodies.ERROR_STRUCTS[shape].__name__)} for shape in shapes]
    return {
        "description": codes,
        "content": _both_codecs(bodies[0] if len(bodies) == 1 else {"anyOf": bodies}),
    }


def render() -> bytes:
    """The document as it is served and kept in docs/openapi.json."""
    return msgspec.json.format(msgspec.json.encode(describe()), indent=1) + b"\n"


if __name__ == "__main__":
    sys.stdout.buffer.write(render())

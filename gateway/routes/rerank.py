"""Reranking as TEI, Cohere, Jina, Infinity, vLLM and Voyage ask for it: one query, documents, the best first.

The body tells the dialects apart that share a path: `texts` is TEI's, `truncation` Voyage's.
Source: TEI docs/openapi.json; docs.cohere.com/reference/rerank; api.jina.ai; vLLM docs/serving; voyageai 0.5.
"""

from __future__ import annotations

import msgspec

from gateway.cuts import read_direction, read_prompt_tokens
from gateway.errors import ErrorShape, speaking
from gateway.exchange import Answer, Call
from gateway.inputs import check_text, invalid
from gateway.names import ServedNames
from gateway.rendering import Headers, answer, figures, usage
from gateway.routes.identity import BilledUnits, Meta, new_id
from gateway.schemas import Encodable, Usage, decode
from gateway.scoring import Scored, ScoreJob, Scorer, read_score_by

# Each path's own dialect for its errors.
PATHS = {"/rerank": ErrorShape.TEI, "/v1/rerank": ErrorShape.JINA, "/v2/rerank": ErrorShape.COHERE}


class Document(msgspec.Struct, kw_only=True):
    """A document as an object; other fields are passed over."""

    text: str


class RerankRequest(msgspec.Struct, kw_only=True):
    """One query and its documents, in the words of all dialects.

    documents: Cohere's, Jina's, Infinity's, vLLM's, Voyage's. Those that are too long are cut unless
        `truncate` or `truncation` is False, as those servers do.
    texts: TEI's, instead of documents. Those that are too long are refused unless `truncate` is True.
    top_n, top_k: how many to give; None: all. return_documents, return_text: with their texts.
    instruction: what makes a document relevant, for models that read it.
    raw_scores: as the model gives them, not squashed into [0, 1].
    score_by: "dense", "sparse" or "multi_vector": what of the two texts is compared; None: dense vectors, or
        what the model has.
    max_tokens_per_doc, truncate_prompt_tokens: of query and document, each, when they are cut.
    """

    query: str
    documents: list[str | Document] | None = None
    texts: list[str] | None = None
    model: str | None = None
    top_n: int | None = None
    top_k: int | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None
    instruction: str | None = None
    truncate: bool | None = None
    truncation: bool | None = None
    truncation_direction: str | None = None
    truncate_prompt_tokens: int | None = None
    max_tokens_per_doc: int | None = None
    score_by: str | None = None


class TEIRank(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One of TEI's results."""

    index: int
    score: float
    text: str | None = None


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One result. index: the document's place in the request."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankResponse(msgspec.Struct, kw_only=True):
    """What Cohere, Jina, Infinity and vLLM agree on, and what each wants besides."""

    id: str
    object: str = "rerank"
    model: str
    results: list[RerankResult]
    usage: Usage
    meta: Meta


class VoyageResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One of Voyage's results."""

    index: int
    relevance_score: float
    document: str | None = None


class VoyageResponse(msgspec.Struct, kw_only=True):
    """Voyage's answer."""

    object: str = "list"
    data: list[VoyageResult]
    model: str
    usage: Usage


class Rerank:
    """POST /rerank, /v1/rerank, /v2/rerank. shape: how the path tells errors, before the body says more."""

    def __init__(self, scorer: Scorer, names: ServedNames, shape: ErrorShape) -> None:
        self._scorer = scorer
        self._names = names
        self._own = shape
        self._other = ErrorShape.JINA if shape is ErrorShape.TEI else shape

    async def __call__(self, call: Call) -> Answer:
        """Rank what `call` asks for.

        Raises:
            ApiError, scheduler.errors.SchedulerError: as Scorer.score.
        """
        request = decode(RerankRequest, call.body, call.media)
        if request.documents is None:
            with speaking(self._own if request.texts is None else ErrorShape.TEI):
                texts, top = _texts(request), _top(request)
                scored = await self._scorer.score(_job(request, texts, call))
                given = texts if request.return_text else None
                return _answer(call, _tei(given, scored, top), figures(scored.work))
        with speaking(self._other):
            model = self._names.read(request.model)
            texts, top = _texts(request), _top(request)
            scored = await self._scorer.score(_job(request, texts, call))
            render = _common if request.truncation is None else _voyage
            given = texts if request.return_documents else None
            return _answer(call, render(given, scored, top, model), figures(scored.work))


def _texts(request: RerankRequest) -> list[str]:
    if request.documents is None:
        if request.texts is None:
            raise invalid("texts and documents are both missing; send one of them", "texts")
        return request.texts
    if request.texts is not None:
        raise invalid("texts and documents are both given; send one of them", "texts")
    return [item if isinstance(item, str) else item.text for item in request.documents]


def _job(request: RerankRequest, texts: list[str], call: Call) -> ScoreJob:
    per_doc = request.max_tokens_per_doc
    if per_doc is not None and per_doc < 1:
        raise invalid(f"max_tokens_per_doc is {per_doc}; give at least 1", "max_tokens_per_doc")
    check_text(request.query, "query")
    return ScoreJob(
        queries=[request.query],
        documents=texts,
        query_name="query",
        document_name="texts" if request.documents is None else "documents",
        truncate=_truncate(request),
        raw=bool(request.raw_scores),
        keep_end=read_direction(request.truncation_direction),
        max_tokens=per_doc or read_prompt_tokens(request.truncate_prompt_tokens),
        deadline=call.deadline,
        instruction=request.instruction,
        score_by=read_score_by(request.score_by),
    )


def _truncate(request: RerankRequest) -> bool:
    if request.truncate is not None:
        return request.truncate
    if request.truncation is not None:
        return request.truncation
    return request.documents is not None or request.truncate_prompt_tokens is not None


def _top(request: RerankRequest) -> int | None:
    name, count = ("top_n", request.top_n) if request.top_k is None else ("top_k", request.top_k)
    if count is not None and count < 1:
        raise invalid(f"{name} is {count}; give at least 1", name)
    return count


def _tei(given: list[str] | None, scored: Scored, top: int | None) -> Encodable:
    return [
        TEIRank(index=i, score=float(scored.scores[i]), text=given[i] if given else None)
        for i in scored.best(top)
    ]


def _common(given: list[str] | None, scored: Scored, top: int | None, model: str) -> Encodable:
    results = [
        RerankResult(
            index=i,
            relevance_score=float(scored.scores[i]),
            document=Document(text=given[i]) if given else None,
        )
        for i in scored.best(top)
    ]
    return RerankResponse(
        id=new_id("rerank"),
        model=model,
        results=results,
        usage=usage(scored.work),
        meta=Meta(billed_units=BilledUnits(search_units=1)),
    )


def _voyage(given: list[str] | None, scored: Scored, top: int | None, model: str) -> Encodable:
    results = [
        VoyageResult(index=i, relevance_score=float(scored.scores[i]), document=given[i] if given else None)
        for i in scored.best(top)
    ]
    return VoyageResponse(data=results, model=model, usage=usage(scored.work))


def _answer(call: Call, value: Encodable, headers: Headers) -> Answer:
    return answer(value, call.answer_media, headers)

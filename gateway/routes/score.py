"""vLLM's scores of pairs: one text with many, or as many with as many, in the order of the request.

Source: vLLM 0.22, docs/serving/openai_compatible_server, score API.
"""

from __future__ import annotations

import time

import msgspec

from gateway.cuts import read_direction, read_prompt_tokens
from gateway.exchange import Answer, Call
from gateway.inputs import check_text, invalid
from gateway.names import ServedNames
from gateway.rendering import answer, figures, usage
from gateway.routes.identity import new_id
from gateway.schemas import Usage, decode
from gateway.scoring import ScoreJob, Scorer, read_score_by

PATHS = ("/score", "/v1/score")


class ScoreRequest(msgspec.Struct, kw_only=True):
    """Pairs of texts. queries and documents are newer names of text_1 and text_2, as are data_1 and data_2.

    instruction: what makes a document relevant, for models that read it.
    use_activation, activation: False: scores as the model gives them, not squashed into [0, 1].
    score_by: as in RerankRequest. Other fields as in EmbeddingRequest.
    """

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    model: str | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    instruction: str | None = None
    score_by: str | None = None


class ScoreItem(msgspec.Struct, kw_only=True):
    """One pair's score."""

    index: int
    object: str = "score"
    score: float


class ScoreResponse(msgspec.Struct, kw_only=True):
    """vLLM's answer. created: Unix seconds."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ScoreItem]
    usage: Usage


class Score:
    """POST /score."""

    def __init__(self, scorer: Scorer, names: ServedNames) -> None:
        self._scorer = scorer
        self._names = names

    async def __call__(self, call: Call) -> Answer:
        """Score what `call` asks for.

        Raises:
            ApiError, scheduler.errors.SchedulerError: as Scorer.score.
        """
        request = decode(ScoreRequest, call.body, call.media)
        model = self._names.read(request.model)
        query_name, queries = _side(request, ("text_1", "queries", "data_1"))
        document_name, documents = _side(request, ("text_2", "documents", "data_2"))
        scored = await self._scorer.score(
            ScoreJob(
                queries=queries,
                documents=documents,
                query_name=query_name,
                document_name=document_name,
                truncate=bool(request.truncate or request.truncate_prompt_tokens),
                raw=request.use_activation is False or request.activation is False,
                keep_end=read_direction(request.truncation_direction),
                max_tokens=read_prompt_tokens(request.truncate_prompt_tokens),
                deadline=call.deadline,
                instruction=request.instruction,
                score_by=read_score_by(request.score_by),
            )
        )
        data = [ScoreItem(index=i, score=score) for i, score in enumerate(scored.scores.tolist())]
        response = ScoreResponse(
            id=new_id("score"), created=int(time.time()), model=model, data=data, usage=usage(scored.work)
        )
        return answer(response, call.answer_media, figures(scored.work))


def _side(request: ScoreRequest, names: tuple[str, ...]) -> tuple[str, list[str]]:
    """The field that holds this side of the pairs, and its texts."""
    given = [(name, getattr(request, name)) for name in names if getattr(request, name) is not None]
    if len(given) != 1:
        what = "missing" if not given else "given twice"
        raise invalid(f"{names[0]} is {what}; send one of {', '.join(names)}", names[0])
    [(name, texts)] = given
    if isinstance(texts, str):
        check_text(texts, name)
        return name, [texts]
    return name, texts

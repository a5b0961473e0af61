"""How well documents answer queries: `Scorer` is what dialects ask, whatever the model does to answer.

A bi-encoder compares what it gives of each text: `BiEncoderScorer`. A cross-encoder is another Scorer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from gateway.deadline import Deadline
from gateway.errors import shown
from gateway.inputs import Texts, check_items, invalid
from gateway.late_interaction import late_interactions, shared_words
from gateway.outputs import OUTPUTS, words_of
from gateway.pipeline import Embedded, EmbedJob, Pipeline
from gateway.prompts import Prompts

Float64 = NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Pairs to score: one query with each document, or as many queries as documents, one with one.

    query_name, document_name: the fields they came from. raw: scores as the model gives them, not squashed
    into [0, 1]; the cosines of a bi-encoder are the same either way.
    truncate, keep_end, max_tokens: as in EmbedJob, of each text, or of the pair if it is read at once.
    instruction: what makes a document relevant, for models that read it; None: the model's own words.
    score_by: what of two texts is compared, as EngineInfo.outputs calls it; None: the model's first.
    """

    queries: list[str]
    documents: list[str]
    query_name: str
    document_name: str
    truncate: bool
    raw: bool = False
    keep_end: bool = False
    max_tokens: int | None = None
    deadline: Deadline | None = None
    instruction: str | None = None
    score_by: str | None = None


def read_score_by(name: str | None) -> str | None:
    """A request's `score_by`.

    Raises:
        ApiError: INVALID_VALUE: there is nothing of this name to compare.
    """
    if name is not None and name not in OUTPUTS:
        known = ", ".join(OUTPUTS)
        raise invalid(f"score_by is {shown(name)}; this server knows {known}", "score_by")
    return name


@dataclass(frozen=True, slots=True)
class Scored:
    """scores: f64[n], one a pair, higher is better. work: what it took."""

    scores: Float64
    work: Embedded

    def best(self, count: int | None) -> list[int]:
        """Documents' places by falling score, the first `count` (None: all); equals stay in order."""
        return [int(index) for index in np.argsort(-self.scores, kind="stable")[:count]]


class Scorer(Protocol):
    """Scores pairs."""

    async def score(self, job: ScoreJob) -> Scored:
        """The scores of `job`.

        Raises:
            ApiError: a text is empty or too long, or the counts do not match.
            scheduler.errors.SchedulerError: see scheduler/errors.py.
        """
        ...


class BiEncoderScorer:
    """Compares what the model gives of queries and documents, each behind the prompt of its task.

    By cosines of dense vectors, by late interaction of vectors of tokens, or by the words that are shared.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        prompts = Prompts(pipeline.info)
        self._query_prompt = prompts.choose(None, None, "query")
        self._document_prompt = prompts.choose(None, None, "document")

    async def score(self, job: ScoreJob) -> Scored:
        """See Scorer."""
        check_pairs(job, self._pipeline.limits.max_items)
        by = job.score_by or next(iter(self._pipeline.info.outputs), "dense")
        count = len(job.queries)
        texts = [self._query_prompt + text for text in job.queries]
        texts += [self._document_prompt + text for text in job.documents]
        work = await self._pipeline.embed(
            EmbedJob(
                inputs=Texts(texts, job.document_name, job.query_name, count),
                dimensions=self._pipeline.info.dimensions,
                normalize=by == "dense",
                truncate=job.truncate,
                deadline=job.deadline,
                max_tokens=job.max_tokens,
                keep_end=job.keep_end,
                outputs=(by,),
            )
        )
        return Scored(await self._compare(work, count, by), work)

    async def _compare(self, work: Embedded, count: int, by: str) -> Float64:
        """f64[n]: each document, after `count` queries, with its query or the only one."""
        if by == "sparse":
            words = await words_of(work, self._pipeline.info)
            pairs = zip(_each(words[:count], words[count:]), words[count:], strict=True)
            return np.array([shared_words(*pair) for pair in pairs])
        if by == "multi_vector" and work.tokens is not None:
            rows = work.tokens.vectors().texts
            queries, documents = _each(rows[:count], rows[count:]), rows[count:]
            # In a thread: 8192 tokens with as many are 137 GFLOP, for which the interpreter is not needed.
            return await asyncio.to_thread(late_interactions, queries, documents)
        vectors = work.vectors.astype(np.float64)
        cosines: Float64 = np.vecdot(vectors[:count], vectors[count:])
        return cosines.clip(-1.0, 1.0)  # of f32 vectors some are 1.0000001


def _each(queries: list[T], documents: list[T]) -> list[T]:
    """The query of each document."""
    return queries * len(documents) if len(queries) == 1 else queries


def check_pairs(job: ScoreJob, max_items: int) -> None:
    """Refuse empty texts, too many of them, and counts that make no pairs.

    Raises:
        ApiError: INVALID_VALUE.
    """
    for texts, name in ((job.queries, job.query_name), (job.documents, job.document_name)):
        check_items(texts, max_items, name)
    queries, documents = len(job.queries), len(job.documents)
    if queries not in (1, documents):
        message = (
            f"{job.query_name} has {queries} items and {job.document_name} {documents}; they make no pairs"
        )
        raise invalid(message, job.query_name)

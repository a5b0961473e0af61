"""How well documents answer queries: `Scorer` is what dialects ask, whatever the model does to answer.

A bi-encoder's score is the cosine of two vectors. A cross-encoder plugs in as another Scorer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gateway.deadline import Deadline
from gateway.inputs import Texts, check_items, invalid
from gateway.pipeline import Embedded, EmbedJob, Pipeline
from gateway.prompts import Prompts

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Pairs to score: one query with each document, or as many queries as documents, one with one.

    query_name, document_name: the fields they came from. raw: scores as the model gives them, not squashed
    into [0, 1]; the cosines of a bi-encoder are the same either way.
    truncate, keep_end, max_tokens: as in EmbedJob, of each text, or of the pair if it is read at once.
    instruction: what makes a document relevant, for models that read it; None: the model's own words.
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
    """Cosines of the vectors of queries and documents, each behind the prompt of its task."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        prompts = Prompts(pipeline.info)
        self._query_prompt = prompts.choose(None, None, "query")
        self._document_prompt = prompts.choose(None, None, "document")

    async def score(self, job: ScoreJob) -> Scored:
        """See Scorer."""
        check_pairs(job, self._pipeline.limits.max_items)
        count = len(job.queries)
        texts = [self._query_prompt + text for text in job.queries]
        texts += [self._document_prompt + text for text in job.documents]
        work = await self._pipeline.embed(
            EmbedJob(
                inputs=Texts(texts, job.document_name, job.query_name, count),
                dimensions=self._pipeline.info.dimensions,
                normalize=True,
                truncate=job.truncate,
                deadline=job.deadline,
                max_tokens=job.max_tokens,
                keep_end=job.keep_end,
            )
        )
        vectors = work.vectors.astype(np.float64)
        cosines = np.vecdot(vectors[:count], vectors[count:])
        return Scored(np.clip(cosines, -1.0, 1.0), work)  # of f32 vectors some are 1.0000001


def check_pairs(job: ScoreJob, max_items: int) -> None:
    """Refuse empty texts, too many of them, and counts that make no pairs.

    Raises:
        ApiError: INVALID_VALUE.
    """
    for texts, name in ((job.queries, job.query_name), (job.documents, job.document_name)):
        if texts == [""]:
            raise invalid(f"{name} is an empty string", name)
        check_items(texts, max_items, name)
    queries, documents = len(job.queries), len(job.documents)
    if queries not in (1, documents):
        message = (
            f"{job.query_name} has {queries} items and {job.document_name} {documents}; they make no pairs"
        )
        raise invalid(message, job.query_name)

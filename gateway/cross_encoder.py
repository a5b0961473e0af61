"""Scores of models that read a text, or a query and a document, at once: one logit a label and sequence.

They are batched by tokens like anything else, embeddings of the same engine included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gateway.deadline import Deadline
from gateway.errors import ApiError, ErrorKind
from gateway.inputs import invalid
from gateway.pipeline import Embedded, Pipeline, Ready
from gateway.scoring import Float64, Scored, ScoreJob, check_pairs
from gateway.templates import PairTemplate, PairTexts, Parts, SingleTemplate, Template, cut
from rose.batch import RaggedIds


@dataclass(frozen=True, slots=True)
class ClassifyJob:
    """Texts to classify, each alone or with a second one. name: the field they came from.

    Other fields as in ScoreJob.
    """

    texts: list[tuple[str] | tuple[str, str]]
    name: str
    truncate: bool
    raw: bool = False
    keep_end: bool = False
    deadline: Deadline | None = None


@dataclass(frozen=True, slots=True)
class Classified:
    """scores: f64[n, L], a column a label. work: what it took."""

    scores: Float64
    work: Embedded


@dataclass(frozen=True, slots=True)
class _Fit:
    """How sequences are made to fit. place: how a message names one; name: the field at fault."""

    truncate: bool
    keep_end: bool
    max_tokens: int | None
    name: str
    place: Callable[[int], str]


class CrossEncoder:
    """Scores pairs, and classifies texts, with one scoring model; see gateway.scoring.Scorer."""

    def __init__(self, pipeline: Pipeline, template: PairTemplate) -> None:
        self._pipeline = pipeline
        self._pairs = template
        self.labels = pipeline.info.labels

    async def score(self, job: ScoreJob) -> Scored:
        """The only logit of each pair, squashed by a sigmoid unless `job.raw`.

        Raises:
            ApiError: as Scorer.score; or the model has several labels, so that no one logit is the score.
        """
        if len(self.labels) != 1:
            message = f"this model has {len(self.labels)} labels and no score; ask /predict for them"
            raise ApiError(ErrorKind.NOT_SUPPORTED, message, param="model")
        if job.score_by is not None:
            message = f"this model reads two texts at once; it does not compare them by {job.score_by}"
            raise ApiError(ErrorKind.NOT_SUPPORTED, message, param="score_by")
        check_pairs(job, self._pipeline.limits.max_items)
        started_s = time.perf_counter()
        texts = PairTexts(job.queries, job.documents, job.instruction)
        place = f"{job.query_name} with {job.document_name}[{{}}]".format
        fit = _Fit(job.truncate, job.keep_end, job.max_tokens, job.document_name, place)
        most, tokenizer = self._most(self._pairs, fit), self._pipeline.tokenizer
        parts = await self._pairs.encode(texts, tokenizer, most, keep_end=fit.keep_end)
        work = await self._run([(self._pairs, pair) for pair in parts], fit, started_s, job.deadline)
        logits = work.vectors[:, 0].astype(np.float64)
        return Scored(logits if job.raw else sigmoid(logits), work)

    async def classify(self, job: ClassifyJob) -> Classified:
        """All logits of each text, unless `job.raw` squashed: one label by a sigmoid, several by a softmax.

        Raises:
            ApiError, scheduler.errors.SchedulerError: as `score`.
        """
        started_s = time.perf_counter()
        tokenizer, place = self._pipeline.tokenizer, f"{job.name}[{{}}]".format
        single = SingleTemplate(tokenizer.special_tokens)
        fit = _Fit(job.truncate, job.keep_end, None, job.name, place)
        alone = [text[0] for text in job.texts if len(text) == 1]
        ids = iter(await tokenizer.encode_bare(alone, self._most(single, fit), ends=fit.keep_end))
        both = [text for text in job.texts if len(text) == 2]
        texts = PairTexts([pair[0] for pair in both], [pair[1] for pair in both])
        most = self._most(self._pairs, fit)
        encoded = await self._pairs.encode(texts, tokenizer, most, keep_end=fit.keep_end) if both else []
        pairs = iter(encoded)
        parts: list[tuple[Template, Parts]] = [
            (single, (next(ids),)) if len(text) == 1 else (self._pairs, next(pairs)) for text in job.texts
        ]
        work = await self._run(parts, fit, started_s, job.deadline)
        logits = work.vectors.astype(np.float64)
        squash = sigmoid if len(self.labels) == 1 else softmax
        return Classified(logits if job.raw else squash(logits), work)

    async def _run(
        self, parts: list[tuple[Template, Parts]], fit: _Fit, started_s: float, deadline: Deadline | None
    ) -> Embedded:
        pairs = [self._fit(template, part, fit, index) for index, (template, part) in enumerate(parts)]
        joined = [template.join(part) for (template, _), part in zip(parts, pairs, strict=True)]
        sequences, types = RaggedIds.of([ids for ids, _ in joined]), [row for _, row in joined]
        self._pipeline.check_ids(sequences, fit.place)
        if not all(sequences.lengths):
            raise invalid(f"{fit.place(sequences.lengths.index(0))} has no tokens", fit.name)
        self._pipeline.check_total(len(sequences.flat), fit.name)
        ready = Ready(sequences, started_s, deadline, types)
        return await self._pipeline.run(ready, lambda result: np.ascontiguousarray(result.vectors))

    def _limit(self, fit: _Fit) -> int:
        """Tokens that one sequence may have."""
        limit = self._pipeline.limits.max_tokens
        return limit if fit.max_tokens is None else min(limit, fit.max_tokens)

    def _most(self, template: Template, fit: _Fit) -> int | None:
        """To how many tokens they will be cut; None: more may matter, to say it."""
        room = self._limit(fit) - template.overhead
        return room if fit.truncate and room > 1 else None

    def _fit(self, template: Template, parts: Parts, fit: _Fit, index: int) -> Parts:
        limit = self._limit(fit)
        room, count = limit - template.overhead, sum(map(len, parts))
        if count <= room:
            return parts
        if not fit.truncate or room < len(parts):
            advice = ' (send "truncate": true to have it cut)' if room >= len(parts) else ""
            raise ApiError(
                ErrorKind.INPUT_TOO_LONG,
                f"{fit.place(index)} has {count} tokens and {template.overhead} around them; this model takes"
                f" at most {limit}{advice}",
                param=fit.name,
            )
        return cut(parts, room, keep_end=fit.keep_end)


def sigmoid(logits: Float64) -> Float64:
    """1 / (1 + exp(-x)), which overflows for no x."""
    return 0.5 + 0.5 * np.tanh(0.5 * logits)


def softmax(logits: Float64) -> Float64:
    """Of each row of f64[n, L]."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    total: Float64 = powers / powers.sum(axis=1, keepdims=True)
    return total

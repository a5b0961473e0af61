"""TEI's /predict: what a classifier says of texts, alone or in pairs, the likeliest label first.

Source: huggingface.co/docs/text-embeddings-inference, docs/openapi.json, PredictRequest.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from gateway.cross_encoder import ClassifyJob, CrossEncoder
from gateway.cuts import read_direction
from gateway.exchange import Answer, Call
from gateway.inputs import check_items, invalid
from gateway.pipeline import Pipeline
from gateway.rendering import answer, figures
from gateway.schemas import decode
from gateway.scoring import Float64

PREDICT_PATH = "/predict"


class PredictRequest(msgspec.Struct, kw_only=True):
    """Texts to classify.

    inputs: a text; or a list of one or two, which is one input; or a list of such inputs.
    raw_scores: logits, not squashed. Other fields as in EmbedRequest.
    """

    inputs: str | list[str | list[str]] | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None


class Prediction(msgspec.Struct, kw_only=True):
    """One label and its score."""

    label: str
    score: float


_Text: TypeAlias = tuple[str] | tuple[str, str]


class Predict:
    """POST /predict: for each input its labels, the best first; of a single input without the outer list."""

    def __init__(self, pipeline: Pipeline, classifier: CrossEncoder) -> None:
        self._pipeline = pipeline
        self._classifier = classifier

    async def __call__(self, call: Call) -> Answer:
        """Classify what `call` gives.

        Raises:
            ApiError, scheduler.errors.SchedulerError: as CrossEncoder.classify.
        """
        request = decode(PredictRequest, call.body, call.media)
        texts, alone = self._texts(request.inputs)
        classified = await self._classifier.classify(
            ClassifyJob(
                texts=texts,
                name="inputs",
                truncate=bool(request.truncate),
                raw=bool(request.raw_scores),
                keep_end=read_direction(request.truncation_direction),
                deadline=call.deadline,
            )
        )
        rows = [self._predictions(row) for row in classified.scores]
        return answer(rows[0] if alone else rows, call.answer_media, figures(classified.work))

    def _texts(self, inputs: str | list[str | list[str]] | None) -> tuple[list[_Text], bool]:
        """The inputs, and whether it is one that was not in a list of inputs."""
        if inputs is None or isinstance(inputs, str):
            return [_text([inputs or ""], "inputs")], True
        check_items(inputs, self._pipeline.limits.max_items, "inputs")
        if isinstance(inputs[0], str) and len(inputs) <= 2:
            return [_text(inputs, "inputs")], True
        return [
            _text([item] if isinstance(item, str) else item, f"inputs[{i}]") for i, item in enumerate(inputs)
        ], False

    def _predictions(self, scores: Float64) -> list[Prediction]:
        labels = self._classifier.labels
        return [
            Prediction(label=labels[i], score=float(scores[i])) for i in np.argsort(-scores, kind="stable")
        ]


def _text(texts: list[str | list[str]] | list[str], place: str) -> _Text:
    first, second = (*texts, "-", "-")[:2]
    if not 1 <= len(texts) <= 2 or not isinstance(first, str) or not isinstance(second, str):
        raise invalid(f"{place} has {len(texts)} items; give one text or two", "inputs")
    if not (first and second):
        raise invalid(f"{place} is empty", "inputs")
    return (first,) if len(texts) == 1 else (first, second)

"""Text Embeddings Inference: vectors as bare lists, similarity, and what this engine has no head for.

Source: huggingface.co/docs/text-embeddings-inference, docs/openapi.json.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from gateway.cuts import read_direction
from gateway.dtypes import Dtype
from gateway.encoding import json_rows
from gateway.errors import ApiError, ErrorKind, shown
from gateway.exchange import Answer, Call
from gateway.inputs import InputValue, check_text, invalid, read_input
from gateway.media import Media
from gateway.pipeline import EmbedJob, Pipeline
from gateway.prompts import Prompts, with_prompt
from gateway.rendering import answer, block, figures
from gateway.schemas import decode
from gateway.scoring import ScoreJob, Scorer

EMBED_PATH, ROOT_PATH, SIMILARITY_PATH = "/embed", "/", "/similarity"


class SimilarityInputs(msgspec.Struct, kw_only=True):
    """One sentence, and those to compare with it."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct, kw_only=True):
    """How sentences that are too long are cut."""

    truncate: bool | None = None
    truncation_direction: str | None = None


class SimilarityRequest(msgspec.Struct, kw_only=True):
    """TEI's request for cosines."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


class EmbedRequest(msgspec.Struct, kw_only=True):
    """TEI's request for vectors. inputs: as EmbeddingRequest.input; further fields as there.

    normalize: True unless it says False, whatever the model's files say: TEI's rule.
    """

    inputs: InputValue | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    dimensions: int | None = None


class _Kind(msgspec.Struct):
    """Enough of a body to tell what it asks for."""

    inputs: msgspec.Raw = msgspec.Raw()


class Embed:
    """POST /embed: a list of vectors; in msgpack our block."""

    def __init__(self, pipeline: Pipeline, model: str) -> None:
        self._pipeline = pipeline
        self._model = model
        self._prompts = Prompts(pipeline.info)

    async def __call__(self, call: Call) -> Answer:
        """Embed what `call` asks for.

        Raises:
            ApiError, scheduler.errors.SchedulerError: as OpenAIEmbeddings.
        """
        request = decode(EmbedRequest, call.body, call.media)
        prompt = self._prompts.choose(request.prompt, request.prompt_name, None)
        job = EmbedJob(
            inputs=with_prompt(read_input(request.inputs, self._pipeline.limits, "inputs"), prompt),
            dimensions=self._pipeline.read_dimensions(request.dimensions),
            normalize=request.normalize is not False,
            truncate=bool(request.truncate),
            deadline=call.deadline,
            keep_end=read_direction(request.truncation_direction),
        )
        embedded = await self._pipeline.embed(job)
        if call.answer_media is Media.MSGPACK:
            return block(embedded, embedded.vectors, Dtype.FLOAT32, self._model, call.answer_media)
        return Answer(await json_rows(embedded.vectors), call.answer_media.value, figures(embedded))


class Similarity:
    """POST /similarity: a list of cosines."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    async def __call__(self, call: Call) -> Answer:
        """Compare what `call` asks for.

        Raises:
            ApiError, scheduler.errors.SchedulerError: as Scorer.score.
        """
        request = decode(SimilarityRequest, call.body, call.media)
        wishes = request.parameters or SimilarityParameters()
        check_text(request.inputs.source_sentence, "source_sentence")
        scored = await self._scorer.score(
            ScoreJob(
                queries=[request.inputs.source_sentence],
                documents=request.inputs.sentences,
                query_name="source_sentence",
                document_name="sentences",
                truncate=bool(wishes.truncate),
                keep_end=read_direction(wishes.truncation_direction),
                deadline=call.deadline,
            )
        )
        return answer(scored.scores.tolist(), call.answer_media, figures(scored.work))


class Root:
    """POST /: what the hub's client sends to a bare address; vectors, or cosines if it gives sentences."""

    def __init__(self, embed: Embed, similarity: Callable[[Call], Awaitable[Answer]]) -> None:
        """similarity: `Similarity`, or what refuses in its place."""
        self._embed = embed
        self._similarity = similarity

    async def __call__(self, call: Call) -> Answer:
        """Do what the shape of `inputs` says.

        Raises:
            ApiError, scheduler.errors.SchedulerError: as the two.
        """
        inputs = bytes(decode(_Kind, call.body, call.media).inputs)[:1]
        # The first byte of an object, or of a map of up to 15 entries.
        compares = inputs == b"{" if call.media is Media.JSON else 0x80 <= (*inputs, 0)[0] <= 0x8F
        return await (self._similarity if compares else self._embed)(call)


class UnsupportedRequest(msgspec.Struct, kw_only=True):
    """Any request for what is not there: `inputs` is looked at, so that a bad request is told as one."""

    inputs: Any = None


def unsupported(model: str, what: str) -> Callable[[Call], Awaitable[Answer]]:
    """A route that says that `model` does not give `what`."""

    async def refuse(call: Call) -> Answer:
        request = decode(UnsupportedRequest, call.body, call.media)
        if request.inputs is None:
            raise invalid("inputs is missing", "inputs")
        message = f"model {shown(model)} does not give {what}"
        raise ApiError(ErrorKind.NOT_SUPPORTED, message)

    return refuse

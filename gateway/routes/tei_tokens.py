"""Text Embeddings Inference: what the tokens of a text give, all their vectors or what their words weigh.

Source: huggingface.co/docs/text-embeddings-inference, docs/openapi.json.
"""

from __future__ import annotations

import asyncio

import msgspec

from gateway.cuts import read_direction
from gateway.encoding import json_rows
from gateway.exchange import Answer, Call
from gateway.inputs import InputValue, read_input
from gateway.media import Media
from gateway.outputs import token_block, words_of
from gateway.pipeline import Embedded, EmbedJob, Pipeline
from gateway.prompts import Prompts, with_prompt
from gateway.rendering import answer, figures, usage
from gateway.schemas import TokenEmbeddings, decode
from gateway.token_outputs import Words

ALL_PATH, SPARSE_PATH = "/embed_all", "/embed_sparse"


class EmbedTokensRequest(msgspec.Struct, kw_only=True):
    """TEI's request for vectors of tokens, or for sparse vectors. Fields as in EmbedRequest."""

    inputs: InputValue | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None
    prompt: str | None = None


class SparseValue(msgspec.Struct, kw_only=True):
    """One word of the vocabulary, and its weight."""

    index: int
    value: float


class _OfTokens:
    """What both routes do. output: as EngineInfo.outputs calls it."""

    def __init__(self, pipeline: Pipeline, output: str) -> None:
        self.pipeline = pipeline
        self._prompts = Prompts(pipeline.info)
        self._output = output

    async def embed(self, call: Call) -> Embedded:
        pipeline, request = self.pipeline, decode(EmbedTokensRequest, call.body, call.media)
        prompt = self._prompts.choose(request.prompt, request.prompt_name, None)
        job = EmbedJob(
            inputs=with_prompt(read_input(request.inputs, pipeline.limits, "inputs"), prompt),
            dimensions=pipeline.info.dimensions,
            normalize=False,
            truncate=bool(request.truncate),
            deadline=call.deadline,
            keep_end=read_direction(request.truncation_direction),
            outputs=(self._output,),
        )
        return await pipeline.embed(job)


class EmbedAll:
    """POST /embed_all: of each text a list of its tokens' vectors, unpooled; in msgpack one block."""

    def __init__(self, pipeline: Pipeline, model: str) -> None:
        self._tokens = _OfTokens(pipeline, "hidden")
        self._model = model

    async def __call__(self, call: Call) -> Answer:
        """Embed what `call` asks for.

        Raises:
            ApiError, scheduler.errors.SchedulerError: as OpenAIEmbeddings.
        """
        embedded = await self._tokens.embed(call)
        if embedded.tokens is None:
            raise RuntimeError("the pipeline gave no tokens")
        rows = embedded.tokens.hidden()
        if call.answer_media is Media.MSGPACK:
            block = TokenEmbeddings(model=self._model, tokens=token_block(rows), usage=usage(embedded))
            return answer(block, call.answer_media, figures(embedded))
        texts: list[bytes] = []
        for text in rows.texts:
            texts.append(await json_rows(text))
            await asyncio.sleep(0)
        return Answer(b"[" + b",".join(texts) + b"]", call.answer_media.value, figures(embedded))


class EmbedSparse:
    """POST /embed_sparse: of each text the words that have a weight, by their ids."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._tokens = _OfTokens(pipeline, "sparse")

    async def __call__(self, call: Call) -> Answer:
        """Embed what `call` asks for.

        Raises:
            ApiError, scheduler.errors.SchedulerError: as OpenAIEmbeddings.
        """
        embedded = await self._tokens.embed(call)
        words = await words_of(embedded, self._tokens.pipeline.info)
        rows = [_listed(text) for text in words]
        return answer(rows, call.answer_media, figures(embedded))


def _listed(words: Words) -> list[SparseValue]:
    return [
        SparseValue(index=index, value=value)
        for index, value in zip(words.indices.tolist(), words.values.tolist(), strict=True)
    ]

"""Cohere's embeddings: one list for each number type that is asked for.

Source: docs.cohere.com/reference/embed (v2) and embed-v1; cohere 7.3, client.py.
"""

from __future__ import annotations

import binascii

import msgspec

from gateway.cuts import read_direction
from gateway.dtypes import Dtype, cast, read_dtype
from gateway.encoding import json_rows
from gateway.errors import ApiError, ErrorKind, shown
from gateway.exchange import Answer, Call
from gateway.inputs import Texts, check_items, invalid
from gateway.media import Media
from gateway.names import ServedNames
from gateway.pipeline import Embedded, EmbedJob, Pipeline
from gateway.prompts import Prompts, with_prompt
from gateway.rendering import answer, figures
from gateway.routes.identity import ApiVersion, BilledUnits, Meta, new_id
from gateway.schemas import decode

V1_PATH, V2_PATH = "/v1/embed", "/v2/embed"
_TYPES = ("float", "int8", "uint8", "binary", "ubinary", "base64")
_TRUNCATIONS = ("NONE", "START", "END")


class CohereContent(msgspec.Struct, kw_only=True):
    """A part of an input; `text` is there if its type is "text"."""

    type: str
    text: str | None = None


class CohereInput(msgspec.Struct, kw_only=True):
    """One input, of a single text here."""

    content: list[CohereContent]


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """Cohere's request. truncate: "END" (the default), "START" or "NONE", which refuses what is too long.

    embedding_types: any of float, int8, uint8, binary, ubinary, base64 (of float32).
    inputs: the texts in v2's other form. images: refused.
    max_tokens: cut texts to so many, template included, if that is less than the model takes.
    """

    texts: list[str] | None = None
    images: list[str] | None = None
    inputs: list[CohereInput] | None = None
    model: str | None = None
    input_type: str | None = None
    embedding_types: list[str] | None = None
    truncate: str | None = None
    output_dimension: int | None = None
    max_tokens: int | None = None
    normalize: bool | None = None


class CohereEmbedResponse(msgspec.Struct, kw_only=True):
    """embeddings: by type, each a list of vectors; in v1, if no types were asked for, the list of floats."""

    id: str
    embeddings: dict[str, msgspec.Raw] | msgspec.Raw
    texts: list[str]
    meta: Meta
    response_type: str


class CohereEmbed:
    """POST /v2/embed, and /v1/embed with version "1"."""

    def __init__(self, pipeline: Pipeline, names: ServedNames, version: str) -> None:
        self._pipeline = pipeline
        self._names = names
        self._prompts = Prompts(pipeline.info)
        self._version = version

    async def __call__(self, call: Call) -> Answer:
        """Embed what `call` asks for.

        Raises:
            ApiError, scheduler.errors.SchedulerError: as OpenAIEmbeddings.
        """
        request = decode(CohereEmbedRequest, call.body, call.media)
        self._names.read(request.model)
        texts = self._texts(request)
        job = self._job(request, texts, call)
        types = dict.fromkeys(request.embedding_types or ["float"])  # each is encoded once
        dtypes = {name: _dtype(name, job.dimensions) for name in types}
        embedded = await self._pipeline.embed(job)
        by_type = {name: await _list(embedded, dtypes[name], name, call.answer_media) for name in types}
        bare = self._version == "1" and request.embedding_types is None
        response = CohereEmbedResponse(
            id=new_id("embed"),
            embeddings=by_type["float"] if bare else by_type,
            texts=texts,
            meta=Meta(
                api_version=ApiVersion(version=self._version),
                billed_units=BilledUnits(input_tokens=embedded.num_tokens),
            ),
            response_type="embeddings_floats" if bare else "embeddings_by_type",
        )
        return answer(response, call.answer_media, figures(embedded))

    def _texts(self, request: CohereEmbedRequest) -> list[str]:
        if request.images:
            raise _text_only("images")
        if request.inputs is not None and request.texts is not None:
            raise invalid("texts and inputs are both given; send one of them", "inputs")
        name = "texts" if request.inputs is None else "inputs"
        texts = request.texts if request.inputs is None else [_text(one) for one in request.inputs]
        if texts is None:
            raise invalid("texts is missing", "texts")
        check_items(texts, self._pipeline.limits.max_items, name)
        return texts

    def _job(self, request: CohereEmbedRequest, texts: list[str], call: Call) -> EmbedJob:
        truncate, normalize = request.truncate or "END", request.normalize
        if truncate not in _TRUNCATIONS:
            raise invalid(f"truncate is {shown(truncate)}; give NONE, START or END", "truncate")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise invalid(f"max_tokens is {request.max_tokens}; give at least 1", "max_tokens")
        prompt = self._prompts.choose(None, None, request.input_type)
        return EmbedJob(
            inputs=with_prompt(Texts(texts, "texts" if request.inputs is None else "inputs"), prompt),
            dimensions=self._pipeline.read_dimensions(request.output_dimension, "output_dimension"),
            normalize=self._pipeline.info.normalize if normalize is None else normalize,
            truncate=truncate != "NONE",
            deadline=call.deadline,
            max_tokens=request.max_tokens,
            keep_end=truncate != "NONE" and read_direction(truncate),
            cutting='"truncate": "END" or "START"',
        )


def _text(one: CohereInput) -> str:
    if len(one.content) != 1 or one.content[0].text is None:
        raise _text_only("inputs")
    return one.content[0].text


def _text_only(name: str) -> ApiError:
    message = f"this server embeds text, one an input; what {name} asks for it cannot"
    return ApiError(ErrorKind.NOT_SUPPORTED, message, param=name)


def _dtype(name: str, dimensions: int) -> Dtype:
    if name not in _TYPES:
        message = f"embedding_types has {shown(name)}; this route knows {', '.join(_TYPES)}"
        raise invalid(message, "embedding_types")
    return Dtype.FLOAT32 if name == "base64" else read_dtype(name, dimensions, "embedding_types")


async def _list(embedded: Embedded, dtype: Dtype, name: str, media: Media) -> msgspec.Raw:
    """The encoded list of vectors of one type."""
    values = cast(embedded.vectors, embedded.int8, dtype)
    if name == "base64":
        rows = [binascii.b2a_base64(row.data, newline=False).decode() for row in values]
        return msgspec.Raw(msgspec.json.encode(rows) if media is Media.JSON else msgspec.msgpack.encode(rows))
    if media is Media.JSON:
        return msgspec.Raw(await json_rows(values))
    return msgspec.Raw(msgspec.msgpack.encode(values.tolist()))

"""OpenAI's embeddings route, with what vLLM, Voyage and Infinity add. A thin dialect over the pipeline."""

from __future__ import annotations

from typing import TypeVar

from gateway.cuts import read_direction, read_prompt_tokens
from gateway.dtypes import Dtype, cast, read_dtype, widen
from gateway.encoding import Encoding, items
from gateway.errors import ApiError, ErrorKind, ErrorShape, shown, speaking
from gateway.exchange import Answer, Call
from gateway.inputs import Inputs, invalid, read_id_blocks, read_input
from gateway.media import Media
from gateway.names import ServedNames
from gateway.outputs import Rendering, read_outputs
from gateway.pipeline import DENSE, Embedded, EmbedJob, Pipeline
from gateway.prompts import Prompts, with_prompt
from gateway.rendering import answer, block, figures, usage
from gateway.routes.perplexity import PerplexityEmbeddings
from gateway.schemas import EmbeddingBlock, EmbeddingRequest, EmbeddingResponse, decode

T = TypeVar("T")

PATHS = ("/v1/embeddings", "/embeddings")
# vLLM's name for octets without its header, which does no harm.
_ENCODINGS = {encoding.value: encoding for encoding in Encoding} | {"bytes_only": Encoding.BYTES}
_DEFAULT_ENCODING = {Media.JSON: Encoding.FLOAT, Media.MSGPACK: Encoding.BYTES}


class OpenAIEmbeddings:
    """POST /v1/embeddings. perplexity: answers what is in its dialect."""

    def __init__(self, pipeline: Pipeline, names: ServedNames, perplexity: PerplexityEmbeddings) -> None:
        self._pipeline = pipeline
        self._names = names
        self._prompts = Prompts(pipeline.info)
        self._perplexity = perplexity

    async def __call__(self, call: Call) -> Answer:
        """Embed what `call` asks for.

        Raises:
            ApiError: the request is refused, or its vectors are not finite.
            scheduler.errors.SchedulerError: see scheduler/errors.py.
        """
        request = decode(EmbeddingRequest, call.body, call.media)
        if self._perplexity.speaks(request.encoding_format):
            with speaking(ErrorShape.PERPLEXITY):
                model = self._names.read(request.model)
                return await self._perplexity(request, self._job(request, call), model, call)
        if request.encoding_format not in _ENCODINGS:
            return await self._embed(request, call)
        with speaking(ErrorShape.OPENAI):  # whatever --api-dialect makes the path's own
            return await self._embed(request, call)

    async def _embed(self, request: EmbeddingRequest, call: Call) -> Answer:
        model = self._names.read(request.model)
        encoding = _encoding(request.encoding_format, call.answer_media)
        job = self._job(request, call)
        dtype = self._dtype(request, job)
        if job.outputs == DENSE:
            embedded = await self._pipeline.embed(job)
            return await _render(embedded, model, (encoding, dtype), call.answer_media)
        if encoding is Encoding.BYTES and call.answer_media is Media.JSON:
            message = "encoding_format bytes holds dense vectors alone; ask for msgpack, float or base64"
            raise invalid(message, "encoding_format")
        embedded = await self._pipeline.embed(job)
        rendering = await Rendering.of(embedded, job.outputs, dtype, self._pipeline.info)
        return await _render_all(embedded, rendering, model, encoding, call.answer_media)

    def _job(self, request: EmbeddingRequest, call: Call) -> EmbedJob:
        normalize, cut_to = request.normalize, read_prompt_tokens(request.truncate_prompt_tokens)
        return EmbedJob(
            inputs=self._inputs(request),
            dimensions=self._pipeline.read_dimensions(_dimensions(request), request.dimensions_name),
            normalize=self._pipeline.info.normalize if normalize is None else normalize,
            truncate=bool(request.truncate or request.truncation or request.truncate_prompt_tokens),
            deadline=call.deadline,
            max_tokens=cut_to,
            keep_end=read_direction(request.truncation_direction),
            special_tokens=request.add_special_tokens is not False,
            outputs=read_outputs(request.outputs),
        )

    def _inputs(self, request: EmbeddingRequest) -> Inputs:
        limits = self._pipeline.limits
        prompt = self._prompts.choose(request.prompt, request.prompt_name, request.input_type)
        if request.input_ids is None:
            if request.lengths is not None:
                raise invalid("lengths is given without input_ids", "lengths")
            return with_prompt(read_input(request.input, limits), prompt)
        if request.input is not None:
            raise invalid("input and input_ids are both given; send one of them")
        return read_id_blocks(request.input_ids, request.lengths, limits)

    def _dtype(self, request: EmbeddingRequest, job: EmbedJob) -> Dtype:
        dtype = _dtype(request, job.dimensions)
        if "multi_vector" in job.outputs:
            _dtype(request, self._pipeline.info.token_outputs.get("multi_vector", 8))
        return dtype


def _dimensions(request: EmbeddingRequest) -> int | None:
    """Infinity's client says 0 for all, and names the modality; from others 0 is refused."""
    if request.modality is None:
        return _one((request.dimensions, request.output_dimension), ("dimensions", "output_dimension"))
    if request.modality != "text":
        message = f"modality is {shown(request.modality)}; this server embeds text"
        raise ApiError(ErrorKind.NOT_SUPPORTED, message, param="modality")
    return request.dimensions or None


def _one(values: tuple[T | None, T | None], names: tuple[str, str]) -> T | None:
    """What a field with two names holds; refused if it holds one thing under each."""
    first, second = values
    if first is None or second is None or first == second:
        return second if first is None else first
    message = f"{names[0]} is {first} and {names[1]} is {second}; they mean the same, so send one of them"
    raise invalid(message, names[1])


def _encoding(name: str | None, media: Media) -> Encoding:
    if name is None:
        return _DEFAULT_ENCODING[media]
    encoding = _ENCODINGS.get(name)
    if encoding is None:
        known = "float, base64, bytes, base64_int8 and base64_binary"
        raise invalid(f"encoding_format is {shown(name)}; this route knows {known}", "encoding_format")
    return encoding


def _dtype(request: EmbeddingRequest, dimensions: int) -> Dtype:
    if request.endianness not in (None, "little", "native"):
        raise invalid(f"endianness is {shown(request.endianness)}; this server writes little", "endianness")
    name = _one((request.embed_dtype, request.output_dtype), ("embed_dtype", "output_dtype"))
    if name is None:
        return Dtype.FLOAT32
    return read_dtype(name, dimensions, "output_dtype" if request.embed_dtype is None else "embed_dtype")


async def _render(embedded: Embedded, model: str, form: tuple[Encoding, Dtype], media: Media) -> Answer:
    encoding, dtype = form
    values = cast(embedded.vectors, embedded.int8, dtype)
    if encoding is Encoding.BYTES:
        return block(embedded, values, dtype, model, media)
    if encoding is Encoding.FLOAT:
        values = widen(values, dtype)
    data = await items(values, encoding, media)
    response = EmbeddingResponse(data=data, model=model, usage=usage(embedded))
    return answer(response, media, figures(embedded))


async def _render_all(
    embedded: Embedded, rendering: Rendering, model: str, encoding: Encoding, media: Media
) -> Answer:
    """What `rendering` holds, as items or, in msgpack, as blocks."""
    if encoding is not Encoding.BYTES:
        data = await rendering.items(encoding, media)
        response = EmbeddingResponse(data=data, model=model, usage=usage(embedded))
        return answer(response, media, figures(embedded))
    blocks = EmbeddingBlock(
        model=model,
        dtype=rendering.dtype.value,
        sparse=rendering.sparse_block(),
        multi_vector=rendering.token_block(),
        usage=usage(embedded),
    )
    if rendering.dense is not None:
        blocks.shape = (rendering.dense.shape[0], rendering.dense.shape[1])
        blocks.embeddings = rendering.dense.data
    return answer(blocks, media, figures(embedded))

"""OpenAI's embeddings route, with the binary answer as an extra. One thin dialect over the pipeline."""

from __future__ import annotations

import msgspec

from gateway.encoding import Encoding, items
from gateway.errors import ApiError, ErrorKind, shown
from gateway.exchange import Answer, Call
from gateway.inputs import Inputs, invalid, read_id_blocks, read_input
from gateway.media import Media
from gateway.pipeline import Embedded, EmbedJob, Pipeline
from gateway.schemas import EmbeddingBlock, EmbeddingRequest, EmbeddingResponse, Usage, decode, encode

PATHS = ("/v1/embeddings", "/embeddings")
_DEFAULT_ENCODING = {Media.JSON: Encoding.FLOAT, Media.MSGPACK: Encoding.BYTES}


class OpenAIEmbeddings:
    """POST /v1/embeddings. model_names: the names it answers to, the default first."""

    def __init__(self, pipeline: Pipeline, model_names: tuple[str, ...]) -> None:
        self._pipeline = pipeline
        self._model_names = model_names

    async def __call__(self, call: Call) -> Answer:
        """Embed what `call` asks for.

        Raises:
            ApiError: the request is refused, or its vectors are not finite.
            scheduler.errors.SchedulerError: see scheduler/errors.py.
        """
        request = decode(EmbeddingRequest, call.body, call.media)
        model = self._model(request.model)
        encoding = _encoding(request.encoding_format, call.answer_media)
        normalize = request.normalize
        job = EmbedJob(
            inputs=self._inputs(request),
            dimensions=self._pipeline.read_dimensions(request.dimensions),
            normalize=self._pipeline.info.normalize if normalize is None else normalize,
            truncate=bool(request.truncate),
            deadline=call.deadline,
        )
        embedded = await self._pipeline.embed(job)
        return await _render(embedded, model, encoding, call.answer_media)

    def _model(self, name: str | None) -> str:
        """The served name that the request means. Others are refused: nobody shall mix models' vectors."""
        if name is None:
            return self._model_names[0]
        if name not in self._model_names:
            known = ", ".join(self._model_names)
            message = f"model {shown(name)} is not served here; this server has {known}"
            raise ApiError(ErrorKind.MODEL_NOT_FOUND, message, param="model")
        return name

    def _inputs(self, request: EmbeddingRequest) -> Inputs:
        if request.input_ids is None:
            return read_input(request.input, self._pipeline.limits)
        if request.input is not None:
            raise invalid("input and input_ids are both given; send one of them")
        return read_id_blocks(request.input_ids, request.lengths, self._pipeline.limits)


def _encoding(name: str | None, media: Media) -> Encoding:
    if name is None:
        return _DEFAULT_ENCODING[media]
    try:
        return Encoding(name)
    except ValueError:
        raise invalid(
            f"encoding_format is {shown(name)}; this route knows float, base64 and bytes", "encoding_format"
        ) from None


async def _render(embedded: Embedded, model: str, encoding: Encoding, media: Media) -> Answer:
    vectors, usage = embedded.vectors, Usage(embedded.num_tokens, embedded.num_tokens)
    times = (
        ("x-queue-time", f"{embedded.queue_ms:.3f}"),
        ("x-tokenization-time", f"{embedded.tokenization_ms:.3f}"),
        ("x-inference-time", f"{embedded.inference_ms:.3f}"),
    )
    if encoding is not Encoding.BYTES:
        data = await items(vectors, encoding, media)
        return _answer(EmbeddingResponse(data=data, model=model, usage=usage), media, times)
    shape = (vectors.shape[0], vectors.shape[1])
    if media is Media.MSGPACK:
        block = vectors.data
        return _answer(EmbeddingBlock(model=model, shape=shape, embeddings=block, usage=usage), media, times)
    layout = (
        ("x-embedding-dtype", "float32"),
        ("x-embedding-shape", f"{shape[0]},{shape[1]}"),
        ("x-prompt-tokens", str(embedded.num_tokens)),
    )
    return Answer(vectors.tobytes(), "application/octet-stream", times + layout)


def _answer(value: msgspec.Struct, media: Media, headers: tuple[tuple[str, str], ...]) -> Answer:
    return Answer(encode(value, media), media.value, headers)

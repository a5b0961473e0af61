"""Perplexity's embeddings: int8 and bits in base64, never normalised, its own limits and error shape.

Source: docs.perplexity.ai, embeddings; perplexity-py 0.46, types/embedding_create_params.py.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import msgspec

from gateway.dtypes import Dtype, cast, check_packing
from gateway.encoding import Encoding, items
from gateway.errors import shown
from gateway.exchange import Answer, Call
from gateway.inputs import Texts, check_count, invalid
from gateway.late_chunking import DocumentJob, LateChunker
from gateway.names import ServedNames
from gateway.options import GatewayOptions
from gateway.pipeline import DENSE, EmbedJob, Pipeline
from gateway.rendering import answer, figures
from gateway.schemas import EmbeddingRequest, decode

CONTEXT_PATH = "/v1/contextualizedembeddings"
_DTYPES = {"base64_int8": Dtype.INT8, "base64_binary": Dtype.UBINARY_LITTLE}
_DEFAULT_FORMAT = "base64_int8"
_MAX_DOCUMENTS, _MAX_CHUNKS = 512, 16_000


class PerplexityCost(msgspec.Struct, kw_only=True):
    """What a request costs: nothing, here."""

    input_cost: float = 0.0
    total_cost: float = 0.0
    currency: str = "USD"


class PerplexityUsage(msgspec.Struct, kw_only=True):
    """Tokens really processed, and their price."""

    prompt_tokens: int
    total_tokens: int
    cost: PerplexityCost = msgspec.field(default_factory=PerplexityCost)


class PerplexityResponse(msgspec.Struct, kw_only=True):
    """Perplexity's embeddings answer; `data` holds encoded EmbeddingItems."""

    object: str = "list"
    data: list[msgspec.Raw]
    model: str
    usage: PerplexityUsage


class PerplexityDocument(msgspec.Struct, kw_only=True):
    """One document's chunks, as encoded EmbeddingItems."""

    object: str = "list"
    index: int
    data: list[msgspec.Raw]


class ContextualizedResponse(msgspec.Struct, kw_only=True):
    """Vectors of chunks by document."""

    object: str = "list"
    data: list[PerplexityDocument]
    model: str
    usage: PerplexityUsage


class ContextualizedRequest(msgspec.Struct, kw_only=True):
    """Chunks of documents, in the order of the text. Fields as in EmbeddingRequest."""

    input: list[list[str]]
    model: str | None = None
    dimensions: int | None = None
    encoding_format: str | None = None


class PerplexityEmbeddings:
    """Answers /v1/embeddings for requests in this dialect.

    default: whether a request that names no encoding_format is in it (`--api-dialect perplexity`).
    """

    def __init__(self, pipeline: Pipeline, options: GatewayOptions) -> None:
        self._pipeline = pipeline
        self._default = options.api_dialect == "perplexity"
        self._max_items = options.perplexity_max_items
        self._max_tokens = options.perplexity_max_request_tokens

    def speaks(self, encoding_format: str | None) -> bool:
        """Whether a request with this encoding_format is in this dialect."""
        return self._default if encoding_format is None else encoding_format in _DTYPES

    async def __call__(self, request: EmbeddingRequest, job: EmbedJob, model: str, call: Call) -> Answer:
        """Embed as `job` says, within this dialect's own rules. model: the name to answer with.

        Raises:
            ApiError: the request is refused, or its vectors are not finite.
            scheduler.errors.SchedulerError: see scheduler/errors.py.
        """
        if job.outputs != DENSE:
            raise invalid("outputs are dense vectors alone in this encoding_format", "outputs")
        dtype = _dtype(request.encoding_format, job.dimensions, request.dimensions_name)
        inputs = job.inputs.texts if isinstance(job.inputs, Texts) else job.inputs.sequences
        check_count(len(inputs), self._max_items, job.inputs.name)
        job = msgspec.structs.replace(job, normalize=False, max_request_tokens=self._max_tokens)
        embedded = await self._pipeline.embed(job)
        values = cast(embedded.vectors, embedded.int8, dtype)
        data = await items(values, Encoding.BASE64, call.answer_media)
        usage = PerplexityUsage(prompt_tokens=embedded.num_tokens, total_tokens=embedded.num_tokens)
        response = PerplexityResponse(data=data, model=model, usage=usage)
        return answer(response, call.answer_media, figures(embedded))


class ContextualizedEmbeddings:
    """POST /v1/contextualizedembeddings: a vector a chunk, each within its document."""

    def __init__(self, pipeline: Pipeline, names: ServedNames, options: GatewayOptions) -> None:
        self._pipeline = pipeline
        self._names = names
        self._chunker = LateChunker(pipeline)
        self._max_tokens = options.perplexity_max_request_tokens

    async def __call__(self, call: Call) -> Answer:
        """Embed what `call` asks for.

        Raises:
            ApiError, scheduler.errors.SchedulerError: as LateChunker.embed.
        """
        request = decode(ContextualizedRequest, call.body, call.media)
        model = self._names.read(request.model)
        dimensions = self._pipeline.read_dimensions(request.dimensions)
        dtype = _dtype(request.encoding_format, dimensions)
        _check_documents(request.input)
        job = DocumentJob(
            documents=request.input,
            name="input",
            dimensions=dimensions,
            normalize=False,
            deadline=call.deadline,
            max_request_tokens=self._max_tokens,
        )
        embedded = await self._chunker.embed(job)
        counts = [len(chunks) for chunks in request.input]
        values = cast(embedded.vectors, embedded.int8, dtype)
        indices = [index for count in counts for index in range(count)]
        chunks = await items(values, Encoding.BASE64, call.answer_media, indices)
        data = [
            PerplexityDocument(index=index, data=chunks[start:end])
            for index, (start, end) in enumerate(pairwise(accumulate(counts, initial=0)))
        ]
        usage = PerplexityUsage(prompt_tokens=embedded.num_tokens, total_tokens=embedded.num_tokens)
        response = ContextualizedResponse(data=data, model=model, usage=usage)
        return answer(response, call.answer_media, figures(embedded))


def _dtype(encoding_format: str | None, dimensions: int, param: str = "dimensions") -> Dtype:
    """What a format holds. param: the field that says how many dimensions."""
    name = _DEFAULT_FORMAT if encoding_format is None else encoding_format
    if name not in _DTYPES:
        message = f"encoding_format is {shown(name)}; this route knows {' and '.join(_DTYPES)}"
        raise invalid(message, "encoding_format")
    dtype = _DTYPES[name]
    check_packing(dtype, name, dimensions, param)
    return dtype


def _check_documents(documents: list[list[str]]) -> None:
    if not documents:
        raise invalid("input is an empty list; give documents, each a list of chunks")
    check_count(len(documents), _MAX_DOCUMENTS)
    for index, chunks in enumerate(documents):
        if not chunks:
            raise invalid(f"input[{index}] is empty")
        if not all(chunks):
            chunk = next(i for i, text in enumerate(chunks) if not text)
            raise invalid(f"input[{index}][{chunk}] is empty")
    count = sum(map(len, documents))
    if count > _MAX_CHUNKS:
        raise invalid(f"input has {count} chunks in all; this server takes at most {_MAX_CHUNKS} a request")

"""Vectors and figures as answers: what all dialects write in the same way."""

from __future__ import annotations

from gateway.dtypes import Array, Dtype
from gateway.exchange import Answer
from gateway.media import Media
from gateway.pipeline import Embedded
from gateway.schemas import EmbeddingBlock, Encodable, Usage, encode

_MAX_PLACES = 48
Headers = tuple[tuple[str, str], ...]


def figures(embedded: Embedded) -> Headers:
    """What the work took, as headers; times in milliseconds."""
    return (
        ("x-queue-time", f"{embedded.queue_ms:.3f}"),
        ("x-tokenization-time", f"{embedded.tokenization_ms:.3f}"),
        ("x-inference-time", f"{embedded.inference_ms:.3f}"),
        ("x-compute-tokens", str(embedded.num_tokens)),
    )


def usage(embedded: Embedded) -> Usage:
    """Tokens as OpenAI counts them."""
    return Usage(embedded.num_tokens, embedded.num_tokens)


def answer(value: Encodable, media: Media, headers: Headers) -> Answer:
    """`value` in the codec that was asked for."""
    return Answer(encode(value, media), media.value, headers)


def block(embedded: Embedded, values: Array, dtype: Dtype, model: str, media: Media) -> Answer:
    """All vectors, values [n, w], as one block: inside a msgpack answer, or alone as octets with headers."""
    shape = (values.shape[0], values.shape[1])
    if media is Media.MSGPACK:
        body = EmbeddingBlock(
            model=model, dtype=dtype.value, shape=shape, embeddings=values.data, usage=usage(embedded)
        )
        return answer(body, media, figures(embedded))
    layout = (
        ("x-embedding-dtype", dtype.value),
        ("x-embedding-shape", f"{shape[0]},{shape[1]}"),
        ("x-prompt-tokens", str(embedded.num_tokens)),
        ("metadata", _vllm_metadata(embedded, values, dtype, model)),
    )
    return Answer(values.tobytes(), "application/octet-stream", figures(embedded) + layout)


def _vllm_metadata(embedded: Embedded, values: Array, dtype: Dtype, model: str) -> str:
    """The header by which vLLM's clients find vectors in octets. Source: vLLM 0.22, utils/serial_utils.py.

    Places are told of up to 48 vectors: clients take headers of 8 KB at most, and an entry has 110 bytes.
    """
    metadata: dict[str, object] = {"model": model, "usage": usage(embedded)}
    if len(values) <= _MAX_PLACES:
        size = values.nbytes // len(values)
        metadata["data"] = [
            {
                "index": index,
                "embed_dtype": dtype.value,
                "endianness": "little",
                "start": index * size,
                "end": (index + 1) * size,
                "shape": [values.shape[1]],
            }
            for index in range(len(values))
        ]
    return encode(metadata, Media.JSON).decode()

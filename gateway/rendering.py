"""Vectors and figures as answers: what all dialects write in the same way."""

from __future__ import annotations

from gateway.dtypes import Array, Dtype
from gateway.exchange import Answer
from gateway.media import Media
from gateway.pipeline import Embedded
from gateway.schemas import EmbeddingBlock, Encodable, Usage, encode

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
    )
    return Answer(values.tobytes(), "application/octet-stream", figures(embedded) + layout)

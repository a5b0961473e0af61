"""The wire formats: how inputs become a request, and a response becomes vectors."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.http1 import Response
from loadgen.plan import LoadgenError
from loadgen.workload import Inputs

Vectors = npt.NDArray[np.float32]
JSON = "application/json"
MSGPACK = "application/msgpack"


@dataclass(frozen=True)
class Answer:
    """vectors: f32[n, dim]. prompt_tokens: what the server says it processed, None if it does not say."""

    vectors: Vectors
    prompt_tokens: int | None


@dataclass(frozen=True)
class Api:
    """One wire format. encode: inputs and a model's name to a body. decode: a response of status 200."""

    name: str
    path: str
    content_type: str
    encode: Callable[[Inputs, str | None], bytes]
    decode: Callable[[Response], Answer]


def _bouquet_body(inputs: Inputs, model: str | None) -> bytes:
    body: dict[str, Any] = {"model": model} if model else {}
    if inputs.texts:
        body["input"] = inputs.texts
    else:
        lengths = np.array([len(ids) for ids in inputs.ids], "<i4")
        body["input_ids"] = np.concatenate(inputs.ids).astype("<i4", copy=False).tobytes()
        body["lengths"] = lengths.tobytes()
    return msgspec.msgpack.encode(body)


def _bouquet_answer(response: Response) -> Answer:
    answer = msgspec.msgpack.decode(response.body)
    vectors = np.frombuffer(answer["embeddings"], "<f4").reshape(answer["shape"])
    return Answer(vectors, answer["usage"]["prompt_tokens"])


def _openai_body(inputs: Inputs, model: str | None) -> bytes:
    texts = inputs.texts or [ids.tolist() for ids in inputs.ids]
    body: dict[str, Any] = {"input": texts, "encoding_format": "base64"}
    return msgspec.json.encode(body | ({"model": model} if model else {}))


def _openai_answer(response: Response) -> Answer:
    answer = msgspec.json.decode(response.body)
    rows = sorted(answer["data"], key=lambda item: item["index"])
    return Answer(
        np.stack([_row(item["embedding"]) for item in rows]), answer.get("usage", {}).get("prompt_tokens")
    )


def _row(embedding: str | list[float]) -> Vectors:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), "<f4")
    return np.array(embedding, np.float32)


def _tei_body(inputs: Inputs, _model: str | None) -> bytes:
    return msgspec.json.encode({"inputs": inputs.texts or [ids.tolist() for ids in inputs.ids]})


def _tei_answer(response: Response) -> Answer:
    tokens = response.header("x-compute-tokens")
    return Answer(np.array(msgspec.json.decode(response.body), np.float32), int(tokens) if tokens else None)


_APIS = (
    Api("bouquet-msgpack", "/v1/embeddings", MSGPACK, _bouquet_body, _bouquet_answer),
    Api("openai", "/v1/embeddings", JSON, _openai_body, _openai_answer),
    # vLLM's is OpenAI's, and its base64 is what costs both sides least; it insists on the model's name.
    Api("vllm", "/v1/embeddings", JSON, _openai_body, _openai_answer),
    Api("tei", "/embed", JSON, _tei_body, _tei_answer),
)
APIS = {api.name: api for api in _APIS}


def decode_checked(api: Api, response: Response, rows: int) -> Answer:
    """The answer of a response of status 200.

    Raises:
        LoadgenError: it is not what `api` promises: unreadable, `rows` missing, or not finite.
    """
    try:
        answer = api.decode(response)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise LoadgenError(f"the answer is not {api.name}'s: {type(error).__name__}: {error}") from error
    if answer.vectors.ndim != 2 or len(answer.vectors) != rows:
        raise LoadgenError(f"{rows} inputs got vectors of shape {answer.vectors.shape}")
    if not np.isfinite(answer.vectors).all():
        raise LoadgenError("a vector holds a NaN or an infinity")
    return answer

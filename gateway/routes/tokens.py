"""TEI's /tokenize and /decode: what the tokenizer makes of texts, and back."""

from __future__ import annotations

import msgspec

from gateway.errors import ApiError, ErrorKind
from gateway.exchange import Answer, Call
from gateway.inputs import Int64, Texts, check_items, invalid, read_input
from gateway.pipeline import Pipeline
from gateway.prompts import Prompts
from gateway.rendering import answer
from gateway.schemas import decode
from gateway.tokenization.base import Token as Token

TOKENIZE_PATH, DECODE_PATH = "/tokenize", "/decode"


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """add_special_tokens: with the tokenizer's template, the default. prompt_name: what goes before texts."""

    inputs: str | list[str] | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None


class DecodeRequest(msgspec.Struct, kw_only=True):
    """ids: of one text or of several. skip_special_tokens: leave them out, which is the default."""

    ids: list[str | Int64 | list[Int64]] | None = None
    skip_special_tokens: bool | None = None


class Tokenize:
    """POST /tokenize: for each text a list of its tokens."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._prompts = Prompts(pipeline.info)

    async def __call__(self, call: Call) -> Answer:
        """Tokenise.

        Raises:
            ApiError: the request is refused, or the server has no tokenizer.
        """
        request = decode(TokenizeRequest, call.body, call.media)
        texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
        if texts is None:
            raise invalid("inputs is missing", "inputs")
        check_items(texts, self._pipeline.limits.max_items, "inputs")
        prompt = "" if request.prompt_name is None else self._prompts.choose(None, request.prompt_name, None)
        rows = await self._pipeline.tokenizer.tokens(
            [prompt + text for text in texts],
            special_tokens=request.add_special_tokens is not False,
            check_count=lambda count: _check_total(count, self._pipeline.limits.max_request_tokens),
        )
        return answer(rows, call.answer_media, ())


class Decode:
    """POST /decode: the text of each list of ids."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def __call__(self, call: Call) -> Answer:
        """Write ids as text.

        Raises:
            ApiError: the request is refused, or the server has no tokenizer.
        """
        request = decode(DecodeRequest, call.body, call.media)
        inputs = read_input(request.ids, self._pipeline.limits, "ids")
        if isinstance(inputs, Texts):
            raise invalid("ids are texts; give token ids, or lists of token ids", "ids")
        rows = [ids.tolist() for ids in inputs.sequences]
        _check_total(sum(map(len, rows)), self._pipeline.limits.max_request_tokens)
        skip = request.skip_special_tokens is not False
        texts = await self._pipeline.tokenizer.decode(rows, skip_special_tokens=skip)
        return answer(texts, call.answer_media, ())


def _check_total(count: int, most: int) -> None:
    if count > most:
        message = f"there are {count} tokens in all; this server takes at most {most} a request"
        raise ApiError(ErrorKind.INPUT_TOO_LONG, message)

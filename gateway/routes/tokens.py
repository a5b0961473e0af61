"""TEI's /tokenize and /decode: what the tokenizer makes of texts, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import TypeVar

import msgspec

from gateway.deadline import Deadline
from gateway.errors import ApiError, ErrorKind
from gateway.exchange import Answer, Call
from gateway.inputs import Int64, Texts, check_items, invalid, read_input
from gateway.pipeline import Pipeline
from gateway.prompts import Prompts
from gateway.rendering import answer
from gateway.schemas import decode
from gateway.token_lists import written
from gateway.tokenization.base import Token as Token

T = TypeVar("T")
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
            ApiError: the request is refused, its deadline passes, or the server has no tokenizer.
        """
        request = decode(TokenizeRequest, call.body, call.media)
        texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
        if texts is None:
            raise invalid("inputs is missing", "inputs")
        check_items(texts, self._pipeline.limits.max_items, "inputs")
        prompt = "" if request.prompt_name is None else self._prompts.choose(None, request.prompt_name, None)
        work = self._pipeline.tokenizer.tokens(
            [prompt + text for text in texts],
            special_tokens=request.add_special_tokens is not False,
            check_count=lambda count: _check_total(count, self._pipeline.limits.max_request_tokens),
            write=partial(written, num_texts=len(texts), media=call.answer_media),
        )
        body = await _in_time(work, call.deadline, "before its tokens were there")
        return Answer(body, call.answer_media.value)


class Decode:
    """POST /decode: the text of each list of ids."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def __call__(self, call: Call) -> Answer:
        """Write ids as text.

        Raises:
            ApiError: the request is refused, its deadline passes, or the server has no tokenizer.
        """
        request = decode(DecodeRequest, call.body, call.media)
        inputs = read_input(request.ids, self._pipeline.limits, "ids")
        if isinstance(inputs, Texts):
            raise invalid("ids are texts; give token ids, or lists of token ids", "ids")
        _check_total(len(inputs.sequences.flat), self._pipeline.limits.max_request_tokens)
        skip = request.skip_special_tokens is not False
        work = self._pipeline.tokenizer.decode(inputs.sequences, skip_special_tokens=skip)
        texts = await _in_time(work, call.deadline, "before its texts were there")
        return answer(texts, call.answer_media, ())


async def _in_time(work: Awaitable[T], deadline: Deadline | None, phase: str) -> T:
    """What `work` gives; it is cancelled when the deadline passes. phase: as Deadline.expired."""
    if deadline is None:
        return await work
    try:
        async with asyncio.timeout(deadline.left_s()):
            return await work
    except TimeoutError:
        raise deadline.expired(phase) from None


def _check_total(count: int, most: int) -> None:
    if count > most:
        message = f"there are {count} tokens in all; this server takes at most {most} a request"
        raise ApiError(ErrorKind.INPUT_TOO_LONG, message)

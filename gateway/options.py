"""The gateway's settings, built once by the composition root."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

MIB = 1024 * 1024
# As browsers send it: lower case, without a path; anything else would never match. "null" is that of files.
_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^/\sA-Z]+")
_AT_LEAST_ONE = (
    "max_items",
    "max_request_tokens",
    "max_body_bytes",
    "max_outstanding_requests",
    "max_outstanding_token_bytes",
    "perplexity_max_items",
    "perplexity_max_request_tokens",
    "tokenizer_threads",
)


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Names, keys and limits of the HTTP side.

    served_model_names: the names a request may give as `model`; the first is reported when it gives none.
        Empty: the engine's own name.
    api_keys: a work route wants one of them as `Authorization: Bearer KEY`; empty: no key is asked for.
    max_items: inputs in one request (OpenAI takes 2048).
    max_request_tokens: tokens of all inputs of one request (OpenAI takes 300 000); a million are 128 full
        inputs of 8192 tokens.
    max_body_bytes: bytes of one request body, after decompression. 8 MiB hold a million tokens in any codec;
        the loop stands still while one body is decoded, 10 ms a MiB of JSON integers.
    request_timeout_s: seconds until a request that has not been started on the device gets 504; None: never.
    max_outstanding_token_bytes: what the tokens of all requests under way may give, where it is asked for,
        as f32; more get 429. 1 GiB are 30 texts of 8192 tokens with BGE-M3's vectors.
    max_outstanding_requests: requests being worked on at once, from head to answer; more get 429 before their
        body is read. Bounds what bodies and texts that are not tokenised yet can take.
    head_timeout_s: seconds in which a request's head must have come, from its first byte; then 408.
    body_timeout_s: seconds in which a body must have come, once its head has; then 408.
    keepalive_timeout_s: seconds after which a connection closes on which nothing comes, or nothing of an
        answer is taken. More than the 60 s after which common load balancers drop one: so they close first.
    api_dialect: "openai" or "perplexity": what /v1/embeddings speaks when a request names no encoding_format.
    perplexity_max_items, perplexity_max_request_tokens: of a request in Perplexity's dialect.
    cors_origins: pages of these origins may use the server from a browser; "*": of any.
    dashboard: whether a GET of / gives a page for people; the numbers on it want a key as work does.
    tokenizer_threads: threads that tokenise long texts beside the loop.
    inline_text_chars: texts of up to this many characters in all are tokenised on the loop itself; eight
        times as many by a compiled tokeniser.

    Raises:
        ValueError: a limit is not positive, a key or name is empty, or an origin is none.
    """

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_items: int = 2048
    max_request_tokens: int = 1_048_576
    max_body_bytes: int = 8 * MIB
    request_timeout_s: float | None = 300.0
    max_outstanding_requests: int = 4096
    max_outstanding_token_bytes: int = 1024 * MIB
    head_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    keepalive_timeout_s: float = 75.0
    api_dialect: Literal["openai", "perplexity"] = "openai"
    perplexity_max_items: int = 512
    perplexity_max_request_tokens: int = 120_000
    cors_origins: tuple[str, ...] = ()
    dashboard: bool = True
    tokenizer_threads: int = 4
    inline_text_chars: int = 256

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("request_timeout_s", "head_timeout_s", "body_timeout_s", "keepalive_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name} is {seconds}; it must be more than 0")
        if not all(self.api_keys):
            raise ValueError("an API key is empty; leave api_keys empty to ask for none")
        if not all(self.served_model_names):
            raise ValueError("a served model name is empty")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"the CORS origin {origin!r} is neither * nor like https://host or https://host:port"
                )

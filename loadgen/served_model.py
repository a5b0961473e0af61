"""What a server says about its model, asked once before a run, and its counters around each case."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from loadgen.http1 import connect, get_bytes
from loadgen.plan import LoadgenError, Target

ASK_S = 10.0


@dataclass(frozen=True)
class ServedModel:
    """vocab_size, max_tokens: None when the server does not say. told: its whole page, for the report."""

    model: str | None
    vocab_size: int | None
    max_tokens: int | None
    told: dict[str, Any]


def ask(target: Target) -> tuple[Target, ServedModel]:
    """The target with its model's name filled in, and what its server says.

    Raises:
        LoadgenError: nothing listens there.
    """
    told = _page(target, "/info") or {}
    models = _page(target, "/v1/models") or {}
    listed = models.get("data") or [{}]
    model = target.model or listed[0].get("id") or told.get("model_id")
    engine = told.get("model") if isinstance(told.get("model"), dict) else {}
    limits = told.get("limits") or {}
    max_tokens = limits.get("max_tokens") or listed[0].get("max_model_len") or told.get("max_input_length")
    return replace(target, model=model), ServedModel(
        model, (engine or {}).get("vocab_size"), max_tokens, told
    )


def counters(target: Target) -> dict[str, int]:
    """The engine's steps and tokens so far; empty for a server that does not tell both."""
    told = (_page(target, "/info") or {}).get("engine")
    if not isinstance(told, dict) or not {"steps", "tokens"} <= told.keys():
        return {}
    return {key: int(told[key]) for key in ("steps", "tokens")}


def _page(target: Target, path: str) -> dict[str, Any] | None:
    try:
        return asyncio.run(asyncio.wait_for(_get(target, path), ASK_S))
    except (OSError, TimeoutError) as error:
        raise LoadgenError(f"{target.url}{path}: {error or f'no answer in {ASK_S:g} s'}") from error


async def _get(target: Target, path: str) -> dict[str, Any] | None:
    connection = await connect(target.host, target.port)
    try:
        response = await connection.send(get_bytes(target.netloc, path, target.api_key))
    finally:
        connection.abort()
    try:
        page = msgspec.json.decode(response.body) if response.status == 200 else None
    except msgspec.DecodeError:
        return None
    return page if isinstance(page, dict) else None

"""Whether a replica serves what we serve: vectors of two models must never answer the same question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from gateway.replicas.chunks import MOST_ROWS, MOST_TOKENS
from rose.batch import EngineInfo

_SAME = (
    *("model", "architecture", "dtype", "dimensions", "vocab_size", "pooling", "normalize", "has_int8"),
    *("chunk_separator", "type_vocab_size", "task", "labels", "score_template", "prompts"),
    *("default_prompt_name", "token_outputs", "unweighted_ids"),
)
# An id and a type of each token, spans and lengths of each sequence of one token.
_MOST_BYTES_A_TOKEN = 32
# Not max_batch_tokens, which differ between kinds of GPUs: no chunk has more than one sequence may have.
_AT_LEAST = ("max_model_len", "max_batch_seqs", "max_token_bytes")


class Mismatch(Exception):  # noqa: N818
    """The replica serves something else, or too little of it; the message names both values."""


def read_info(described: Mapping[str, Any]) -> EngineInfo:
    """The model that a replica's /info describes.

    Raises:
        Mismatch: it describes none.
    """
    try:
        return msgspec.convert(described["model"], EngineInfo)
    except (msgspec.ValidationError, LookupError, TypeError) as error:
        raise Mismatch(f"its /info describes no model of ours: {error}") from None


def check(described: Mapping[str, Any], wanted: Mapping[str, object], fleet: EngineInfo | None) -> EngineInfo:
    """What the replica serves, if it is the same.

    wanted: fields that are known from the model's own files. fleet: what the others serve.

    Raises:
        Mismatch: it is not.
    """
    info = read_info(described)
    _check_end(described)
    found = asdict(info)
    same = dict(wanted)
    if fleet is not None:
        same |= {name: value for name, value in asdict(fleet).items() if name in _SAME}
    for name, value in same.items():
        own = described.get(name) if name == "revision" else found[name]
        if own != value and not (name == "revision" and own is None):
            raise Mismatch(f"its {name} is {own!r}, not {value!r}")
    for name in _AT_LEAST if fleet is not None else ():
        if found[name] < getattr(fleet, name):
            raise Mismatch(f"its {name} is {found[name]}; the others take {getattr(fleet, name)}")
    if fleet is not None and info.max_batch_tokens < (most := _longest(fleet)):
        raise Mismatch(
            f"its max_batch_tokens is {info.max_batch_tokens}; the others take sequences of {most}"
        )
    _check_limits(described.get("limits", {}), info)
    return info


def _longest(info: EngineInfo) -> int:
    """Tokens that one sequence may have."""
    return min(info.max_model_len, info.max_batch_tokens)


def _check_end(described: Mapping[str, Any]) -> None:
    """Among gateways that pass work on to gateways it could go round in circles."""
    replicas = (described.get("settings") or {}).get("replicas") or {}
    if replicas.get("urls") or replicas.get("file"):
        raise Mismatch(
            "it is a gateway with --replica or --replica-file, or this one; list its replicas here"
        )


def _check_limits(limits: Mapping[str, Any], info: EngineInfo) -> None:
    """A chunk must be a request that it takes."""
    tokens = max(MOST_TOKENS, _longest(info))
    needed = {
        "max_items": min(MOST_ROWS, info.max_batch_seqs),
        "max_request_tokens": tokens,
        "max_body_bytes": _MOST_BYTES_A_TOKEN * tokens,
    }
    for name, least in needed.items():
        own = limits.get(name, 0)
        if own < least:
            raise Mismatch(f"it takes {name} {own} a request; it is sent up to {least}")

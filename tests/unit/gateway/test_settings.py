"""Options that cannot work are refused when they are made, and keys are compared whole."""

from __future__ import annotations

import hmac
from typing import Any

import pytest

from gateway.auth import KeyRing
from gateway.errors import ApiError, ErrorKind
from gateway.options import GatewayOptions


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_items", 0),
        ("max_request_tokens", 0),
        ("max_body_bytes", -1),
        ("tokenizer_threads", 0),
        ("max_outstanding_requests", 0),
        ("perplexity_max_items", 0),
        ("perplexity_max_request_tokens", -5),
        ("body_timeout_s", 0.0),
        ("request_timeout_s", 0.0),
        ("request_timeout_s", float("nan")),
    ],
)
def test_a_limit_that_is_not_positive_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        GatewayOptions(**{field: value})


@pytest.mark.parametrize("fields", [{"api_keys": ("good", "")}, {"served_model_names": ("",)}])
def test_empty_keys_and_names_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="empty"):
        GatewayOptions(**fields)


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def spy(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        assert len(one) == len(other)  # digests: a key's length shows nowhere
        return original(one, other)

    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", spy)
    ring = KeyRing(["a", "much longer key", "c"])
    ring.check("Bearer a")
    assert len(compared) == 3


@pytest.mark.parametrize(
    "header", ["Bearer \udcff", "Bearer \x00", "Bearer a b", "Bearer ä", "Bearer" + " " * 99]
)
def test_odd_headers_are_wrong_keys(header: str) -> None:
    with pytest.raises(ApiError) as caught:
        KeyRing(["a"]).check(header)
    assert caught.value.kind is ErrorKind.INVALID_API_KEY

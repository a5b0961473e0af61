"""Nothing grows and nothing slows in SOAK_S seconds, or a million requests, at 70 % of the full load."""

from __future__ import annotations

import os

import pytest

from tests.e2e.soak import soak

SECONDS = float(os.environ.get("SOAK_S", "480"))


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("flags", [(), ("--model", "minilm")], ids=["scripted", "minilm"])
def test_nothing_grows_and_nothing_slows(flags: tuple[str, ...]) -> None:
    found, broken = soak(SECONDS, 1_000_000, 0.7, flags)
    print(found)
    assert broken == [], found

"""What is taken from a server's pages before a run."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest

from loadgen.plan import Target
from loadgen.served_model import ask, counters
from tests.loadgen.stub import Script, Stub


def target(stub: Stub, model: str | None = None) -> Target:
    place = urlsplit(stub.url)
    return Target("A", place.hostname or "", place.port or 0, "bouquet-msgpack", model)


@pytest.mark.parametrize(
    ("asked", "listed", "sent"),
    [
        (None, ("served-as", "alias"), "served-as"),
        ("alias", ("served-as", "alias"), "alias"),
        (None, (), "org/own-name"),
        (None, None, "org/own-name"),
    ],
)
def test_the_first_listed_name_is_sent(asked: str | None, listed: tuple[str, ...] | None, sent: str) -> None:
    with Stub(Script(info={"model_id": "org/own-name"}, models=listed)) as stub:
        found, served = ask(target(stub, asked))
    assert (found.model, served.model) == (sent, sent)


@pytest.mark.parametrize(
    ("info", "found"),
    [
        (None, {}),
        ({"engine": None}, {}),
        ({"engine": {"steps": 3}}, {}),
        ({"engine": {"steps": 3, "tokens": 40, "failed_steps": 0}}, {"steps": 3, "tokens": 40}),
    ],
)
def test_counters_are_both_or_none(info: dict[str, Any] | None, found: dict[str, int]) -> None:
    with Stub(Script(info=info)) as stub:
        assert counters(target(stub)) == found

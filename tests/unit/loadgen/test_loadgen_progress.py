from __future__ import annotations

import io
import sys

import pytest

from loadgen.progress import Bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_a_bar_with_the_time_left_for_terminals_only(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with Bar(4) as bar:
        for name in ("first", "second"):
            bar.begin(name)
            bar.at(0.5)
    text = stream.getvalue()
    if stream.isatty():
        assert "second" in text and "1.5/4" in text and "<" in text
    else:
        assert text == ""

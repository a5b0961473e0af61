from __future__ import annotations

import io
import sys

import pytest

from loadgen.progress import Bar, Lines
from loadgen.results import CaseResult


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
            if name == "first":
                bar.end(name, CaseResult("latency", name, 0, "A"))
    text = stream.getvalue()
    if stream.isatty():
        assert "second" in text and "1.5/4" in text and "<" in text
    else:
        assert text == ""


def test_lines_need_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Lines(2) as lines:
        lines.begin("latency 1×128")
        lines.at(0.5)
        lines.end("latency 1×128", CaseResult("latency", "1×128", 0, "A", failed="nothing listens"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[1/2] latency 1×128 A: FAILED: nothing listens (0.0 s")

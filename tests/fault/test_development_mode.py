"""What only Python's development mode and our watch of the loop show: it is looked at in every run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rose.batch import Int32
from tests.http.served import byte_tokenizer, serving

pytestmark = pytest.mark.timeout(120)


async def test_a_call_that_blocks_the_loop_fails_its_test(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = byte_tokenizer()

    def slowly(texts: Sequence[str], max_tokens: int | None = None) -> list[Int32]:
        time.sleep(0.001)
        return []

    monkeypatch.setattr(tokenizer, "encode", slowly)
    async with serving(tokenizer=tokenizer) as server:
        assert (await server.embed({"input": "short"})).status == 500
    assert "Blocking call to time.sleep" in caplog.text


def test_nothing_is_left_open_or_unawaited_in_development_mode(repo_root: Path) -> None:
    """asyncio's debug mode, and warnings of what was never closed or awaited are errors."""
    files = ("test_health.py", "test_connections.py")
    report = subprocess.run(
        [
            *(sys.executable, "-X", "dev", "-m", "pytest", "-q", "-p", "no:randomly"),
            *("-W", "error::ResourceWarning", "-W", "error::RuntimeWarning"),
            *("-W", "error::pytest.PytestUnraisableExceptionWarning"),
            *(f"tests/http/{file}" for file in files),
        ],
        cwd=repo_root,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert report.returncode == 0, report.stdout[-3000:]

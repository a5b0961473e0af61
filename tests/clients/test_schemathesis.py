"""Requests made from the API's own description, of every kind: none may be a server error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import KEY, Server, start

EXAMPLES = os.environ.get("SCHEMATHESIS_EXAMPLES", "25")


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Inputs of few tokens: what is tried here is the front, not the model."""
    yield from start("--max-items", "16", "--max-request-tokens", "1024", "--max-body-bytes", "1000000")


def test_no_request_is_a_server_error(small: Server, tmp_path: Path) -> None:
    description = Path(__file__).parents[2] / "docs" / "openapi.json"
    report = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            *("run", str(description), "--url", small.url, "--header", f"Authorization: Bearer {KEY}"),
            *("--checks", "not_a_server_error,status_code_conformance", "--max-examples", EXAMPLES),
            *(
                "--exclude-path",
                "/docs",
                "--exclude-path",
                "/dashboard/events",
                "--request-timeout",
                "60",
                "--seed",
                "1",
            ),
        ],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert report.returncode == 0, report.stdout[-6000:]

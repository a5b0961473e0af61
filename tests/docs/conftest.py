"""MiniLM, for what the documents say to send to a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server_process import ServerProcess


@pytest.fixture(scope="session")
def minilm(minilm_folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        "--model", str(minilm_folder), "--served-model-name", "minilm", "--port", "0"
    ) as server:
        yield server.ready()

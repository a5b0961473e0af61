"""docs/api.md against the server: its client runs, and its table is the code's."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.errors import ErrorKind
from tests.http.served import Served, expected, text_ids


@pytest.fixture(scope="session")
def document(repo_root: Path) -> str:
    return (repo_root / "docs" / "api.md").read_text()


async def test_the_documented_client_works_as_printed(server: Served, document: str) -> None:
    source = document.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(source, names)
    host = f"127.0.0.1:{server.port}"
    texts = await asyncio.to_thread(names["embed"], ["hello", "wörld"], host)
    np.testing.assert_allclose(texts, [expected(text_ids(text)) for text in ("hello", "wörld")], rtol=1e-6)
    ids = await asyncio.to_thread(names["embed"], [[1, 2], [3]], host, dimensions=4)
    np.testing.assert_allclose(ids, [expected(row, 4) for row in ([1, 2], [3])], rtol=1e-6)
    with pytest.raises(RuntimeError, match="token id 30000"):
        await asyncio.to_thread(names["embed"], [[30_000]], host)
    assert len(source.strip().splitlines()) <= 25


def test_the_error_table_is_the_code_s(document: str) -> None:
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \| `(\w+)` \|", document, re.MULTILINE)
    table = {code: (int(status), error_type) for status, code, error_type in rows}
    assert table == {
        code: (int(status), error_type) for status, error_type, code in (kind.value for kind in ErrorKind)
    }

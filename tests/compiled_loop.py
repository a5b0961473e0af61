"""`pytest -p tests.compiled_loop`: the tests on the loop's compiled code, and none where it is not built.

A plugin, since it comes before any conftest: whatever imports a module first decides which code it is.
"""

from __future__ import annotations

import pytest

from rose.aot.compiled_loop import use_compiled_loop

STATE = use_compiled_loop()
if STATE != "compiled":
    raise SystemExit(f"{STATE}; python -m rose.aot.build_loop builds it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that replace a method of a compiled class are left out: that cannot be done."""
    left_out = [item for item in items if item.get_closest_marker("interpreted")]
    items[:] = [item for item in items if not item.get_closest_marker("interpreted")]
    config.hook.pytest_deselected(items=left_out)


def pytest_report_header() -> str:
    """Said above the results."""
    return f"the loop: {STATE}"

"""What goes through HTTP runs on uvloop, as the server does."""

from __future__ import annotations

from tests.http.conftest import pytest_asyncio_loop_factories as pytest_asyncio_loop_factories

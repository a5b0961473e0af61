"""What goes through HTTP runs on uvloop, as the server does."""

from __future__ import annotations

from tests.blocking import nothing_blocks_the_loop as nothing_blocks_the_loop
from tests.http.conftest import pytest_asyncio_loop_factories as pytest_asyncio_loop_factories

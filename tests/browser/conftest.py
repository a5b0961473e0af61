"""Browsers and servers, each started once; a tab for each test, which must leave no complaint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.browser.bidi import Tab, Wire
from tests.browser.browsers import KINDS, browser
from tests.e2e.fake_server import STEP_S
from tests.e2e.server_process import REAL, ServerProcess

GRAPHED = ("-m", "tests.browser.graph_server")
KEY = "the-key-of-a-test"
Opener = Callable[..., Awaitable[Tab]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", metavar="FOLDER", type=Path, help="keep pictures of the page there")
    parser.addoption(
        "--recording", metavar="FILE", type=Path, help="of record.py, to look at and keep pictures of"
    )
    parser.addoption("--axe", metavar="FILE", type=Path, required=True, help="axe.min.js of axe-core")


@pytest.fixture(scope="session")
def axe(request: pytest.FixtureRequest) -> str:
    """The source of axe-core."""
    return Path(request.config.getoption("--axe")).read_text()


@pytest.fixture(scope="session", params=KINDS)
async def light(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Wire]:
    async with browser(request.param, tmp_path_factory.mktemp(request.param)) as wire:
        yield wire


@pytest.fixture(scope="session", params=KINDS)
async def dark(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Wire]:
    async with browser(request.param, tmp_path_factory.mktemp(request.param), dark=True) as wire:
        yield wire


@pytest.fixture(scope="session")
def minilm() -> Iterator[ServerProcess]:
    """The real server with real weights."""
    with ServerProcess("--model", "minilm", "--port", "0", program=REAL) as server:
        yield server.ready()


@pytest.fixture(scope="session")
def graphed() -> Iterator[ServerProcess]:
    """A scripted one, as a GPU's. It takes ids only."""
    flags = ("--load-format", "dummy", "--port", "0", "--served-model-name", "scripted")
    with ServerProcess(*flags, program=GRAPHED, env={STEP_S: "0.002"}) as server:
        yield server.ready()


@pytest.fixture
async def opened() -> AsyncIterator[Opener]:
    """Opens tabs: of a browser, at an address. When the test ends, none of them may have complained.

    expected: a part of every line that the console may have.
    """
    tabs: list[tuple[Tab, str | None]] = []

    async def open_tab(
        wire: Wire, url: str, expected: str | None = None, width: int = 1280, height: int = 900
    ) -> Tab:
        tab = await Tab.open(wire, url, width, height)
        tabs.append((tab, expected))
        return tab

    yield open_tab
    for tab, expected in tabs:
        complaints = [line for line in tab.log if expected is None or expected not in line]
        violations = await tab.value("window.violations")
        await tab.close()
        assert (complaints, violations) == ([], [])


async def post(server: ServerProcess, *bodies: object) -> None:
    """Work, one request after another."""
    for body in bodies:
        await asyncio.to_thread(server.post, "/v1/embeddings", body)

"""Light, dark and narrow: nothing that axe-core finds serious, nothing cut off; pictures, if asked for."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.browser.bidi import Tab, Wire
from tests.browser.conftest import Opener
from tests.browser.test_playground import DONE
from tests.e2e.server_process import ServerProcess

NARROW = 360
# A window of 1280 px at 200 %; a tablet.
ZOOMED, TABLET = 640, 768
_AXE = """axe.run().then(({ violations }) => violations
  .filter(({ impact }) => impact === "serious" || impact === "critical")
  .map(({ id, nodes }) => [id, ...nodes.map((node) => `${node.target} ${node.failureSummary}`)]))"""


@contextmanager
def work(server: ServerProcess) -> Iterator[None]:
    """Requests of many sizes, until the block ends."""
    stop = threading.Event()

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            count = int(rng.choice([1, 1, 1, 2, 2, 4, 8, 16]))
            lengths = rng.choice([8, 12, 30, 60, 100, 200], count)
            server.post("/v1/embeddings", {"input": [[5] * int(length) for length in lengths]})
            time.sleep(rng.random() / 20)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


async def serious(tab: Tab, axe: str) -> list[Any]:
    """What axe-core finds. Its code comes through the debugger, not through the page's policy."""
    await tab.value(f"(() => {{ {axe}\n }})()")
    found: list[Any] = await tab.value(_AXE)
    return found


def keep(request: pytest.FixtureRequest, name: str, picture: bytes) -> None:
    folder: Path | None = request.config.getoption("--screenshots")
    if folder is not None and "chromium" in request.node.name:
        folder.mkdir(parents=True, exist_ok=True)
        drawn = Image.open(io.BytesIO(picture)).convert("RGB")
        few_colours = drawn.quantize(256, Image.Quantize.MAXCOVERAGE)
        few_colours.save(folder / f"{name}.png", optimize=True)


async def look(tab: Tab, axe: str, request: pytest.FixtureRequest, name: str | None) -> None:
    assert await serious(tab, axe) == []
    wide = await tab.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"{wide} px are cut off"
    columns = await tab.value("getComputedStyle(document.getElementById('tiles')).gridTemplateColumns")
    assert 4 % len(columns.split()) == 0  # no tile stands alone in its row
    if name is not None:
        keep(request, name, await tab.screenshot())


async def busy(tab: Tab, request: pytest.FixtureRequest) -> None:
    """Wait until there is something to see; for pictures, more of it."""
    await tab.until("document.querySelectorAll('.map [data-state=\"captured\"]').length > 8")
    if request.config.getoption("--screenshots") and "chromium" in request.node.name:
        await tab.until("document.querySelector('.tile path').getAttribute('d').split('L').length > 25", 60.0)


LIGHT = {1280: "dashboard", TABLET: None, ZOOMED: None, NARROW: "dashboard-narrow"}
DARK = {1280: "dashboard-dark", NARROW: None}


@pytest.mark.parametrize("width", LIGHT)
async def test_light(
    light: Wire, opened: Opener, graphed: ServerProcess, axe: str, request: pytest.FixtureRequest, width: int
) -> None:
    tab = await opened(light, graphed.url, width=width)
    with work(graphed):
        await busy(tab, request)
        await look(tab, axe, request, LIGHT[width])


@pytest.mark.parametrize("width", DARK)
async def test_dark(
    dark: Wire, opened: Opener, graphed: ServerProcess, axe: str, request: pytest.FixtureRequest, width: int
) -> None:
    tab = await opened(dark, graphed.url, width=width)
    assert await tab.value("matchMedia('(prefers-color-scheme: dark)').matches")
    with work(graphed):
        await busy(tab, request)
        await look(tab, axe, request, DARK[width])


@pytest.mark.parametrize("width", [1280, NARROW])
async def test_playground(
    light: Wire, opened: Opener, minilm: ServerProcess, axe: str, request: pytest.FixtureRequest, width: int
) -> None:
    tab = await opened(light, minilm.url, width=width)
    await tab.until("!document.getElementById('try-form').hidden")
    await tab.click("#run")
    await tab.until(DONE)
    await look(tab, axe, request, "playground" if width > NARROW else "playground-narrow")


@pytest.mark.parametrize("width", [1280, NARROW])
async def test_dark_playground(
    dark: Wire, opened: Opener, minilm: ServerProcess, axe: str, request: pytest.FixtureRequest, width: int
) -> None:
    tab = await opened(dark, minilm.url, width=width)
    await tab.until("!document.getElementById('try-form').hidden")
    await tab.click("#run")
    await tab.until(DONE)
    await look(tab, axe, request, "playground-dark" if width > NARROW else None)

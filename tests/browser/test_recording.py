"""A recording of the page's events, made by the script that runs beside a GPU, looks as the server did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.bidi import Wire
from tests.browser.conftest import GRAPHED, KEY, Opener
from tests.browser.replay import load, replaying
from tests.browser.test_looks import NARROW, look, work
from tests.browser.test_page import LEAD, STATE
from tests.e2e.server_process import ServerProcess

RECORD = Path(__file__).parent / "record.py"
TALLY = "import('/dashboard/format.js').then(({{ tally }}) => tally({}) + ' in all')"
CAPTURED = "document.querySelectorAll('.map [data-state=\"captured\"]').length"


def record(*arguments: str | Path, key: str = "") -> subprocess.CompletedProcess[str]:
    # -I: it runs where there is no checkout, so it must find none.
    command = [sys.executable, "-I", str(RECORD), *map(str, arguments)]
    return subprocess.run(
        command, env={"BOUQUET_API_KEY": key}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="session")
def recording(
    request: pytest.FixtureRequest, graphed: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The one that was given, or seconds of the scripted server at work."""
    given: Path | None = request.config.getoption("--recording")
    if given is not None:
        return given
    file = tmp_path_factory.mktemp("recording") / "page.json"
    with work(graphed):
        made = record(file, "--url", graphed.url, "--seconds", "4")
    assert made.returncode == 0, made.stderr
    return file


async def shown(
    wire: Wire, opened: Opener, recording: Path, axe: str, request: pytest.FixtureRequest, name: str
) -> None:
    kept = load(recording)
    last = [value for _, name, value in kept.events if name == "numbers"][-1]
    async with replaying(kept) as url:
        tab = await opened(wire, url, width=NARROW if name.endswith("narrow") else 1280)
        await tab.until(f"{STATE} === 'Serving' && {CAPTURED} > 1")
        assert "a second, the GPU busy" in await tab.value(LEAD)
        assert await tab.value(TALLY.format(last["requests"])) in await tab.text("#tiles")
        await look(tab, axe, request, name if request.config.getoption("--recording") else None)


@pytest.mark.parametrize("name", ["recorded", "recorded-narrow"])
async def test_it_looks_as_the_server_did(
    light: Wire, opened: Opener, recording: Path, axe: str, request: pytest.FixtureRequest, name: str
) -> None:
    await shown(light, opened, recording, axe, request, name)


@pytest.mark.parametrize("name", ["recorded-dark", "recorded-dark-narrow"])
async def test_it_looks_so_in_the_dark(
    dark: Wire, opened: Opener, recording: Path, axe: str, request: pytest.FixtureRequest, name: str
) -> None:
    await shown(dark, opened, recording, axe, request, name)


def test_what_keeps_it_from_recording_is_a_line(tmp_path: Path) -> None:
    file = tmp_path / "page.json"
    failed = record(file, "--url", "http://127.0.0.1:9")
    assert (failed.returncode, failed.stderr.count("\n"), failed.stderr[:7]) == (1, 1, "error: ")
    flags = ("--load-format", "dummy", "--port", "0", "--api-key", KEY)
    with ServerProcess(*flags, program=GRAPHED) as server:
        failed = record(file, "--url", server.ready().url)
        assert "answers 401" in failed.stderr
        assert not file.exists()
        made = record(file, "--url", server.url, "--seconds", "1", key=KEY)
        assert made.returncode == 0, made.stderr
    assert [name for _, name, _ in load(file).events[:2]] == ["model", "numbers"]
    assert KEY not in file.read_text()

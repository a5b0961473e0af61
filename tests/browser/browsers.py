"""Debian's Chromium and Firefox, started without a screen, in a profile of their own."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import aiohttp

from tests.browser.bidi import LIMIT_S, Wire

KINDS = ("chromium", "firefox")
PROGRAMS = {"chromium": "chromium", "driver": "chromedriver", "firefox": "firefox-esr"}
_FIREFOX_PREFERENCES = """
user_pref("layout.css.prefers-color-scheme.content-override", {scheme});
user_pref("browser.shell.checkDefaultBrowser", false);
user_pref("datareporting.policy.dataSubmissionEnabled", false);
user_pref("remote.active-protocols", 1);
"""


def program(kind: str) -> str:
    """Where it is.

    Raises:
        RuntimeError: nowhere.
    """
    found = shutil.which(PROGRAMS[kind])
    if found is None:
        raise RuntimeError(f"there is no {PROGRAMS[kind]}: see `make test-browser`")
    return found


@asynccontextmanager
async def browser(kind: str, profile: Path, *, dark: bool = False) -> AsyncIterator[Wire]:
    """A browser until the block ends. profile: an empty folder."""
    launch: dict[str, Callable[[Path, bool], AbstractAsyncContextManager[tuple[aiohttp.ClientSession, str]]]]
    launch = {"chromium": _chromium, "firefox": _firefox}
    async with (
        launch[kind](profile, dark) as (session, url),
        session.ws_connect(url, max_msg_size=0) as socket,
    ):
        wire = Wire(socket)
        if kind == "firefox":  # chromedriver has begun one already
            await wire.ask("session.new", capabilities={"alwaysMatch": {}})
        await wire.ask("session.subscribe", events=["log.entryAdded"])
        yield wire


@asynccontextmanager
async def _chromium(profile: Path, dark: bool) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    process = await asyncio.create_subprocess_exec(
        program("driver"), "--port=0", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        port = await _line(process.stdout, r"started successfully on port (\d+)")
        arguments = [
            "--headless=new",
            "--no-sandbox",  # which Chromium wants of root
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        ]
        options = {"binary": program("chromium"), "args": arguments}
        wanted = {"alwaysMatch": {"webSocketUrl": True, "goog:chromeOptions": options}}
        base = f"http://127.0.0.1:{port}/session"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_S)) as session:
            async with session.post(base, json={"capabilities": wanted}) as answer:
                begun = (await answer.json())["value"]
            if "capabilities" not in begun:
                raise RuntimeError(f"Chromium does not start: {begun}")
            yield session, begun["capabilities"]["webSocketUrl"]
            await (await session.delete(f"{base}/{begun['sessionId']}")).read()
    finally:
        await _end(process)


@asynccontextmanager
async def _firefox(profile: Path, dark: bool) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    (profile / "user.js").write_text(_FIREFOX_PREFERENCES.format(scheme=0 if dark else 1))
    process = await asyncio.create_subprocess_exec(
        *(program("firefox"), "--headless", "--no-remote", "--profile", str(profile)),
        *("--remote-debugging-port", "0", "about:blank"),
        env={"HOME": str(profile), "PATH": "/usr/bin:/bin", "MOZ_HEADLESS": "1"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        url = await _line(process.stderr, r"WebDriver BiDi listening on (ws://\S+)")
        async with aiohttp.ClientSession() as session:
            yield session, f"{url}/session"
    finally:
        await _end(process)


async def _line(stream: asyncio.StreamReader | None, pattern: str) -> str:
    """What `pattern` finds in the first line that has it."""
    assert stream is not None
    async with asyncio.timeout(LIMIT_S):
        async for line in stream:
            if found := re.search(pattern, line.decode(errors="replace")):
                return found.group(1)
    raise RuntimeError(f"the browser ended without {pattern!r}")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(5):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

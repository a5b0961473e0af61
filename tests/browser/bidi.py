"""A browser driven over WebDriver BiDi, which Chromium's driver and Firefox itself both speak.

Source: https://w3c.github.io/webdriver-bidi/
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from typing import Any

import aiohttp

LIMIT_S = 60.0
TAB, ENTER, ESCAPE = "\ue004", "\ue007", "\ue00c"
LEFT, UP, RIGHT, DOWN = "\ue012", "\ue013", "\ue014", "\ue015"
# Installed before the page's own code: what its policy stops, and errors that nobody caught.
_WATCH = """() => {
  window.violations = [];
  document.addEventListener("securitypolicyviolation", (event) =>
    window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}`));
}"""


class Wire:
    """Commands and their answers on one socket; what the console says is kept in `log`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.get_running_loop().create_task(self._read())
        self.log: list[str] = []

    async def ask(self, method: str, **params: Any) -> Any:
        """The command's result.

        Raises:
            RuntimeError: the browser refuses it.
        """
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        try:
            async with asyncio.timeout(LIMIT_S):
                message = await answer
        finally:  # what comes too late is nobody's any more
            del self._answers[number]
        if message["type"] == "error":
            raise RuntimeError(f"{method}: {message['error']}: {message['message']}")
        return message["result"]

    async def _read(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame.data)
            if message["type"] == "event":
                if message["method"] == "log.entryAdded" and message["params"]["level"] in ("error", "warn"):
                    self.log.append(f"{message['params']['level']}: {message['params']['text']}")
            elif (answer := self._answers.get(message.get("id"))) and not answer.done():
                answer.set_result(message)


class Tab:
    """One tab. `log` is the console's errors and warnings so far."""

    def __init__(self, wire: Wire, context: str, width: int) -> None:
        self._wire, self._context, self._width = wire, context, width

    @classmethod
    async def open(cls, wire: Wire, url: str, width: int = 1280, height: int = 900) -> Tab:
        wire.log.clear()
        context = (await wire.ask("browsingContext.create", type="tab"))["context"]
        tab = cls(wire, context, width)
        await tab._resize(height)
        await wire.ask("script.addPreloadScript", functionDeclaration=_WATCH, contexts=[context])
        await tab.go(url)
        return tab

    @property
    def log(self) -> list[str]:
        return self._wire.log

    async def go(self, url: str) -> None:
        await self._wire.ask("browsingContext.navigate", context=self._context, url=url, wait="complete")

    async def close(self) -> None:
        await self._wire.ask("browsingContext.close", context=self._context)

    async def value(self, expression: str) -> Any:
        """What an expression of JavaScript is, promises awaited, as JSON carries it.

        Raises:
            AssertionError: it throws.
        """
        wrapped = f"(async () => JSON.stringify((await ({expression})) ?? null))()"
        found = await self._wire.ask(
            "script.evaluate",
            expression=wrapped,
            target={"context": self._context},
            awaitPromise=True,
        )
        assert found["type"] == "success", found["exceptionDetails"]["text"]
        return json.loads(found["result"]["value"])

    async def until(self, condition: str, limit_s: float = 15.0) -> Any:
        """Wait until an expression is true; its value."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + limit_s
        while not (value := await self.value(condition)):
            if loop.time() > ends_s:
                body = await self.value("document.querySelector('main')?.innerText")
                raise AssertionError(f"not within {limit_s} s: {condition}\n{body}\n{self.log}")
            await asyncio.sleep(0.05)
        return value

    async def text(self, selector: str) -> str:
        return str(await self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def click(self, selector: str) -> None:
        """With a pointer, in the middle of what is there."""
        element = await self._element(selector)
        origin = {"type": "element", "element": {"sharedId": element}}
        await self._act(
            "pointer",
            [
                {"type": "pointerMove", "x": 0, "y": 0, "origin": origin},
                {"type": "pointerDown", "button": 0},
                {"type": "pointerUp", "button": 0},
            ],
        )

    async def press(self, *keys: str) -> None:
        """Keys, one after another, wherever the focus is."""
        await self._act(
            "key", [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        )

    async def focused(self) -> str:
        """What has the focus: its id, or its words."""
        return str(await self.value("document.activeElement.id || document.activeElement.textContent"))

    async def screenshot(self) -> bytes:
        """All of the page, from top to bottom, as a PNG."""
        await self._resize(await self.value("document.documentElement.scrollHeight"))
        shot = await self._wire.ask("browsingContext.captureScreenshot", context=self._context)
        return base64.b64decode(shot["data"])

    async def _resize(self, height: int) -> None:
        viewport = {"width": self._width, "height": height}
        await self._wire.ask("browsingContext.setViewport", context=self._context, viewport=viewport)

    async def _element(self, selector: str) -> str:
        expression = f"document.querySelector({json.dumps(selector)})"
        await self.value(f"{expression}.scrollIntoView({{block: 'center'}})")
        found = await self._wire.ask(
            "script.evaluate", expression=expression, target={"context": self._context}, awaitPromise=False
        )
        return str(found["result"]["sharedId"])

    async def _act(self, kind: str, actions: list[dict[str, Any]]) -> None:
        source = {"type": kind, "id": kind, "actions": actions}
        await self._wire.ask("input.performActions", context=self._context, actions=[source])
        await self._wire.ask("input.releaseActions", context=self._context)

"""Engines in processes of our own: started, started again when they end, and ended with us.

A process each, because an error of one GPU is the end of its CUDA context, and of every engine in the
process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gateway.replicas.endpoints import Endpoint
from gateway.replicas.folders import SocketFolder

log = logging.getLogger(__name__)

FIRST_BACK_OFF_S, LAST_BACK_OFF_S = 0.5, 30.0
# One that ran for so long is started again as if for the first time.
_STEADY_S = 60.0
_MAX_LINE_BYTES = 1 << 20
# Statuses of a server that could not start: a fault that a second start would meet again.
_CANNOT_START = (1, 2)
_READY = "ready after "
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OURS = ("BOUQUET_API_KEY", "BOUQUET_REPLICA_API_KEY")


class ChildFailed(Exception):  # noqa: N818
    """A child cannot start; the message is its own last words."""


class ChildProcess:
    """One engine's process, at a unix socket.

    label: what its lines begin with. command: the server's, to which the socket is added. folder: that of the
    socket, if it goes with the last of them.
    on_ready, on_exit: called when it serves, and with the reason when it does no more. failed: ends with
    ChildFailed if it ends before it ever served.
    """

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        uds: Path,
        env: Mapping[str, str],
        folder: SocketFolder | None = None,
    ) -> None:
        self.endpoint = Endpoint("http://localhost", uds=uds, label=label)
        self.on_ready: Callable[[], None] = lambda: None
        self.on_exit: Callable[[str], None] = lambda _: None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._command = [*command, "--uds", str(uds)]
        self._env = env
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._served = self._stopping = False
        self._last_words = ""

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Keep it running until `stop`."""
        back_off_s = FIRST_BACK_OFF_S
        while not self._stopping:
            began_s = time.monotonic()
            status = await self._once()
            if self._stopping:
                return
            if not self._served and status in _CANNOT_START:
                message = self._last_words.removeprefix("error: ") or f"it ended with status {status}"
                self.failed.set_exception(ChildFailed(f"{self.endpoint.name}: {message}"))
                return
            if time.monotonic() - began_s > _STEADY_S:
                back_off_s = FIRST_BACK_OFF_S
            log.error("%s ended with status %d; next start in %g s", self.endpoint.name, status, back_off_s)
            self.on_exit(f"its process ended with status {status}")
            await asyncio.sleep(back_off_s)
            back_off_s = min(LAST_BACK_OFF_S, 2 * back_off_s)

    def kill(self) -> None:
        """End it at once: it does not answer. It is started again as after any other end."""
        process = self._process
        if process is not None and process.returncode is None:
            log.error("%s does not answer and is killed", self.endpoint.name)
            process.kill()

    async def stop(self, limit_s: float) -> None:
        """Have it finish what it does, `limit_s` seconds at most."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            await self._end(process, limit_s)
        uds = self.endpoint.uds
        if uds is not None:
            uds.unlink(missing_ok=True)
        if self._folder is not None:
            self._folder.leave()

    async def _end(self, process: asyncio.subprocess.Process, limit_s: float) -> None:
        if process.stdin is not None:
            process.stdin.close()  # see parent.py
        try:
            async with asyncio.timeout(limit_s):
                await process.wait()
        except TimeoutError:
            log.warning("%s did not end within %.3g s and is killed", self.endpoint.name, limit_s)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _once(self) -> int:
        """One life; its exit status."""
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(self._env),
            limit=_MAX_LINE_BYTES,
        )
        if process.stdout is not None:
            await self._follow(process.stdout)
        return await process.wait()

    async def _follow(self, output: asyncio.StreamReader) -> None:
        """Pass its lines on, until it closes its output."""
        while True:
            try:
                line = await output.readline()
            except ValueError:  # longer than any that we write
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._last_words = text
            print(f"[{self.endpoint.name}] {text}", flush=True)  # noqa: T201, it is a log already
            if text.startswith(_READY):
                self._served = True
                self.on_ready()


def child_processes(
    command: Sequence[str], devices: Sequence[str], environ: Mapping[str, str]
) -> list[ChildProcess]:
    """One for each of `devices`, at sockets in a folder that nobody else may look into; not running yet.

    environ: ours, of which keys and traces are not theirs.
    """
    if not devices:
        return []
    folder = SocketFolder()
    env = {name: value for name, value in environ.items() if name not in _OURS}
    env["OTEL_SDK_DISABLED"] = "true"
    children = []
    for index, device in enumerate(devices):
        seen, visible = _alone(device, env.get(_VISIBLE))
        flags = [*command, "--device", seen]
        label, uds = f"{device} #{index}", folder.path / f"{index}.sock"
        children.append(ChildProcess(label, flags, uds, env | visible, folder))
    return children


def _alone(device: str, visible: str | None) -> tuple[str, dict[str, str]]:
    """What a process calls `device` that can see no other GPU, and the variable that sees to it.

    So nothing that it does can make a context on another's. visible: which GPUs we can see; None: all.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index.isdecimal():
        return device, {}
    if visible is None:
        return "cuda:0", {_VISIBLE: index}
    listed = [name for name in visible.split(",") if name]
    return "cuda:0", {_VISIBLE: listed[int(index)] if int(index) < len(listed) else "-1"}

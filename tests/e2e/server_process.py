"""A real server process on loopback: started, watched through what it prints, and ended by signals."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
REAL = ("server.py",)
# The same command line over a scripted engine: up in half a second, for what is not about vectors.
FAKE = ("-m", "tests.e2e.fake_server")
READY = re.compile(r"^ready after [\d.]+ s at (http://\S+): ")


class ServerProcess:
    """`python PROGRAM FLAGS`, ended by `close` at the latest.

    stdout, stderr: lines so far. url: known once it is ready.
    """

    def __init__(
        self,
        *flags: str,
        program: Sequence[str] = REAL,
        env: Mapping[str, str] | None = None,
        python: Sequence[str] = (),
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *python, *program, *flags],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "BOUQUET_API_KEY": "", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._printed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout, self.stdout), daemon=True),
            threading.Thread(target=self._read, args=(self._process.stderr, self.stderr), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self.url = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def ready(self, limit_s: float = 60.0) -> ServerProcess:
        """Wait until it serves."""
        self.url = READY.match(self.wait_for("ready after ", limit_s)).group(1)  # type: ignore[union-attr]
        return self

    def wait_for(self, words: str, limit_s: float = 30.0) -> str:
        """The first line of stdout with `words`, once it is printed; no child's, which begin with [name]."""
        with self._printed:
            found = self._printed.wait_for(lambda: self._line(words) or self._all_read(), limit_s)
            line = self._line(words)
        if line is None:
            why = "ended" if found else f"still runs after {limit_s} s"
            raise AssertionError(f"the server {why} without printing {words!r}: {self.stdout} {self.stderr}")
        return line

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, limit_s: float = 30.0) -> int:
        """The exit status, once everything it printed has been read."""
        status = self._process.wait(limit_s)
        for reader in self._readers:
            reader.join(limit_s)
        return status

    def connect(self, limit_s: float = 60.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=limit_s)

    def get(self, path: str) -> tuple[int, Any]:
        """Status and decoded body of a GET on a connection of its own."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """Status and decoded body of a JSON POST on a connection of its own."""
        return self._ask("POST", path, json.dumps(body), headers)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(
        self, method: str, path: str, body: str | None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        connection = self.connect()
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def _read(self, stream: Any, lines: list[str]) -> None:
        for line in stream:
            with self._printed:
                lines.append(line.rstrip("\n"))
                self._printed.notify_all()
        with self._printed:
            self._printed.notify_all()

    def _line(self, words: str) -> str | None:
        return next((line for line in self.stdout if words in line and not line.startswith("[")), None)

    def _all_read(self) -> bool:
        return self._process.poll() is not None and not any(reader.is_alive() for reader in self._readers)


@contextmanager
def held_port() -> Iterator[int]:
    """A port of loopback where nobody listens and a server may; no process that asks for any gets it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def run_to_end(
    *flags: str, program: Sequence[str] = REAL, env: Mapping[str, str] | None = None
) -> tuple[int, list[str]]:
    """Exit status and lines of stderr of a server that is expected not to start."""
    with ServerProcess(*flags, program=program, env=env) as server:
        return server.wait(60), server.stderr

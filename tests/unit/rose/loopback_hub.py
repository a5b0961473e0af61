"""A model hub on loopback, and processes that ask it for models."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLOSED_PORT = "http://127.0.0.1:9"


@dataclass
class Hub:
    """What the hub has, and what it was asked for.

    files: of the repository org/name. broken: the status of those it does not give; None: it closes the
    connection instead. requested: the files it gave.
    """

    url: str
    files: tuple[str, ...]
    broken: dict[str, int | None] = field(default_factory=dict)
    requested: list[str] = field(default_factory=list)


@contextmanager
def hub_of(files: tuple[str, ...]) -> Iterator[Hub]:
    """A hub with one repository, org/name, of `files`; each holds {}."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}", files)
    server.hub = hub  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def _blob(file: str) -> str:
    """A git object name, another for every file, as if their contents differed."""
    return hashlib.sha1(file.encode()).hexdigest()


class _Answers(BaseHTTPRequestHandler):
    """The few answers of a model hub that its client asks for."""

    @property
    def hub(self) -> Hub:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        return hub

    def do_HEAD(self) -> None:
        self._file(head=True)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/name/tree/"):
            tree = [{"type": "file", "path": file, "size": 2, "oid": _blob(file)} for file in self.hub.files]
            self._json(200, tree)
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": file} for file in self.hub.files]
            self._json(200, {"id": "org/name", "_id": "1", "sha": COMMIT, "siblings": siblings})
        elif path.startswith("/org/name/resolve/"):
            self._file(head=False)
        else:
            self._json(404, {"error": "Repository not found"}, ("X-Error-Code", "RepoNotFound"))

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Quiet."""

    def _file(self, *, head: bool) -> None:
        file = self.path.split("/resolve/")[1].partition("/")[2]
        status = self.hub.broken.get(file, 200)
        if status is None:
            self.close_connection = True
            return
        if not head and status == 200:
            self.hub.requested.append(file)
        self.send_response(status)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_blob(file)}"')
        self.send_header("Content-Length", "2")
        self.end_headers()
        if not head:
            self.wfile.write(b"{}")

    def _json(self, status: int, body: object, *headers: tuple[str, str]) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(status)
        for header in (*headers, ("Content-Type", "application/json"), ("Content-Length", str(len(encoded)))):
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(encoded)


def resolve_beside(endpoint: str, cache: Path, name: str, load_format: str, **env: str) -> tuple[str, str]:
    """What `resolve` in its own process prints, and its errors: the client reads its endpoint at import."""
    code = (
        "import sys; from rose.model_source import resolve; from rose.errors import ModelLoadError\n"
        "try: m = resolve(*sys.argv[1:]); print(m.path, m.revision, m.origin)\n"
        "except ModelLoadError as e: print(e, file=sys.stderr)"
    )
    return run_beside(endpoint, cache, code, name, load_format, **env)


def run_beside(endpoint: str, cache: Path, code: str, *arguments: str, **env: str) -> tuple[str, str]:
    """What `code` prints, and its errors."""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=root,
        env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"} | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip(), done.stderr.strip()

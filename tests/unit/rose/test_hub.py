"""Downloads from a hub on loopback: only what serving needs, at one commit; from the cache when offline."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from rose.hub import wanted_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = (
    "1_Pooling/config.json",
    "README.md",
    "config.json",
    "model.safetensors",
    "modules.json",
    "onnx/model.onnx",
    "onnx/tokenizer.json",
    "openvino/model.safetensors",
    "pytorch_model.bin",
    "tf_model.h5",
    "tokenizer.json",
)


def _blob(file: str) -> str:
    """A git object name, another for every file, as if their contents differed."""
    return hashlib.sha1(file.encode()).hexdigest()


class _Hub(BaseHTTPRequestHandler):
    """The few answers of a model hub that its client asks for; `requested` holds the files it fetched."""

    requested: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self._file(head=True)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/name/tree/"):
            tree = [{"type": "file", "path": file, "size": 2, "oid": _blob(file)} for file in FILES]
            self._json(200, tree)
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": file} for file in FILES]
            self._json(200, {"id": "org/name", "_id": "1", "sha": COMMIT, "siblings": siblings})
        elif path.startswith("/org/name/resolve/"):
            self._file(head=False)
        else:
            self._json(404, {"error": "Repository not found"}, ("X-Error-Code", "RepoNotFound"))

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Quiet."""

    def _file(self, *, head: bool) -> None:
        file = self.path.split("/resolve/")[1].partition("/")[2]
        if not head:
            self.requested.append(file)
        self.send_response(200)
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


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    _Hub.requested.clear()
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(5)


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


def test_only_what_serving_needs_is_downloaded_and_then_kept(hub: str, tmp_path: Path) -> None:
    out, errors = resolve_beside(hub, tmp_path, "org/name", "auto")
    folder, revision, origin = out.split(" ", 2)
    assert (revision, origin) == (COMMIT, "hub org/name"), errors
    assert sorted(_Hub.requested) == [
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
        "modules.json",
        "tokenizer.json",
    ]
    assert (Path(folder) / "1_Pooling" / "config.json").read_text() == "{}"

    again, _ = resolve_beside(hub, tmp_path, "org/name", "auto", HF_HUB_OFFLINE="1")
    assert again.startswith(f"{folder} {COMMIT}")


def test_dummy_weights_need_no_download_of_weights(hub: str, tmp_path: Path) -> None:
    out, errors = resolve_beside(hub, tmp_path, "org/name@main", "dummy")
    assert COMMIT in out, errors
    assert not any("model.safetensors" in file for file in _Hub.requested)
    assert "config.json" in _Hub.requested


@pytest.mark.parametrize(
    ("flags", "downloads"),
    [("--no-engine --replica http://a", False), ("--replica http://a", True), ("", True)],
)
def test_a_gateway_without_an_engine_downloads_no_weights(
    hub: str, tmp_path: Path, flags: str, downloads: bool
) -> None:
    code = "import sys, server; print(server.model_of(server.parse_options(sys.argv[1:])).find().origin)"
    out, errors = run_beside(hub, tmp_path, code, "--model", "org/name", *flags.split())
    assert out == "hub org/name", errors
    assert ("model.safetensors" in _Hub.requested) is downloads
    assert {"config.json", "tokenizer.json"} <= {*_Hub.requested}


def test_a_repository_that_is_not_there_is_named(hub: str, tmp_path: Path) -> None:
    out, errors = resolve_beside(hub, tmp_path, "org/other", "auto")
    assert out == ""
    assert errors == "the hub shows no model org/other; if it is private, set HF_TOKEN"


@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_a_network_the_message_names_every_way_out(tmp_path: Path, offline: str) -> None:
    closed_port = "http://127.0.0.1:9"
    out, errors = resolve_beside(closed_port, tmp_path, "bge-m3", "auto", HF_HUB_OFFLINE=offline)
    assert out == ""
    assert errors.count("\n") == 0
    for way in ("cannot reach the hub for BAAI/bge-m3", "folder", "--model minilm", "--load-format dummy"):
        assert way in errors


def test_one_form_of_the_weights_is_chosen() -> None:
    both = ["config.json", "model.safetensors", "pytorch_model.bin"]
    assert wanted_files(both, "auto") == ["config.json", "model.safetensors"]
    pickled = ["config.json", "pytorch_model.bin", "2_Dense/model.safetensors"]
    assert "pytorch_model.bin" in wanted_files(pickled, "auto")
    assert wanted_files(["config.json", "pytorch_model.bin"], "safetensors") == ["config.json"]
    shards = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert wanted_files([*shards, "original/model.safetensors"], "auto") == shards


def test_heads_over_tokens_come_with_the_weights() -> None:
    heads = ["sparse_linear.pt", "colbert_linear.pt"]
    listed = ["config.json", "pytorch_model.bin", "onnx/sparse_linear.pt", "optimizer.pt", *heads]
    assert wanted_files(listed, "auto") == ["config.json", "pytorch_model.bin", *heads]
    for load_format in ("dummy", "safetensors"):
        assert wanted_files(listed, load_format) == ["config.json"]

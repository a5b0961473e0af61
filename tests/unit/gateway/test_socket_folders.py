"""Folders of engines' sockets: a killed gateway's is removed by the next one, a living one's is not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.replicas.folders import SocketFolder
from tests.programs import ROOT

GATEWAY = """
import socket, time
from gateway.replicas.folders import SocketFolder
folder = SocketFolder()
socket.socket(socket.AF_UNIX).bind(str(folder.path / "0.sock"))
print(folder.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def above(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stands for /tmp; short, as sockets' paths must be."""
    with tempfile.TemporaryDirectory(prefix="f") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def aged(folder: Path) -> Path:
    os.utime(folder, (0, 0))
    return folder


def test_a_killed_gateway_s_folder_is_removed_once_it_is_gone(above: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", GATEWAY], cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        theirs = aged(Path(process.stdout.readline().strip()))
        assert theirs.parent == above
        first = SocketFolder()
        assert (theirs / "0.sock").is_socket(), "its process lives"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert theirs.exists()
    second = SocketFolder()
    assert sorted(above.iterdir()) == sorted([first.path, second.path])
    second.leave()
    assert not second.path.exists()


def test_what_is_not_ours_or_young_stays(above: Path) -> None:
    for name in ("bouquet-mine", "bouquet-new", "other", "bouquet-old"):
        (above / name).mkdir()
    (above / "bouquet-mine" / "notes").write_text("")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(above / "other" / "0.sock"))
    (above / "bouquet-link").symlink_to(above / "other")
    for name in ("bouquet-mine", "other", "bouquet-old"):
        aged(above / name)
    mine = SocketFolder()
    left = {path.name for path in above.iterdir()} - {mine.path.name}
    assert left == {"bouquet-mine", "bouquet-new", "other", "bouquet-link"}
    assert (above / "other" / "0.sock").is_socket()

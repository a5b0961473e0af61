"""Where and to whom a server process listens: unix sockets, HTTPS, keys from files, pages from elsewhere."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import ssl
import subprocess
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.server_process import FAKE, ServerProcess, run_to_end

DUMMY = ("--load-format", "dummy", "--port", "0")
BODY = json.dumps({"input": [1, 2]})


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def ask(connection: http.client.HTTPConnection, key: str | None = None) -> int:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connection.request("POST", "/v1/embeddings", BODY, headers)
    response = connection.getresponse()
    response.read()
    return response.status


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "bouquet.sock"
    with ServerProcess(*DUMMY, "--uds", str(path), program=FAKE) as server:
        assert f" at {path}: " in server.wait_for("ready after ")
        assert server.wait_for("curl -s ").startswith(f"curl -s --unix-socket {path} http://localhost/v1/")
        connection = UnixConnection(path)
        assert ask(connection) == 200
        connection.close()
        status, lines = run_to_end(*DUMMY, "--uds", str(path), program=FAKE)
        assert status == 1
        assert "another process listens there" in lines[0]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert not path.exists()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext"
    files = ("-keyout", str(key), "-out", str(certificate))
    subprocess.run(
        [*command.split(), "subjectAltName=IP:127.0.0.1", *files], check=True, capture_output=True, timeout=60
    )
    flags = ("--tls-cert", str(certificate), "--tls-key", str(key))
    with ServerProcess(*DUMMY, *flags, program=FAKE) as server:
        port = int(server.wait_for("ready after ").partition(" at https://127.0.0.1:")[2].partition(":")[0])
        context = ssl.create_default_context(cafile=str(certificate))
        assert ask(http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)) == 200
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(http.client.HTTPConnection("127.0.0.1", port, timeout=30))


def test_a_bad_certificate_ends_the_start_in_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    status, lines = run_to_end(*DUMMY, "--tls-cert", str(missing), program=FAKE)
    assert (status, len(lines)) == (2, 1)
    assert str(missing) in lines[0]
    missing.write_text("no PEM")
    status, lines = run_to_end(*DUMMY, "--tls-cert", str(missing), program=FAKE)
    assert (status, len(lines)) == (1, 1)
    assert str(missing) in lines[0]
    status, lines = run_to_end(*DUMMY, "--tls-key", str(missing), program=FAKE)
    assert (status, len(lines)) == (2, 1)


def test_keys_from_flag_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the team's\nfrom file\n\n  second  \n")
    flags = ("--api-key", "from flag", "--api-key-file", str(file))
    with ServerProcess(*DUMMY, *flags, program=FAKE, env={"BOUQUET_API_KEY": "from environment"}) as server:
        server.ready()
        for key in ("from flag", "from file", "second", "from environment"):
            assert ask(server.connect(), key) == 200, key
        for key in ("# the team's", "from", None):
            assert ask(server.connect(), key) == 401, key
        assert not [line for line in server.stdout if "from file" in line]


@pytest.mark.parametrize("content", ["", "# nothing\n\n", None])
def test_a_key_file_without_keys_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    status, lines = run_to_end(*DUMMY, "--api-key-file", str(file), program=FAKE)
    assert (status, len(lines)) == (2, 1)
    assert str(file) in lines[0]


def most_waiting() -> int:
    return int(Path("/proc/sys/net/core/somaxconn").read_text())


@pytest.mark.skipif(most_waiting() < 4096, reason="the kernel lets fewer connections wait")
def test_connections_that_come_while_the_process_stands_still_wait_for_it() -> None:
    """2000 of them; what the kernel drops would try again after a second, or be reset."""
    with ServerProcess(*DUMMY, program=FAKE) as server, ExitStack() as open_ones:
        port = urlsplit(server.ready().url).port
        server.signal(signal.SIGSTOP)
        try:
            for _ in range(2000):
                open_ones.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.9))
        finally:
            server.signal(signal.SIGCONT)
        assert ask(server.connect()) == 200

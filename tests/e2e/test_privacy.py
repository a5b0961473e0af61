"""What a server writes down of those it serves, unless told to: nothing."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.fake_server import DEADLY
from tests.e2e.server_process import FAKE, ServerProcess
from tests.http.served import byte_backend

pytestmark = pytest.mark.timeout(60)

TEXT, PATH, QUERY = "my-illness-is-secret", "/my-secret-path", "query-of-mine"
KEY, ID = "key-of-mine", "id-of-mine"
SECRETS = (TEXT, PATH, KEY, ID, QUERY, "424242")


@contextmanager
def started(folder: Path) -> Iterator[ServerProcess]:
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(byte_backend().to_str())
    flags = ("--load-format", "dummy", "--port", "0", "--api-key", KEY, "--tokenizer", str(tokenizer))
    with ServerProcess(*flags, program=FAKE) as process:
        yield process.ready()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with started(tmp_path_factory.mktemp("privacy")) as process:
        yield process


@pytest.fixture
def ending(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server for one test, which ends it."""
    with started(tmp_path) as process:
        yield process


def ask(
    server: ServerProcess, method: str, path: str, body: object, **headers: str
) -> http.client.HTTPResponse:
    connection = server.connect()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {KEY}",
        "x-request-id": ID,
        **headers,
    }
    connection.request(method, f"{path}?q={QUERY}", data, given)
    answer = connection.getresponse()
    answer.read()
    return answer


def test_nothing_of_a_client_s_is_written_down(ending: ServerProcess) -> None:
    work = "/v1/embeddings"
    assert ask(ending, "POST", work, {"input": TEXT}).status == 200
    assert ask(ending, "POST", work, {"input": [TEXT, ""]}).status == 400
    assert ask(ending, "POST", work, {"input": TEXT, "model": TEXT}).status == 404
    assert ask(ending, "POST", work, {"input": [424242]}).status == 400
    assert ask(ending, "POST", work, TEXT.encode()).status == 400
    assert ask(ending, "POST", work, {"input": TEXT}, Authorization=f"Bearer {TEXT}").status == 401
    assert ask(ending, "GET", PATH, b"").status == 404
    assert ask(ending, "BREW", PATH, b"").status == 400
    assert ask(ending, "POST", work, {"input": [DEADLY]}).status == 503
    ending.wait()
    written = "\n".join(ending.stdout + ending.stderr)
    assert [secret for secret in SECRETS if secret in written] == []


def test_a_client_s_words_are_in_no_metric(server: ServerProcess) -> None:
    ask(server, "POST", "/v1/embeddings", {"input": TEXT})
    ask(server, "GET", PATH, b"")
    connection = server.connect()
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    assert [secret for secret in SECRETS if secret in page] == []


@pytest.mark.parametrize("method", ["POST", "OPTIONS", "GET", "BREW"])
def test_answers_name_no_version(server: ServerProcess, method: str) -> None:
    for path in ("/v1/embeddings", "/health", PATH):
        answer = ask(server, method, path, {"input": TEXT})
        assert answer.getheader("Server") == "bouquet", (method, path)
        assert "aiohttp" not in str(answer.getheaders()) and "Python" not in str(answer.getheaders())

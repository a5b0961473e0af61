"""What a server writes down of those it serves, unless told to: nothing."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fake_server import DEADLY
from tests.e2e.server_process import FAKE, ServerProcess
from tests.http.served import byte_backend

pytestmark = pytest.mark.timeout(60)

TEXT, PATH, QUERY = "my-illness-is-secret", "/my-secret-path", "query-of-mine"
KEY, ID = "key-of-mine", "id-of-mine"
SECRETS = (TEXT, PATH, KEY, ID, QUERY, "424242")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(byte_backend().to_str())
    flags = ("--load-format", "dummy", "--port", "0", "--api-key", KEY, "--tokenizer", str(tokenizer))
    with ServerProcess(*flags, program=FAKE) as process:
        yield process.ready()


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


def test_nothing_of_a_client_s_is_written_down(server: ServerProcess) -> None:
    work = "/v1/embeddings"
    assert ask(server, "POST", work, {"input": TEXT}).status == 200
    assert ask(server, "POST", work, {"input": [TEXT, ""]}).status == 400
    assert ask(server, "POST", work, {"input": TEXT, "model": TEXT}).status == 404
    assert ask(server, "POST", work, {"input": [424242]}).status == 400
    assert ask(server, "POST", work, TEXT.encode()).status == 400
    assert ask(server, "POST", work, {"input": TEXT}, Authorization=f"Bearer {TEXT}").status == 401
    assert ask(server, "GET", PATH, b"").status == 404
    assert ask(server, "BREW", PATH, b"").status == 400
    assert ask(server, "POST", work, {"input": [DEADLY]}).status == 503
    server.wait()
    written = "\n".join(server.stdout + server.stderr)
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

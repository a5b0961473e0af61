"""How a request ends when it is not served: statuses, error bodies, and a connection that lives on."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from typing import Any

import numpy as np
import pytest

from gateway.options import GatewayOptions
from rose.batch import BatchResult
from rose.errors import EngineDeadError, OutOfMemoryError, StepError
from scheduler.options import SchedulerOptions
from tests.fakes import FakeEngine
from tests.http.served import PATHS, Served, serving, until
from tests.wire import first_answer

NO_JSON = [
    ("nothing", b"", "truncated"),
    ("half an object", b'{"input": "a"', "13 bytes"),
    ("a word", b'{"input": ?}', "(byte 10)"),
    ("NaN", b'{"input": "a", "dimensions": NaN}', "(byte 29)"),
    ("two values", b'{"input": "a"} 1', "(byte 16)"),
    ("a list", b'["a"]', "Expected `object`"),
    ("null", b"null", "Expected `object`"),
    ("bytes that are no UTF-8", b'{"input": "\xff"}', "UTF-8"),
    ("half of a surrogate pair", b'{"input": "\\ud800"}', "surrogate pair (byte 17)"),
    ("half of one before others", b'{"input": "\\ud800, and more"}', "surrogate pair (byte 17)"),
    ("a second half", b'{"input": "\\ude00"}', "surrogate pair (byte 17)"),
    ("half of one before a quote", b'{"input": "\\uD83D\\""}', "surrogate pair (byte 17)"),
    ("no half, but a backslash", b'{"input": "\\\\ud800', "truncated (in a body of 18 bytes)"),
    ("an open string", b'{"input": "\\u00e9', "truncated (in a body of 17 bytes)"),
    ("another encoding", '{"input": "a"}'.encode("utf-16"), "(byte 0)"),
    ("a number of 5000 digits", b'{"input": [' + b"9" * 5000 + b"]}", "$.input[0]"),
    ("a number out of range", b'{"input": "a", "dimensions": 1e999}', "$.dimensions"),
    ("nested too deeply", b'{"x": ' + b"[" * 100_000, "nested too deeply"),
]
NO_MSGPACK = [
    ("nothing", b"", "truncated"),
    ("an unused byte", b"\x81\xa1x\xc1", "(byte 3)"),
    ("a list of four billion items", b"\x81\xa5input\xdd\xff\xff\xff\xff", "truncated"),
    ("a map of four billion entries", b"\xdf\xff\xff\xff\xff", "truncated"),
    ("text that is no UTF-8", b"\x81\xa5input\xa1\xff", "UTF-8"),
    ("trailing bytes", b"\x81\xa5input\xa1ax", "(byte 9)"),
    ("numbers as keys", b"\x81\x01\x02", "Expected `str`"),
    ("nested too deeply", b"\x81\xa1x" + b"\x91" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(
    ("codec", "body", "words"),
    [
        *(pytest.param("application/json", *case[1:], id=f"json: {case[0]}") for case in NO_JSON),
        *(pytest.param("application/msgpack", *case[1:], id=f"msgpack: {case[0]}") for case in NO_MSGPACK),
    ],
)
async def test_a_body_that_cannot_be_read_is_400_with_its_place(
    server: Served, codec: str, body: bytes, words: str
) -> None:
    reply = await server.send("POST", PATHS[0], data=body, headers={"Content-Type": codec})
    assert (reply.status, reply.error["code"]) == (400, "invalid_body")
    assert words in reply.error["message"]
    await server.assert_works()


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
async def test_other_content_types_are_415(server: Served, content_type: str) -> None:
    reply = await server.send("POST", PATHS[0], data=b'{"input":"a"}', headers={"Content-Type": content_type})
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
    assert content_type in reply.error["message"]


@pytest.mark.parametrize("how", ["announced", "chunked", "compressed"])
async def test_a_body_over_the_limit_is_413_and_the_connection_lives(how: str) -> None:
    async with serving(GatewayOptions(max_body_bytes=100_000)) as server:
        body = json.dumps({"input": [1], "user": "x" * 200_000}).encode()
        headers = {"Content-Type": "application/json"}
        if how == "compressed":
            body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
            assert len(body) < 100_000
        data: Any = _chunks(body) if how == "chunked" else body
        port = None
        for _ in range(2):
            async with server.session.post(PATHS[0], data=data, headers=headers) as answer:
                assert answer.status == 413
                assert (await answer.json())["error"]["code"] == "body_too_large"
                assert "100000 bytes" in (await answer.json())["error"]["message"]
            data = _chunks(body) if how == "chunked" else body
            # The second request came over the first one's connection.
            own = _client_ports(server)
            port = port or own
            assert own == port
        await server.assert_works()
        assert _client_ports(server) == port


def _client_ports(server: Served) -> set[int]:
    """Local ports of the connections that the client's pool keeps open."""
    pools = server.session.connector._conns.values()  # type: ignore[union-attr]
    return {protocol.transport.get_extra_info("sockname")[1] for pool in pools for protocol, _ in pool}


async def _chunks(body: bytes) -> Any:
    for start in range(0, len(body), 10_000):
        yield body[start : start + 10_000]


async def test_a_body_at_the_limit_is_served() -> None:
    body = json.dumps({"input": [1], "user": ""}).encode()
    async with serving(GatewayOptions(max_body_bytes=1000)) as server:
        exact = body[:-2] + b"x" * (1000 - len(body)) + body[-2:]
        headers = {"Content-Type": "application/json"}
        assert (await server.send("POST", PATHS[0], data=exact, headers=headers)).status == 200
        assert (await server.send("POST", PATHS[0], data=exact + b" ", headers=headers)).status == 413


async def test_compressed_bodies_are_read_and_broken_ones_are_400(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    good = gzip.compress(b'{"input":[1,2]}')
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert (await server.send("POST", PATHS[0], data=good, headers=headers)).status == 200
    reply = await server.send("POST", PATHS[0], data=b"\x1f\x8b\x08nonsense", headers=headers)
    assert (reply.status, reply.error["code"]) == (400, "invalid_body")
    assert not caplog.records
    await server.assert_works()
    assert server.connections == 1


HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
NO_HTTP = [
    ("a negative length", HEAD + b"Content-Length: -1\r\n\r\n"),
    ("two lengths", HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n"),
    ("no method", b"BREW /v1/embeddings HTTP/1.1\r\nHost: x\r\n\r\n"),
    ("too long a path", b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
    ("no HTTP at all", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
]


@pytest.mark.parametrize("data", [case[1] for case in NO_HTTP], ids=[case[0] for case in NO_HTTP])
async def test_what_is_no_http_is_400_and_no_noise_in_the_log(
    server: Served, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    async with asyncio.timeout(5):
        answer = first_answer(await reader.read())
    assert (answer.status, answer.code) == (400, "invalid_http")
    assert answer.headers["content-type"] == "application/json"
    writer.close()
    await until(lambda: server.connections == 0)
    assert not caplog.records
    await server.assert_works()


@pytest.mark.parametrize(
    "path", ["/x", "/v1", "/v1/embeddings/", "/v2/embeddings", "/v1/embeddings/x", "/%00"]
)
async def test_unknown_paths_are_404_in_json(server: Served, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        reply = await server.send(method, path)
        assert (reply.status, reply.error["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("path", "method", "allow"),
    [
        ("/v1/embeddings", "GET", "POST, OPTIONS"),
        ("/embeddings", "PUT", "POST, OPTIONS"),
        ("/v1/models", "POST", "GET, HEAD, OPTIONS"),
        ("/health", "DELETE", "GET, HEAD, OPTIONS"),
        ("/ready", "POST", "GET, HEAD, OPTIONS"),
        ("/info", "PATCH", "GET, HEAD, OPTIONS"),
    ],
)
async def test_other_methods_are_405_and_options_tells(
    server: Served, path: str, method: str, allow: str
) -> None:
    reply = await server.send(method, path)
    assert (reply.status, reply.error["code"], reply.headers["Allow"]) == (405, "method_not_allowed", allow)
    reply = await server.send("OPTIONS", path)
    assert (reply.status, reply.headers["Allow"]) == (204, allow)


async def test_models_go_by_their_served_names() -> None:
    async with serving(GatewayOptions(served_model_names=("small", "alias"))) as server:
        for asked, answered in (("small", "small"), ("alias", "alias"), (None, "small")):
            reply = await server.embed({"input": [1], "model": asked})
            assert reply.value["model"] == answered
        reply = await server.embed({"input": [1], "model": "fake"})
        assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
        assert "'fake'" in reply.error["message"]
        assert "small, alias" in reply.error["message"]
        listed = (await server.send("GET", "/v1/models")).value
        assert [(model["id"], model["root"]) for model in listed["data"]] == [
            ("small", "fake"),
            ("alias", "fake"),
        ]


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (StepError("kernel broke"), 500, "inference_failed"),
        (OutOfMemoryError("no memory"), 503, "out_of_memory"),
    ],
)
async def test_a_failed_step_fails_its_request_only(
    server: Served, failure: StepError, status: int, code: str
) -> None:
    server.engine.fail_next(failure)
    reply = await server.embed({"input": [1]})
    assert (reply.status, reply.error["code"], reply.error["type"]) == (status, code, "server_error")
    assert str(failure) in reply.error["message"]
    await server.assert_works()


async def test_a_dead_engine_is_503_and_the_connection_closes(server: Served) -> None:
    server.engine.raise_next(EngineDeadError("the device fell off the bus"))
    for _ in range(2):
        reply = await server.embed({"input": [1]})
        assert (reply.status, reply.error["code"]) == (503, "unavailable")
        assert reply.headers["Connection"] == "close"
    assert "fell off the bus" in reply.error["message"]


async def test_a_draining_server_is_503_and_the_connection_closes(server: Served) -> None:
    await server.batcher.close(0.0)
    reply = await server.embed({"input": [1]})
    assert (reply.status, reply.headers["Connection"]) == (503, "close")


async def test_a_full_queue_is_429_with_a_time_to_retry() -> None:
    engine = FakeEngine(service_s=None)
    scheduling = SchedulerOptions(max_in_flight=1, max_waiting_seqs=1)
    async with serving(engine=engine, scheduling=scheduling) as server:
        accepted = [asyncio.ensure_future(server.embed({"input": [1]}))]
        await until(lambda: len(engine.running) == 1)
        accepted.append(asyncio.ensure_future(server.embed({"input": [2]})))
        await until(lambda: server.batcher.metrics.waiting_seqs == 1)
        reply = await server.embed({"input": [3]})
        assert (reply.status, reply.error["code"], reply.error["type"]) == (
            429,
            "overloaded",
            "rate_limit_error",
        )
        assert int(reply.headers["Retry-After"]) >= 1
        assert int(reply.headers["retry-after-ms"]) >= 1
        engine.finish()
        await until(lambda: len(engine.running) == 1)
        engine.finish()
        assert [(await one).status for one in accepted] == [200, 200]


async def test_a_request_that_waits_too_long_is_504() -> None:
    engine = FakeEngine(service_s=None)
    options = GatewayOptions(request_timeout_s=0.05)
    async with serving(options, engine=engine, scheduling=SchedulerOptions(max_in_flight=1)) as server:
        running = asyncio.ensure_future(server.embed({"input": [1]}))
        await until(lambda: len(engine.running) == 1)
        reply = await server.embed({"input": [2]})
        assert (reply.status, reply.error["code"]) == (504, "deadline_expired")
        engine.finish()
        assert (await running).status == 200  # it had been started in time
        assert len(engine.batches) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("normalize", [True, False])
async def test_vectors_that_are_not_finite_are_never_served(
    server: Served, monkeypatch: pytest.MonkeyPatch, value: float, normalize: bool
) -> None:
    vectors = np.ones((2, 8), np.float32)
    vectors[1, 5] = value
    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "_outcome", lambda *_: BatchResult(vectors))
        for encoding in ("float", "base64", "bytes"):
            body = {"input": [[1], [2]], "normalize": normalize, "encoding_format": encoding}
            reply = await server.embed(body)
            assert (reply.status, reply.error["code"]) == (500, "non_finite_output")
            assert "input[1]" in reply.error["message"]
    await server.assert_works()


@pytest.mark.interpreted
async def test_a_defect_of_ours_is_500_logged_and_not_told(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("a secret")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(server.batcher, "run", broken)
        reply = await server.embed({"input": [1]})
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert "secret" not in reply.error["message"]
    assert "a secret" in caplog.text
    await server.assert_works()


async def test_one_connection_survives_every_refusal(server: Served) -> None:
    """The field's killers, one after another over one connection, then a good request."""
    bad: list[Any] = [{"input": value} for value in ("", [], ["a", ""], [[]], None, [[99_999_999]], [-1])]
    bad += [{}, {"input": "a" * 9000}, {"input": "a", "encoding_format": "xml"}]
    ports = set()
    for body in bad:
        reply = await server.embed(body)
        assert reply.status == 400
        ports |= _client_ports(server)
    await server.assert_works()
    assert len(ports | _client_ports(server)) == 1

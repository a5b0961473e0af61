"""Traces of a server process: the last ones leave when it ends; a collector that hangs does not hold it."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.e2e.server_process import FAKE, ServerProcess


@contextmanager
def collector(posted: list[bytes]) -> Iterator[str]:
    """An OTLP collector that keeps what it gets; its URL."""

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("by", ["flag", "environment"])
def test_the_last_traces_leave_when_the_server_ends(by: str) -> None:
    posted: list[bytes] = []
    with collector(posted) as url:
        flags = ["--otlp-endpoint", url] if by == "flag" else []
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_SERVICE_NAME": "ours"} if by == "environment" else {}
        env |= {"OTEL_BSP_SCHEDULE_DELAY": "60000"}
        with ServerProcess("--port", "0", "--load-format", "dummy", *flags, program=FAKE, env=env) as server:
            server.ready()
            assert server.post("/v1/embeddings", {"input": [5, 6]})[0] == 200
            assert not posted
            server.signal(signal.SIGTERM)
            assert server.wait(20) == 0
    assert len(posted) == 1
    assert b"POST /v1/embeddings" in posted[0]
    assert (b"ours" if by == "environment" else b"bouquet") in posted[0]


@pytest.mark.timeout(60)
def test_a_collector_that_hangs_costs_no_answer_and_holds_no_shutdown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # takes connections and says nothing
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        flags = ("--port", "0", "--load-format", "dummy", "--drain-s", "1", "--otlp-endpoint", url)
        with ServerProcess(*flags, program=FAKE, env={"OTEL_BSP_SCHEDULE_DELAY": "10"}) as server:
            server.ready()
            for _ in range(20):
                assert server.post("/v1/embeddings", {"input": [5, 6]})[0] == 200
            server.signal(signal.SIGTERM)
            started_s = time.perf_counter()
            assert server.wait(20) == 0
            assert time.perf_counter() - started_s < 1 + 5 + 4  # --drain-s, CLOSE_S, and a slow machine
            assert any("traces could not be sent" in line for line in server.stdout)

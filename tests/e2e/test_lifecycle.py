"""A server process from command line to exit status, over a scripted engine: half a second a start."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.e2e.fake_server import DEADLY, HANGING, SLOW, SLOW_LOAD_SEED
from tests.e2e.server_process import FAKE, ServerProcess, run_to_end

DUMMY = ("--load-format", "dummy", "--port", "0")
EMBED = "/v1/embeddings"


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*DUMMY, program=FAKE) as process:
        yield process.ready()


@pytest.fixture
def taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield str(taken.getsockname()[1])


def ask_for(server: ServerProcess, *ids: int) -> http.client.HTTPConnection:
    """A connection whose request for `ids` has been sent and is not answered yet."""
    connection = server.connect()
    connection.request("POST", EMBED, json.dumps({"input": list(ids)}), {"Content-Type": "application/json"})
    return connection


def steps_launched(server: ServerProcess, at_least: int) -> None:
    """Wait until the engine has been given that many steps since it was started."""
    deadline = time.monotonic() + 20
    while server.get("/info")[1]["engine"]["steps"] < at_least:
        assert time.monotonic() < deadline


def test_settings_are_printed_in_one_block_and_served_without_keys() -> None:
    flags = (*DUMMY, "--api-key", "sesame", "--max-items", "7", "--served-model-name", "rose")
    with ServerProcess(*flags, program=FAKE, env={"BOUQUET_API_KEY": "mellon"}) as server:
        server.ready()
        block = "\n".join(server.stdout[:6])
        assert server.stdout[0].startswith("bouquet ")
        assert [line.split()[0] for line in server.stdout[1:6]] == [
            "server",
            "listen",
            "engine",
            "scheduler",
            "gateway",
        ]
        assert "max_items=7" in block
        assert "api_keys=2" in block
        status, info = server._ask("GET", "/info", None, {"Authorization": "Bearer mellon"})
        assert status == 200
        assert info["settings"]["gateway"]["max_items"] == 7
        assert info["settings"]["loop"].split(":")[0] in ("compiled", "interpreted")
        assert info["settings"]["gateway"]["api_keys"] == 2
        everything = "\n".join(server.stdout + server.stderr) + json.dumps(info)
        assert "sesame" not in everything
        assert "mellon" not in everything
        assert '"model": "rose"' in server.wait_for("curl ")
        assert server.post(EMBED, {"input": [1]})[0] == 401
        assert server.post(EMBED, {"input": [1]}, {"Authorization": "Bearer sesame"})[0] == 200


def test_without_a_tokenizer_text_is_refused_and_ids_are_taken(server: ServerProcess) -> None:
    status, answer = server.post(EMBED, {"input": "text"})
    assert status == 400
    assert "no tokenizer" in answer["error"]["message"]
    assert server.post(EMBED, {"input": [1, 2, 3]})[0] == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_accepted_work_finish_and_refuses_new(
    server: ServerProcess, number: signal.Signals
) -> None:
    kept_open = server.connect()
    kept_open.request("GET", "/ready")
    assert kept_open.getresponse().read()
    accepted = ask_for(server, SLOW)
    steps_launched(server, 3)
    server.signal(number)
    server.wait_for("draining")
    kept_open.request("GET", "/ready")
    refused = kept_open.getresponse()
    assert refused.status == 503
    assert b"shutting down" in refused.read()
    answer = accepted.getresponse()
    assert answer.status == 200
    assert json.loads(answer.read())["data"]
    assert server.wait() == 0
    assert server.stderr == []


@pytest.mark.timed
def test_an_idle_server_ends_at_once(server: ServerProcess) -> None:
    server.signal(signal.SIGTERM)
    started = time.monotonic()
    assert server.wait() == 0
    assert time.monotonic() - started < 3


def test_a_signal_ends_a_load_that_cannot_be_interrupted() -> None:
    with ServerProcess(*DUMMY, "--seed", str(SLOW_LOAD_SEED), program=FAKE) as server:
        server.wait_for("loading")
        server.signal(signal.SIGTERM)
        assert server.wait(5) == 0
        assert server.stderr == []


def test_a_drain_has_a_limit() -> None:
    with ServerProcess(*DUMMY, "--drain-s", "0.2", program=FAKE) as server:
        waiting = ask_for(server.ready(), HANGING)
        steps_launched(server, 3)
        server.signal(signal.SIGTERM)
        answer = waiting.getresponse()
        assert answer.status == 503
        assert b"within the time that a shutdown allows" in answer.read()
        assert server.wait() == 0


@pytest.mark.timed
def test_a_second_signal_ends_the_process_at_once(server: ServerProcess) -> None:
    waiting = ask_for(server, HANGING)
    steps_launched(server, 3)
    server.signal(signal.SIGTERM)
    server.wait_for("draining")
    began_s = time.monotonic()
    server.signal(signal.SIGTERM)
    assert server.wait(5) == 128 + signal.SIGTERM
    assert time.monotonic() - began_s < 1.0
    with pytest.raises(ConnectionError):
        waiting.getresponse()


def test_the_death_of_the_engine_fails_what_runs_and_ends_the_process(server: ServerProcess) -> None:
    status, answer = server.post(EMBED, {"input": [DEADLY]})
    assert status == 503
    assert "scripted death" in answer["error"]["message"]
    assert server.wait() == 3
    assert server.stderr == ["error: the engine is dead: scripted death"]


def test_a_taken_port_is_found_before_anything_is_loaded(taken_port: str) -> None:
    status, errors = run_to_end("--port", taken_port, "--model", "/no/such/model")
    assert status == 1
    assert errors == [
        f"error: cannot listen on 127.0.0.1:{taken_port}: another process listens there; "
        "choose another --port or --host"
    ]


def test_a_list_is_tokenised_by_as_many_threads_as_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by one for each core, by a library that starts its own."""
    words = Tokenizer(models.WordLevel({"word": 0, "other": 1}, unk_token="other"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    count = (os.cpu_count() or 1) + 3
    for name in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.delenv(name, raising=False)
    flags = ("--tokenizer", str(tmp_path), "--tokenizer-threads", str(count))
    with ServerProcess(*DUMMY, *flags, program=FAKE) as server:
        before = threads(server.ready().pid)
        assert server.post(EMBED, {"input": ["word " * 500] * 64})[0] == 200
        assert count <= threads(server.pid) - before <= count + 2  # and the one that waits for them


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{")
    status, errors = run_to_end(*DUMMY, "--tokenizer", str(broken), program=FAKE)
    assert (status, len(errors)) == (1, 1)
    assert str(broken) in errors[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "/no/such/folder"), "error: no such folder: /no/such/folder"),
        (("--host", "300.1.2.3"), "error: cannot listen on 300.1.2.3:0: "),
        (("--port", "65536"), "error: argument --port: 65536 is not in 0..65535"),
    ],
)
def test_what_cannot_start_says_so_in_one_line(flags: tuple[str, ...], words: str) -> None:
    status, errors = run_to_end("--port", "0", *flags, program=FAKE)
    assert status in (1, 2)
    assert len(errors) == 1, errors
    assert errors[0].startswith(words)


def test_a_hub_model_without_a_network_names_every_way_out(tmp_path: Path) -> None:
    env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    status, errors = run_to_end("--port", "0", "--model", "bge-m3", program=FAKE, env=env)
    assert (status, len(errors)) == (1, 1)
    for way in ("cannot reach the hub for BAAI/bge-m3", "a folder", "--model minilm", "--load-format dummy"):
        assert way in errors[0]

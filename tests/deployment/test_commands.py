"""The command lines in the files are ones that the server takes, and those that can be tried here are."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import server
from gateway.serving import CLOSE_S, ENGINE_DEAD
from tests.deployment import files
from tests.e2e.server_process import FAKE, ServerProcess

COMMANDS = dict(files.command_lines())
pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_exists_and_has_a_value_that_it_takes(name: str) -> None:
    options = server.parse_options(COMMANDS[name])
    assert options.listen.port == 8000
    assert not any("$" in word for word in COMMANDS[name])


@pytest.mark.parametrize("name", COMMANDS)
def test_containers_listen_for_others_and_a_bare_machine_for_itself(name: str) -> None:
    host = server.parse_options(COMMANDS[name]).listen.host
    assert host == ("127.0.0.1" if name == files.UNIT else "0.0.0.0")


def drain_s(name: str) -> float:
    return server.parse_options(COMMANDS[name]).drain_s


def test_who_ends_a_server_waits_longer_than_it_drains() -> None:
    assert float(files.unit()["Service"]["TimeoutStopSec"]) > drain_s(files.UNIT) + CLOSE_S
    [compose] = files.documents(files.COMPOSE)
    grace = compose["services"]["server"]["stop_grace_period"]
    for name in files.COMPOSES:
        assert float(grace.removesuffix("s")) > drain_s(name) + CLOSE_S
    for name in files.MANIFESTS:
        command, delay = files.container(name)["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        patience = files.pod(name)["terminationGracePeriodSeconds"]
        assert patience > float(delay) + drain_s(name) + CLOSE_S


def test_systemd_starts_again_what_may_come_back_and_nothing_else() -> None:
    service = files.unit()["Service"]
    assert service["Restart"] == "on-failure"
    clean = {int(status) for status in service["SuccessExitStatus"].split()}
    never = {int(status) for status in service["RestartPreventExitStatus"].split()}
    assert clean == {128 + signal.SIGINT, 128 + signal.SIGTERM}
    assert never == {server.BAD_USAGE}
    assert not {ENGINE_DEAD, server.START_FAILED} & (clean | never)


def test_the_unit_starts_answers_and_ends(tmp_path: Path) -> None:
    variables = files.unit_environment({"%C": str(tmp_path)})
    command = files.unit_command(variables)
    folder = files.unit()["Service"]["WorkingDirectory"]
    assert command[:2] == [f"{folder}/.venv/bin/python", "server.py"]
    flags = ["0" if word == "8000" else word for word in command[2:]]
    with ServerProcess(*flags, program=FAKE, env=variables) as process:
        process.ready()
        status, answer = process.post("/v1/embeddings", {"input": [[5, 6]]})
        assert (status, len(answer["data"])) == (200, 1)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    assert process.stderr == []


def test_the_image_starts_and_its_health_check_tells_life_from_death(tmp_path: Path) -> None:
    flags = ["0" if word == "8000" else word for word in COMMANDS["Dockerfile"]]
    folders = {"XDG_CACHE_HOME": str(tmp_path), "HF_HOME": str(tmp_path / "huggingface")}
    with ServerProcess(*flags, program=FAKE, env=folders) as process:
        process.ready()
        assert process.get("/ready")[0] == 200
        port = process.url.rpartition(":")[2]
        assert health_check("Dockerfile", port).returncode == 0
    assert health_check("Dockerfile", port).returncode != 0


def health_check(dockerfile: str, port: str) -> subprocess.CompletedProcess[bytes]:
    """Run it as Docker would."""
    command = json.loads(files.last(dockerfile, "HEALTHCHECK").partition("CMD")[2])
    assert command[0] == "python"
    words = [word.replace(":8000/", f":{port}/") for word in command[1:]]
    assert words != command[1:]
    return subprocess.run([sys.executable, *words], check=False, capture_output=True, timeout=20)

"""One replica's state, by a clock that is moved by hand; and what the command line says of replicas."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import pytest

import server
from gateway.replicas.endpoints import Endpoint, read_file, read_url
from gateway.replicas.flags import replica_options
from gateway.replicas.pace import ChunkTimes
from gateway.replicas.processes import child_processes
from gateway.replicas.replica import (
    FIRST_WINDOW_TOKENS,
    LEAST_WINDOW_TOKENS,
    MAX_FAILURES,
    MOST_WINDOW_TOKENS,
    WINDOW_S,
    Replica,
    State,
)

pytestmark = pytest.mark.timeout(20)


class Bench:
    """A replica and its clock. seen: its states, as they were told."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.seen: list[State] = []
        self.replica = Replica("r", ChunkTimes(), lambda replica: self.seen.append(replica.state), self.clock)

    def clock(self) -> float:
        return self.now_s

    def chunk(self, num_tokens: int, seconds: float) -> None:
        """One that comes back after `seconds`."""
        self.replica.sent(num_tokens, self.now_s)
        began_s, self.now_s = self.now_s, self.now_s + seconds
        self.replica.done(num_tokens, began_s, self.now_s)

    def fail(self, *, at_once: bool = False) -> None:
        self.replica.sent(10, self.now_s)
        self.replica.failed(10, "gone", at_once=at_once)


def ready() -> Bench:
    bench = Bench()
    bench.replica.admit(0.0)
    return bench


def test_a_new_replica_serves_once_a_probe_found_it_well() -> None:
    bench = Bench()
    assert not bench.replica.has_room(1, bench.now_s)
    bench.replica.admit(0.0)
    assert bench.replica.has_room(1, bench.now_s)
    assert bench.seen == [State.READY]


def test_failures_count_only_in_a_row() -> None:
    bench = ready()
    for _ in range(5):
        for _ in range(MAX_FAILURES - 1):
            bench.fail()
        bench.chunk(10, 0.01)
    assert bench.replica.state is State.READY
    for _ in range(MAX_FAILURES):
        bench.fail()
    assert bench.seen == [State.READY, State.EJECTED]
    assert (bench.replica.reason, bench.replica.ejections) == ("gone", 1)


def test_one_that_nobody_listens_at_is_out_at_once() -> None:
    bench = ready()
    bench.fail(at_once=True)
    assert bench.seen == [State.READY, State.EJECTED]


def test_half_open_takes_one_chunk_and_its_end_decides() -> None:
    for well in (True, False):
        bench = ready()
        bench.fail(at_once=True)
        bench.replica.admit(0.0)
        assert bench.replica.has_room(10_000, bench.now_s)
        bench.replica.sent(1, bench.now_s)
        assert not bench.replica.has_room(1, bench.now_s)
        if well:
            bench.replica.done(1, bench.now_s, bench.now_s + 0.01)
        else:
            bench.replica.failed(1, "gone", at_once=False)
        last = State.READY if well else State.EJECTED
        assert bench.seen == [State.READY, State.EJECTED, State.HALF_OPEN, last]


def test_what_comes_late_from_an_ejected_one_does_not_bring_it_back() -> None:
    bench = ready()
    bench.replica.sent(10, bench.now_s)
    bench.replica.eject("silent")
    bench.replica.done(10, bench.now_s, bench.now_s + 1)
    assert bench.replica.state is State.EJECTED
    assert bench.replica.outstanding_tokens == 0


def test_one_that_left_the_list_stays_away() -> None:
    bench = ready()
    bench.replica.leave()
    bench.replica.admit(0.0)
    bench.replica.eject("gone")
    bench.replica.refuse("another model")
    assert bench.seen == [State.READY, State.LEAVING]


def test_a_pause_ends_by_itself() -> None:
    bench = ready()
    bench.replica.pause(2.0, bench.now_s)
    bench.replica.pause(1.0, bench.now_s)
    assert not bench.replica.has_room(1, bench.now_s + 1.9)
    assert bench.replica.has_room(1, bench.now_s + 2.0)


@pytest.mark.parametrize(("tokens_per_s", "window"), [(100, 512), (40_000, 10_000), (1_000_000, 65_536)])
def test_under_way_is_what_it_does_in_a_moment(tokens_per_s: int, window: int) -> None:
    bench = ready()
    assert bench.replica.window_tokens == FIRST_WINDOW_TOKENS
    for _ in range(100):
        bench.chunk(1000, 1000 / tokens_per_s)
    assert bench.replica.window_tokens == pytest.approx(window, rel=0.01)
    assert LEAST_WINDOW_TOKENS <= bench.replica.window_tokens <= MOST_WINDOW_TOKENS
    assert bench.replica.tokens_per_s * WINDOW_S == pytest.approx(tokens_per_s * WINDOW_S, rel=0.01)


def test_a_hiccup_is_not_a_slow_replica_and_a_slow_replica_is_no_hiccup() -> None:
    times = ChunkTimes()
    replica, other = (Replica(name, times, lambda _: None, lambda: 0.0) for name in "ab")
    now_s = 0.0
    for number in range(200):
        for one in (replica, other):
            seconds = 5.0 if one is replica and number == 100 else 0.05
            one.sent(500, now_s)
            one.done(500, now_s, now_s + seconds)
            now_s += seconds
        assert replica.slowness < 2 * other.slowness
    for _ in range(30):
        for one, seconds in ((replica, 0.5), (other, 0.05)):
            one.sent(500, now_s)
            one.done(500, now_s, now_s + seconds)
            now_s += seconds
    assert replica.slowness > 4 * other.slowness


def test_small_chunks_are_not_slow_ones() -> None:
    times = ChunkTimes()
    small, large = (Replica(name, times, lambda _: None, lambda: 0.0) for name in "ab")
    now_s = 0.0
    for _ in range(50):
        for one, num_tokens, seconds in ((small, 8, 0.004), (large, 4096, 0.04)):
            one.sent(num_tokens, now_s)
            one.done(num_tokens, now_s, now_s + seconds)
            now_s += seconds
    assert small.slowness == pytest.approx(large.slowness, rel=0.01)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://host:8000", "http://host:8000"),
        ("https://host/", "https://host"),
        (" http://[::1]:80 ", "http://[::1]:80"),
        ("host:8000", None),
        ("http://host:99999", None),
        ("http://host:8000/v1", None),
        ("http://user@host:8000", None),
        ("ftp://host", None),
        ("http://host.with.a.dot.:80", "http://host.with.a.dot.:80"),
        ("http://host..twice:80", None),
        (f"http://{'h' * 64}:80", None),
        ("http://a b:80", None),
        ("http://host:0", None),
        ("http://[::1", None),
        ("", None),
    ],
)
def test_what_a_replica_s_url_is(text: str, url: str | None) -> None:
    if url is None:
        with pytest.raises(ValueError, match=r"no replica's URL like http://host:8000"):
            read_url(text)
    else:
        assert read_url(text) == url


def test_a_file_has_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "replicas"
    file.write_text("# first\nhttp://a:1\n\n http://b:2 \nhttp://a:1\n")
    assert read_file(file) == ["http://a:1", "http://b:2"]


def test_names_tell_replicas_apart() -> None:
    assert Endpoint("http://10.0.0.1:80", "10.0.0.1").name == "http://10.0.0.1:80"
    assert Endpoint("http://name:80", "10.0.0.1").name == "http://name:80 at 10.0.0.1"
    assert Endpoint("http://name:80", "::1").name == "http://name:80 at [::1]"


@pytest.mark.parametrize(
    ("flags", "devices"),
    [
        ("--device cuda:0,cuda:1", ("cuda:0", "cuda:1")),
        ("--replicas 3 --device cpu", ("cpu", "cpu", "cpu")),
        ("--replicas 2 --device cuda", ("cuda:0", "cuda:1")),
        ("--replicas 2 --device cuda:5,cuda:7", ("cuda:5", "cuda:7")),
        ("--replica http://a:1 --device cpu", ("cpu",)),
        ("--no-engine --replica http://a:1", ()),
    ],
)
def test_flags_say_which_engines_are_started(flags: str, devices: tuple[str, ...]) -> None:
    options = server.parse_options(flags.split()).replicas
    assert options is not None
    assert options.devices == devices


def test_without_them_the_engine_is_in_this_process() -> None:
    assert server.parse_options(["--device", "cuda:1"]).replicas is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--no-engine", "--no-engine: name replicas by --replica or --replica-file"),
        ("--no-engine --replicas 2", "there is no engine to have --replicas"),
        ("--replicas 0", "--replicas: 0"),
        ("--replicas 3 --device cuda:0,cuda:1", "--replicas: 3, but --device names 2"),
        ("--device cuda:0,", "'' is not auto, cpu, cuda or cuda:N"),
        ("--replica host:1", "no replica's URL"),
        ("--replica-file /no/such/file", "cannot read /no/such/file"),
    ],
)
def test_what_makes_no_sense_is_refused(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        server.parse_options(flags.split())
    assert words in capsys.readouterr().err


def test_the_key_is_read_from_the_environment_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUQUET_REPLICA_API_KEY", "hidden-key")
    options = server.parse_options(["--no-engine", "--replica", "http://a:1"])
    assert options.replicas is not None
    assert options.replicas.key == "hidden-key"
    assert "hidden-key" not in repr(server.describe(options))
    assert "hidden-key" not in repr(options)


@pytest.mark.parametrize(
    ("device", "visible", "seen", "variable"),
    [
        ("cuda:1", None, "cuda:0", "1"),
        ("cuda:1", "5,GPU-7", "cuda:0", "GPU-7"),
        ("cuda:2", "5,7", "cuda:0", "-1"),
        ("cuda:0", "", "cuda:0", "-1"),
        ("cpu", None, "cpu", None),
        ("auto", None, "auto", None),
    ],
)
async def test_an_engine_s_process_sees_its_own_gpu(
    device: str, visible: str | None, seen: str, variable: str | None
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    (child,) = child_processes(["python"], [device], environ)
    assert child._command[:3] == ["python", "--device", seen]
    assert child._env.get("CUDA_VISIBLE_DEVICES") == variable
    await child.stop(1.0)


def test_a_key_that_is_no_header_is_refused_and_its_ends_do_not_count() -> None:
    flags = ["--no-engine", "--replica", "http://a:1", "--replica-api-key"]
    with pytest.raises(ValueError, match="has a line break"):
        replica_options(server.build_parser().parse_args([*flags, "secret\nkey"]), {})
    found = replica_options(
        server.build_parser().parse_args(flags[:-1]), {"BOUQUET_REPLICA_API_KEY": "secret\n"}
    )
    assert found is not None
    assert found.key == "secret"


async def test_sockets_have_paths_that_the_kernel_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long := tmp_path / ("x" * 90)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    (child,) = child_processes(["python"], ["cpu"], {})
    assert child.endpoint.uds is not None
    assert len(str(child.endpoint.uds)) < 108
    await child.stop(1.0)
    assert not child.endpoint.uds.parent.exists()


async def test_an_engine_s_process_gets_what_concerns_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    line = (
        "--model m --port 1 --api-key k --device cuda:0,cuda:1 --max-batch-tokens 9 --replica http://a:1"
        " --max-waiting-tokens 7 --step-timeout-s 8 --cors-origin * --seed 3 --log-level error"
    )
    flags = line.split()
    monkeypatch.setattr(sys, "argv", ["server.py", *flags])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "server.py", *flags])
    monkeypatch.setenv("BOUQUET_API_KEY", "secret")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    children = server.engine_processes(server.parse_options(flags), ("cuda:0", "cuda:1"))
    assert [child.endpoint.name for child in children] == ["cuda:0 #0", "cuda:1 #1"]
    for child, gpu in zip(children, ("0", "1"), strict=True):
        assert child._command[:4] == [sys.executable, "-X", "dev", "server.py"]
        assert "BOUQUET_API_KEY" not in child._env
        own = server.parse_options(child._command[4:])
        assert (own.model, own.engine.device, own.engine.seed) == ("m", "cuda:0", 3)
        assert child._env["CUDA_VISIBLE_DEVICES"] == gpu  # so that it sees no other
        assert (own.engine.max_batch_tokens, own.scheduler.step_timeout_s) == (9, 8)
        assert own.listen.uds == child.endpoint.uds
        assert (own.replicas, own.gateway.cors_origins, own.log_level) == (None, (), "error")
        assert own.scheduler.max_waiting_tokens > 7
    await asyncio.gather(*(child.stop(1.0) for child in children))
    assert children[0].endpoint.uds is not None
    assert not children[0].endpoint.uds.parent.exists()

"""What the command line and the environment decide, and how a wrong flag is refused."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

import server
from gateway.serving import StartError, start_tracing
from rose.errors import ModelLoadError


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BOUQUET_API_KEY", raising=False)


def test_without_flags_the_packaged_model_is_served_to_this_machine_only() -> None:
    options = server.parse_options([])
    assert (options.model, options.load_format, options.listen.host, options.listen.port) == (
        "minilm",
        "auto",
        "127.0.0.1",
        8000,
    )
    assert options.gateway.api_keys == ()


@pytest.mark.parametrize(
    ("load_format", "expected"),
    [("auto", (False, True)), ("safetensors", (False, False)), ("dummy", (True, True))],
)
def test_what_may_be_loaded_reaches_the_engine(
    minilm_folder: Path, monkeypatch: pytest.MonkeyPatch, load_format: str, expected: tuple[bool, bool]
) -> None:
    flags = ["--model", str(minilm_folder), "--load-format", load_format]
    engine = types.ModuleType("rose.engine")
    seen: list[dict[str, object]] = []

    def load_engine(folder: Path, options: object, **named: object) -> object:
        seen.append(named)
        raise ModelLoadError("seen")

    engine.__dict__["load_engine"] = load_engine
    monkeypatch.setitem(sys.modules, "rose.engine", engine)
    for of_the_process in ("set_up_logging", "yield_between_forwards"):
        monkeypatch.setattr(server, of_the_process, lambda *_: None)
    options = server.parse_options(flags)
    with pytest.raises(ModelLoadError, match="seen"):
        server.load(options, server.model_of(options).find())
    with pytest.raises(ModelLoadError, match="seen"):
        server.load_model(server.corpus_parser().parse_args([*flags, "in", "out"]))
    assert server.verify(flags) == server.START_FAILED
    got = [(named["dummy"], named["pickles"]) for named in seen]
    assert got == [expected, expected, (False, expected[1])]


def test_every_flag_reaches_its_room(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "c", "k"):
        (tmp_path / name).touch()
    flags = (
        f"--model x --load-format dummy --tokenizer {tmp_path} --dtype bfloat16 --device cuda:1 --seed 5"
        " --max-model-len 9 --max-batch-tokens 10 --max-batch-seqs 11 --threads 12"
        " --capture all --max-graphs 13 --max-graph-bytes 14 --max-waiting-tokens 15 --max-waiting-seqs 16"
        " --max-items 17 --max-request-tokens 18 --max-body-bytes 19 --request-timeout-s 20"
        " --tokenizer-threads 21 --drain-s 22 --served-model-name a --served-model-name b --api-key k"
        f" --log-level debug --host ::1 --port 23 --uds /s --tls-cert {tmp_path}/c --tls-key {tmp_path}/k"
        " --api-dialect perplexity"
        " --max-outstanding-requests 24 --body-timeout-s 25 --perplexity-max-items 26"
        " --perplexity-max-request-tokens 27 --cors-origin https://a --cors-origin https://b"
        " --head-timeout-s 28 --keepalive-timeout-s 29 --no-dashboard"
        " --max-token-bytes 30 --max-outstanding-token-bytes 31 --step-timeout-s 32"
    )
    options = server.parse_options(flags.split())
    engine, scheduler, gateway = options.engine, options.scheduler, options.gateway
    assert (engine.dtype, engine.device, engine.seed, engine.max_model_len) == ("bfloat16", "cuda:1", 5, 9)
    assert (engine.max_batch_tokens, engine.max_batch_seqs, engine.num_threads) == (10, 11, 12)
    assert (engine.capture, engine.max_graphs, engine.max_graph_bytes) == ("all", 13, 14)
    assert (scheduler.max_waiting_tokens, scheduler.max_waiting_seqs, scheduler.max_budget_tokens) == (
        15,
        16,
        10,
    )
    assert scheduler.step_timeout_s == 32
    assert (gateway.max_items, gateway.max_request_tokens, gateway.max_body_bytes) == (17, 18, 19)
    assert (gateway.request_timeout_s, gateway.tokenizer_threads, options.drain_s) == (20, 21, 22)
    assert (gateway.max_outstanding_requests, gateway.body_timeout_s) == (24, 25)
    assert (gateway.head_timeout_s, gateway.keepalive_timeout_s, gateway.dashboard) == (28, 29, False)
    assert (engine.max_token_bytes, gateway.max_outstanding_token_bytes) == (30, 31)
    assert (gateway.perplexity_max_items, gateway.perplexity_max_request_tokens) == (26, 27)
    assert (gateway.api_dialect, gateway.cors_origins) == ("perplexity", ("https://a", "https://b"))
    assert (options.listen.uds, options.listen.tls_cert, options.listen.tls_key) == (
        Path("/s"),
        tmp_path / "c",
        tmp_path / "k",
    )
    assert (gateway.served_model_names, gateway.api_keys) == (("a", "b"), ("k",))
    assert (options.tokenizer, options.log_level) == (tmp_path / "tokenizer.json", "debug")
    assert (options.load_format, options.listen.host, options.listen.port) == ("dummy", "::1", 23)


def test_a_larger_step_lets_the_scheduler_fill_it() -> None:
    assert server.parse_options(["--max-batch-tokens", "65536"]).scheduler.max_budget_tokens == 65536
    small = server.parse_options(["--max-batch-tokens", "64"]).scheduler
    assert (small.min_budget_tokens, small.max_budget_tokens) == (64, 64)


def test_a_key_from_the_environment_is_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUQUET_API_KEY", "mellon")
    options = server.parse_options(["--api-key", "sesame"])
    assert options.gateway.api_keys == ("sesame", "mellon")
    assert "mellon" not in str(server.describe(options)) + repr(options)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--port 65536", "argument --port: 65536 is not in 0..65535"),
        ("--port x", "argument --port: "),
        ("--max-batch-tokens 0", "argument --max-batch-tokens: 0 is not a whole number of at least 1"),
        ("--max-graphs many", "argument --max-graphs: many is not a whole number of at least 1"),
        ("--max-items 0", "--max-items is 0; it must be at least 1"),
        ("--max-waiting-seqs 0", "--max-waiting-seqs is 0; it must be at least 1"),
        ("--step-timeout-s 0", "--step-timeout-s is 0.0; it must be above 0, and finite"),
        ("--step-timeout-s nan", "--step-timeout-s is nan; it must be above 0, and finite"),
        ("--step-timeout-s inf", "--step-timeout-s is inf; it must be above 0, and finite"),
        ("--step-timeout-s soon", "argument --step-timeout-s: invalid float value: 'soon'"),
        ("--request-timeout-s 0", "--request-timeout-s is 0.0; it must be more than 0"),
        ("--dtype int4", "argument --dtype: invalid choice: 'int4'"),
        ("--device tpu", "argument --device: 'tpu' is not auto, cpu, cuda or cuda:N"),
        ("--device cuda:0,tpu", "argument --device: 'tpu' is not auto, cpu, cuda or cuda:N"),
        ("--device=", "argument --device: '' is not auto, cpu, cuda or cuda:N"),
        ("--model=", "argument --model: it is empty; give a folder, a hub name or an alias"),
        ("--tls-cert /no/file", "argument --tls-cert: cannot read /no/file"),
        ("--tls-cert /", "argument --tls-cert: cannot read /"),
        ("--tls-key /no/file", "argument --tls-key: cannot read /no/file"),
        ("--tokenizer /no/file", "argument --tokenizer: there is no file /no/file"),
        ("--tokenizer ~nobody-of-this-name/a", "argument --tokenizer: cannot read ~nobody-of-this-name/a"),
        (f"--tokenizer /{'a' * 5000}", f"argument --tokenizer: cannot read /{'a' * 5000}"),
        ("--tls-cert ~nobody-of-this-name/a", "argument --tls-cert: cannot read ~nobody-of-this-name/a"),
        ("--cors-origin example.com", "the CORS origin 'example.com' is neither"),
        ("--cors-origin https://a/", "the CORS origin 'https://a/' is neither"),
        ("--cors-origin https://A.com", "the CORS origin 'https://A.com' is neither"),
        ("--drain-s -1", "argument --drain-s: -1.0 is not a number of seconds"),
        ("--drain-s inf", "argument --drain-s: inf is not a number of seconds"),
        ("--unknown", "unrecognized arguments: --unknown"),
        ("--mod minilm", "unrecognized arguments: --mod"),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(
    flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        server.parse_options(flags.split())
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {words}")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_every_flag_says_what_it_does() -> None:
    for action in server.build_parser()._actions:
        assert action.help, action.option_strings


@pytest.mark.parametrize(
    ("flags", "environment", "traces"),
    [
        ("", {}, None),
        ("--otlp-endpoint http://c:4318", {}, "http://c:4318"),
        ("--otlp-endpoint http://c:4318", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d"}, "http://c:4318"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d"}, ""),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://d"}, ""),
        ("", {"OTEL_TRACES_EXPORTER": "otlp"}, ""),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d", "OTEL_TRACES_EXPORTER": "none"}, None),
        ("--otlp-endpoint http://c:4318", {"OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_traces_go_where_the_flag_or_the_environment_says(
    flags: str, environment: dict[str, str], traces: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert server.parse_options(flags.split()).traces == traces


def test_missing_packages_for_traces_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "gateway.tracing", raising=False)
    with pytest.raises(StartError, match=r"pip install -e '\.\[otel\]'"):
        start_tracing("http://localhost:4318", "0")

"""Suites against our own server on the CPU, with real weights and its vectors checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen import compare
from loadgen.cli import main
from loadgen.suites import ALL
from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.timeout(240)
TINY = (
    "--quick",
    "--no-overhead",
    "--duration",
    "0.8",
    "--warmup",
    "0.1",
    "--lengths",
    "8",
    "--batches",
    "2",
)


@pytest.fixture(scope="module")
def url(minilm_folder: Path) -> Iterator[str]:
    with ServerProcess("--model", "minilm", "--port", "0", "--threads", "1").ready() as server:
        yield server.url


@pytest.fixture(scope="module")
def random_weights() -> Iterator[dict[str, str]]:
    """Addresses of a server with random weights, and of the reference with the same and with others."""
    dummy = ("--model", "minilm", "--load-format", "dummy", "--port", "0")
    reference = {"program": ("docs/benchmarks/reference.py",), "env": {"PYTHONPATH": "."}}
    with (
        ServerProcess(*dummy, "--threads", "1") as server,
        ServerProcess(*dummy, "--seed", "0", **reference) as same,  # type: ignore[arg-type]
        ServerProcess(*dummy, "--seed", "1", **reference) as others,  # type: ignore[arg-type]
    ):
        yield {"server": server.ready().url, "0": same.ready().url, "1": others.ready().url}


@pytest.mark.parametrize(("seed", "verdict"), [("0", "ok: "), ("1", "INVALID: ")])
def test_the_reference_of_this_project_judges_random_weights(
    seed: str,
    verdict: str,
    random_weights: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without transformers: the same seed gives the same vectors, another one others."""
    urls = ("--url", random_weights["server"], "--check", random_weights[seed])
    status = main(["scoring", *urls, "--report", str(tmp_path), *TINY])
    (case,) = compare.read(tmp_path / "report.json").cases
    assert case.check is not None and case.check.vectors > 0 and case.failed is None
    assert f"{verdict}worst cosine {1 - case.check.deviation:.6f}" in capsys.readouterr().out
    assert (status, case.valid) == ((0, True) if seed == "0" else (1, False))
    assert case.check.deviation < 1e-5 if seed == "0" else case.check.deviation > 0.1


@pytest.mark.parametrize(
    ("suite", "suites"),
    [("throughput", {"throughput"}), pytest.param("all", set(ALL), marks=pytest.mark.long)],
)
def test_vectors_are_those_of_transformers(
    suite: str, suites: set[str], url: str, minilm_folder: Path, tmp_path: Path
) -> None:
    flags = ("--url", url, "--loads", "50", "--arrivals", "poisson", "--in-flight", "2", *TINY)
    assert main([suite, *flags, "--check", str(minilm_folder), "--report", str(tmp_path)]) == 0
    results = compare.read(tmp_path / "report.json")
    assert {case.suite for case in results.cases} == suites
    for case in results.cases:
        assert case.failed is None and case.check is not None and case.check.passed
        assert all(stream.errors == {} and stream.rejected == 0 for stream in case.streams)
        assert all(stream.service.count > 0 and "inference" in stream.server_ms for stream in case.streams)
        assert case.tokens_per_step is not None and case.tokens_per_step >= 8
    assert "<svg" in (tmp_path / "report.html").read_text("utf-8")


def test_two_apis_in_turns_on_text_of_exact_length(url: str, minilm_folder: Path, tmp_path: Path) -> None:
    corpus, results = tmp_path / "corpus.txt", tmp_path / "ab.json"
    corpus.write_text("The quick brown fox jumps over the lazy dog near the river bank. " * 50)
    text = ("--corpus", str(corpus), "--tokenizer", str(minilm_folder), "--in-flight", "4")
    peers = ("--url", url, "--url", url, "--api", "bouquet-msgpack", "--api", "openai", "--check", url)
    assert main(["concurrency", *peers, *TINY, *text, "--json", str(results)]) == 0
    ids, openai = compare.read(results).cases
    assert (ids.target, openai.target) == ("A", "B")
    for case in (ids, openai):
        assert case.check is not None and case.check.passed
        (stream,) = case.streams
        # 8 tokens each, exact by the model's own tokenizer.
        assert stream.tokens_per_s == pytest.approx(8 * stream.embeddings_per_s)

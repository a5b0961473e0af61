"""Every suite against our own server on the CPU, with real weights and its vectors checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen import compare
from loadgen.cli import main
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


def test_all_suites_on_real_weights(minilm_folder: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("The quick brown fox jumps over the lazy dog near the river bank. " * 50)
    report = tmp_path / "report"
    with ServerProcess("--model", "minilm", "--port", "0", "--threads", "1").ready() as server:
        flags = ("--url", server.url, "--loads", "50", "--arrivals", "poisson", "--in-flight", "2", *TINY)
        assert main(["all", *flags, "--check", str(minilm_folder), "--report", str(report)]) == 0
        text = ("--corpus", str(corpus), "--tokenizer", str(minilm_folder), "--in-flight", "4")
        peers = ("--url", server.url, "--url", server.url, "--api", "bouquet-msgpack", "--api", "openai")
        both = (
            "concurrency",
            *peers,
            *TINY,
            *text,
            "--check",
            server.url,
            "--json",
            str(tmp_path / "ab.json"),
        )
        assert main([*both]) == 0
    results = compare.read(report / "report.json")
    assert {case.suite for case in results.cases} == {
        "latency",
        "scoring",
        "throughput",
        "concurrency",
        "open",
        "mixed",
    }
    for case in results.cases:
        assert case.failed is None and case.check is not None and case.check.passed
        assert all(stream.errors == {} and stream.rejected == 0 for stream in case.streams)
        assert all(stream.service.count > 0 and "inference" in stream.server_ms for stream in case.streams)
        assert case.tokens_per_step is not None and case.tokens_per_step >= 8
    assert (report / "report.html").stat().st_size > 10_000
    ids, openai = compare.read(tmp_path / "ab.json").cases
    assert (ids.target, openai.target) == ("A", "B")
    # 8 tokens each, exact by the model's own tokenizer.
    assert all(
        s.tokens_per_s == pytest.approx(8 * s.embeddings_per_s) for c in (ids, openai) for s in c.streams
    )

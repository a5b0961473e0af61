from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.cli import loopback, main, targets
from loadgen.plan import Limits, LoadgenError, Pacing
from loadgen.suites import ALL, SUITES, Custom


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000)),
        ("http://localhost:8000/", ("127.0.0.1", 8000)),
        ("http://127.9.9.9", ("127.9.9.9", 80)),
        ("http://[::1]:81", ("::1", 81)),
    ],
)
def test_urls_of_this_machine(url: str, address: tuple[str, int]) -> None:
    assert loopback(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "http://192.0.2.7:8000",
        "http://example.com",
        "http://127.0.0.1.example.com",
        "http://[2001:db8::1]",
        "https://127.0.0.1",
        "127.0.0.1:8000",
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:x",
        "http://",
    ],
)
def test_everything_else_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["latency", "--url", url]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {url}: ") and printed.count("\n") == 1


def test_one_api_holds_for_all_urls_or_there_is_one_each() -> None:
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert [t.api for t in targets(urls, ["tei"], [], None)] == ["tei", "tei"]
    assert [(t.name, t.api) for t in targets(urls, ["tei", "openai"], [], None)] == [
        ("A", "tei"),
        ("B", "openai"),
    ]
    with pytest.raises(LoadgenError, match="--model is given 3 times for 2 URLs"):
        targets(urls, ["tei"], ["a", "b", "c"], None)


def test_a_key_stays_out_of_what_is_printed() -> None:
    (target,) = targets(["http://127.0.0.1:1"], ["tei"], [], "secret")
    assert "secret" not in repr(target)


@pytest.mark.parametrize(
    "flags", [["--requests", "0"], ["--rate", "-1"], ["--lengths", "8,x"], ["--duration", "inf"]]
)
def test_numbers_are_checked(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["latency", "--url", "http://127.0.0.1:1", *flags])
    assert ended.value.code == 2


def test_the_articles_suites_are_the_defaults() -> None:
    names = {suite: [case.name for case in SUITES[suite](Custom())] for suite in ALL}
    assert names["latency"] == ["1×128", "1×512", "1×4096"]
    assert names["scoring"] == ["5×512", "25×512", "50×512"]
    assert names["throughput"] == [f"100×{n}, 4 processes" for n in (512, 1024, 4096)]
    assert names["concurrency"] == [f"{2**n} in flight × 512" for n in range(9)]
    assert len(names["open"]) == 24 and names["open"][-1] == "1×512, constant, 120 %"
    assert len(names["mixed"]) == 2


@pytest.mark.parametrize("suite", ALL)
def test_every_case_ends_by_count_and_by_time(suite: str) -> None:
    for case in [*SUITES[suite](Custom()), *SUITES[suite](Custom(quick=True))]:
        limits = case.limits
        assert 0 < limits.warmup_s <= limits.max_warmup_s <= 20 and 0 < limits.min_s <= limits.max_s <= 30
        assert limits.requests <= 10_000 and limits.timeout_s <= 60


def test_flags_change_a_suite() -> None:
    custom = Custom(lengths=(8,), requests=7, duration_s=1.0, warmup_s=30.0, timeout_s=2.0)
    (case,) = SUITES["latency"](custom)
    assert case.name == "1×8"
    assert case.limits == Limits(50, 30.0, 30.0, 7, 1.0, 1.0, 2.0)
    (constant,) = SUITES["open"](Custom(rate=5.0, arrivals=Pacing.CONSTANT))
    assert constant.name == "1×512, constant, 5/s" and constant.streams[0].rate == 5.0
    with pytest.raises(LoadgenError, match="--trace"):
        list(SUITES["trace"](Custom()))


def test_it_is_a_black_box_client(repo_root: Path) -> None:
    """Neither the server's packages nor torch: it starts in the time that numpy takes."""
    ours = {"rose", "gateway", "scheduler", "cuda_utils", "server"}
    heavy = {"torch", "transformers", "aiohttp", "matplotlib", "tokenizers"}
    code = "import sys, loadgen.cli; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.check_output(
        [sys.executable, "-c", code], cwd=repo_root, text=True, timeout=60
    ).split()
    assert "loadgen" in loaded and not set(loaded) & (ours | heavy)

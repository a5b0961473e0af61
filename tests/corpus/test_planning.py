"""`--plan`: its figures are those that were measured, its sums hold, and docs/scaling.md has its answers."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

import server
from gateway.corpus.capacity import Question, plan, writes
from gateway.corpus.measured import SPEEDS, extrapolated, speed

COMMAND = re.compile(r"^```\n\$ python server\.py corpus (--plan .*)\n((?:.*\n)*?)```$", re.MULTILINE)
COUNTING = re.compile(r"\| (\d+) GPUs for \.gz, (\d+) for \.zst, (\d+) plain,")
TABLE = re.compile(r"^<!-- python server\.py corpus (.*) -->\n((?:\|.*\n)+)", re.MULTILINE)


def measured(report: Path, tokens: int) -> list[float]:
    """Embeddings a second of each case of a report, for sequences of this length."""
    cases = json.loads(report.read_text())["cases"]
    return [
        stream["embeddings_per_s"]
        for case in cases
        for stream in case["streams"]
        if stream["shape"].endswith(f"×{tokens}")
    ]


@pytest.mark.parametrize("row", SPEEDS, ids=lambda row: f"{row.model} {row.tokens}")
def test_speeds_are_those_of_the_raw_reports(repo_root: Path, row) -> None:
    reports = (repo_root / "docs" / "benchmarks" / "h200" / row.model).glob("*/report.json")
    found = [value for report in reports for value in measured(report, row.tokens)]
    assert any(abs(value / row.embeddings_per_s - 1) < 0.01 for value in found), found


@pytest.mark.parametrize("row", SPEEDS, ids=lambda row: f"{row.model} {row.tokens}")
def test_a_measured_length_is_its_own_speed(row) -> None:
    assert speed(row.model, row.tokens) == pytest.approx(row.embeddings_per_s)
    assert not extrapolated(row.model, row.tokens)


@pytest.mark.parametrize("rows", ["1e300", "0", "nan", "-1"])
def test_absurd_numbers_are_refused(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        server.corpus(["--plan", rows])
    assert f"{rows} is not a number from 1e-18 to 1e18" in capsys.readouterr().err


def test_the_largest_numbers_have_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert server.corpus(["--plan", "1e18", "--tokens", "1e18", "--model", "bge-m3"]) == 0
    assert "1,000,000,000,000,000,000 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["pplx-embed", "bge-m3", "bge-base"])
def test_longer_texts_are_slower_and_never_cheaper_a_token(model: str) -> None:
    rates = [speed(model, tokens) for tokens in range(50, 9000, 50)]
    assert all(longer < shorter for shorter, longer in pairwise(rates))
    assert extrapolated(model, 9000)


def test_a_job_takes_what_its_shards_take() -> None:
    answer = plan(Question(1e9, 512, "pplx-embed", gpus=64))
    assert answer.hours == pytest.approx(1e9 / speed("pplx-embed", 512) / 64 / 3600, rel=0.02)
    assert answer.gpu_hours == pytest.approx(64 * answer.hours)
    assert answer.vector_bytes == {
        "float32": 4.096e12,
        "float16": 2.048e12,
        "int8": 1.024e12,
        "bits": 1.28e11,
    }
    assert answer.shards == 15_259
    assert answer.dollars == pytest.approx(3 * answer.gpu_hours)


def test_days_are_kept_by_the_fewest_gpus() -> None:
    for days in (10, 30, 90):
        answer = plan(Question(1e12, 512, "bge-m3", days=days))
        assert answer.hours <= days * 24
        assert plan(Question(1e12, 512, "bge-m3", gpus=answer.gpus - 1)).hours > days * 24


def test_more_gpus_than_shards_do_not_help() -> None:
    few, many = (plan(Question(1e6, 512, "bge-m3", gpus=gpus)) for gpus in (16, 1000))
    assert few.shards == 16
    assert many.hours == few.hours


def test_a_large_part_is_uploaded_in_pieces() -> None:
    """A part of 65 536 rows of 1024 values in float32 and in int8, as moto's S3 was asked by pyarrow 26."""
    assert writes(268_913_573) == 26 + 2 + 2
    assert writes(67_721_545) == 7 + 2 + 2
    assert writes(9_439_622) == 1 + 2
    question = Question(1e12, 512, "pplx-embed", shard_rows=1_000_000, shard_bytes=20_000_000_000)
    [limit] = [limit for limit in plan(question).limits if "object store" in limit.name]
    seconds = 1e6 / speed("pplx-embed", 512)
    assert limit.gpus == pytest.approx(3500 * seconds / (4.096e9 / (10 << 20)), rel=0.02)


def test_the_first_limit_is_the_lowest() -> None:
    limits = plan(Question(1e12, 4096, "bge-m3")).limits
    assert [limit.gpus for limit in limits] == sorted(limit.gpus for limit in limits)
    small = plan(Question(1e12, 4096, "bge-m3", shard_rows=10)).limits[0]
    assert "markers" in small.name


def test_the_page_has_what_the_command_answers(repo_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (repo_root / "docs" / "scaling.md").read_text()
    commands = COMMAND.findall(page)
    assert len(commands) == 2
    for command, answer in commands:
        assert server.main(["corpus", *shlex.split(command)]) == 0
        assert capsys.readouterr().out == answer, command
    tables = TABLE.findall(page)
    assert len(tables) == 2
    for table in tables:
        assert server.main(["corpus", *shlex.split(table[0])]) == 0
        assert capsys.readouterr().out == table[1]


def test_the_page_says_in_words_where_counting_lines_gives_way(repo_root: Path) -> None:
    limits = plan(Question(1e12, 512, "pplx-embed", days=90)).limits
    counting = [f"{limit.gpus:.0f}" for limit in limits if "counts lines" in limit.name]
    assert COUNTING.findall((repo_root / "docs" / "scaling.md").read_text()) == [tuple(counting)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--plan 1e9 --tokens 512 --model minilm", "--plan knows pplx-embed, bge-m3, bge-base"),
        ("--plan -5", "-5 is not a number from 1e-18"),
        ("in.parquet", "IN and OUT are needed"),
        ("a b --prompt x --input-type query", "--input-type and --prompt: give one of them"),
        ("a b --refuse-duplicate-ids", "needs --id-column"),
        ("a b --summary /no/such/folder/s.json", "no such folder"),
        ("a b --shard-rows 0", "not a whole number of at least 1"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        server.main(["corpus", *flags.split()])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_help_says_what_redo_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        server.main(["corpus", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "points that an earlier run wrote to Qdrant are not" in text


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    flags = ["--model", "bge-small", "--load-format", "dummy", "--summary", str(tmp_path / "s.json")]
    assert server.corpus([str(tmp_path / "in.jsonl"), str(tmp_path / "out"), *flags]) == 1
    printed = capsys.readouterr().err
    assert "bge-small has no tokenizer.json here; give --model a folder that has one" in printed
    assert "leave out --load-format dummy" in printed
    assert printed.count("\n") == 1

"""A corpus's vectors are those that a server gives for the same texts, bit for bit; by real MiniLM."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.corpus.options import LoadedModel, ModelSource
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from rose.batch import Engine
from rose.engine_options import EngineOptions
from scheduler.options import SchedulerOptions
from tests.corpus.jobs import embed, rejected, rows, write_parquet
from tests.corpus.processes import REAL, CorpusProcess, run
from tests.http.served import serving
from tests.programs import ROOT

TEXTS = [
    "A man is eating food.",
    "short",
    "Zwei Jäger treffen sich; 東京 🗼 e\u0301",
    "words " * 100,
    "way too long " * 300,
]


@pytest.fixture
def engine(minilm_folder: Path) -> Iterator[Engine]:
    """One text a step, so that what it is batched with cannot change its last bits."""
    from rose.engine import load_engine

    options = EngineOptions(device="cpu", max_batch_seqs=1, num_threads=1)
    loaded = load_engine(minilm_folder, options, dummy=False, model_name="minilm")
    yield loaded
    loaded.close()


@pytest.mark.parametrize(
    ("vectors", "dtype", "dimensions"),
    [("float32", "<f4", 384), ("float16", "<f2", 128), ("int8", "i1", 384), ("bits", "u1", 256)],
)
def test_vectors_are_those_of_the_api(
    tmp_path: Path, minilm_folder: Path, engine: Engine, vectors: str, dtype: str, dimensions: int
) -> None:
    tokenizer = HuggingFaceTokenizer.from_file(minilm_folder / "tokenizer.json")
    body = {
        "input": TEXTS,
        "embed_dtype": vectors,
        "dimensions": dimensions,
        "prompt": "x: ",
        "truncate": True,
    }
    answer = asyncio.run(ask(engine, tokenizer, body))
    wanted = np.frombuffer(answer["embeddings"], dtype).reshape(answer["shape"])
    source = write_parquet(tmp_path / "in.parquet", {"text": TEXTS})
    loaded = LoadedModel(engine, tokenizer, "d", SchedulerOptions())
    model = ModelSource("minilm", "d", "auto", lambda: loaded)
    options = {"vectors": vectors, "dimensions": dimensions, "prompt": "x: ", "truncate": "end"}
    summary, status = embed(source, tmp_path / "out", model, **options)
    assert (status, summary.reason, summary.rejected) == (0, "", 0)
    assert summary.tokens == answer["usage"]["prompt_tokens"]
    found = np.array([row["vector"] for row in rows(tmp_path / "out")]).astype(dtype)
    np.testing.assert_array_equal(found, wanted)


async def ask(engine: Engine, tokenizer: HuggingFaceTokenizer, body: dict[str, Any]) -> dict[str, Any]:
    """What a server of this engine answers in msgpack."""
    async with serving(engine=engine, tokenizer=tokenizer) as served:
        reply = await served.pack(body)
    assert reply.status == 200
    answer: dict[str, Any] = reply.value
    return answer


def test_the_command_embeds_with_a_real_model(tmp_path: Path, minilm_folder: Path) -> None:
    source = write_parquet(tmp_path / "in.parquet", {"text": TEXTS, "id": list(range(5))})
    given = (source, tmp_path / "out", "--id-column", "id", "--model", "minilm", "--device", "cpu")
    status, summary, err = run(*given, "--threads", "1", program=REAL)
    assert (status, summary["rows_out"], summary["rejected"]) == (0, 4, 1), err
    assert rejected(tmp_path / "out")[0]["reason"] == "text has more than 256 tokens"
    status, _, err = run(*given, "--dtype", "bfloat16", program=REAL)
    assert status == 1
    assert "dtype was 'auto', is 'bfloat16'" in err
    assert err.count("\n") == 1


def test_nothing_that_libraries_do_at_the_end_changes_the_status(tmp_path: Path) -> None:
    """Threads of Arrow's pools that only began aborted a process in one of 30 runs on a busy machine."""
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)\n", "utf-8")
    flags = ("--plan", "1000", "--tokens", "128", "--model", "bge-m3")
    with CorpusProcess(*flags, program=REAL, PYTHONPATH=str(tmp_path)) as process:
        status, out, err = process.wait()
    assert (status, err) == (0, "")
    assert out


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    """Such as `head -1`."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "server.py", "corpus", "--plan", "1e9"]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            command, cwd=ROOT, env=buffered, stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")

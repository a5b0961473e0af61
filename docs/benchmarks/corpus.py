"""Rows a second of a corpus through MiniLM on the CPU, beside the engine alone on the same sequences.

    python docs/benchmarks/corpus.py [ROWS] [WORDS]

Random words, WORDS of them a row at most. Prints one line of JSON: rows a second, and a second of CPU time,
which also holds where other things run. The job's include the load of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# This folder has a gateway.py of its own.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pyarrow as pa
from pyarrow import parquet as pq

import server
from gateway.corpus.driver import run_job
from gateway.corpus.local import run_here
from gateway.corpus.options import CorpusOptions, LoadedModel, ModelSource
from rose.batch import RaggedBatch

WORDS = "a man eats his food while two girls carry the old guitar through cold rain".split()  # noqa: SIM905


def write_corpus(path: Path, rows: int, most_words: int) -> None:
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(1, most_words))) for _ in range(rows)]
    pq.write_table(pa.table({"id": list(range(rows)), "text": texts}), path, row_group_size=20_000)


def engine_alone(model: LoadedModel, texts: list[str]) -> tuple[float, float]:
    """Seconds, and those of CPU, of the forwards alone, sorted and packed as a job's are."""
    sequences = sorted(model.tokenizer.encode(texts), key=len, reverse=True)
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    batch, tokens, running = [], 0, None
    for sequence in [*sequences, None]:
        if batch and (sequence is None or tokens + len(sequence) > 2048 or len(batch) == 256):
            following = model.engine.step(RaggedBatch.pack(batch))
            if running is not None:
                running.result()
            batch, tokens, running = [], 0, following
        if sequence is not None:
            batch.append(sequence)
            tokens += len(sequence)
    running.result()
    return time.perf_counter() - started_s, time.process_time() - started_cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="?", default=20_000)
    parser.add_argument("words", type=int, nargs="?", default=8)
    rows, words = vars(parser.parse_args()).values()
    args = server.corpus_parser().parse_args(["in", "out", "--device", "cpu"])
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "in.parquet")
        write_corpus(source, rows, words)
        options = CorpusOptions(str(source), f"{folder}/out", id_column="id", shard_rows=20_000)
        model = ModelSource("minilm", "-", "auto", partial(server.load_model, args))
        model.load().engine.close()  # what only a first load takes
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        summary, status = run_job(options, model, server.VERSION, run_here, 1)
        job_s, job_cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
        assert status == 0 and summary.rows_out == rows, summary
        texts = pq.read_table(source, columns=["text"]).column("text").to_pylist()
    loaded = server.load_model(args)
    loaded.tokenizer.wait()
    alone_s, alone_cpu_s = engine_alone(loaded, texts)
    loaded.engine.close()
    figures = {
        "rows": rows,
        "tokens": summary.tokens,
        "rows_per_s": round(rows / job_s, 1),
        "rows_per_cpu_s": round(rows / job_cpu_s, 1),
        "engine_alone": {
            "rows_per_s": round(rows / alone_s, 1),
            "rows_per_cpu_s": round(rows / alone_cpu_s, 1),
        },
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    sys.exit(main())

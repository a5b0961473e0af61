"""The number that users of the model know: STS-B through the whole server."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from openai import OpenAI
from scipy.stats import spearmanr

from tests.e2e import oracle
from tests.e2e.server_process import ServerProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
PUBLISHED = 82.03
CHUNK = 256


def read_pairs(path: Path) -> tuple[list[str], list[str], list[float]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    rows = rows[1:] if rows[0][:2] == ["sentence1", "sentence2"] else rows
    return [row[0] for row in rows], [row[1] for row in rows], [float(row[2]) for row in rows]


def test_sts_b_english_is_as_published(minilm_folder: Path, shared_folder: Path) -> None:
    first, second, scores = read_pairs(shared_folder / "data" / "stsb-en-test.csv")
    assert len(scores) == 1379
    with ServerProcess("--model", "minilm", "--port", "0") as server:
        client = OpenAI(base_url=f"{server.ready().url}/v1", api_key="none")
        texts, vectors = first + second, []
        for start in range(0, len(texts), CHUNK):
            answer = client.embeddings.create(model="minilm", input=texts[start : start + CHUNK])
            vectors += [item.embedding for item in answer.data]
    array = np.array(vectors, np.float32)
    similarities = oracle.cosines(array[: len(scores)], array[len(scores) :])
    assert spearmanr(similarities, scores).statistic * 100 == pytest.approx(PUBLISHED, abs=0.02)

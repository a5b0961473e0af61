"""Whatever the files and limits: each row is of one shard, and shards are as large as they may be."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from gateway.corpus import jsonl_input
from gateway.corpus.inputs import read_pieces
from gateway.corpus.jsonl_input import jsonl_pieces
from gateway.corpus.plan import load_plan, save_plan, split
from gateway.corpus.rows import Columns, Piece
from gateway.corpus.store import Store


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    made = []
    for number in range(draw(st.integers(0, 6))):
        row = 0
        for rows in draw(st.lists(st.integers(1, 20), max_size=5)):
            made.append(Piece(f"f{number}", row, row + rows, 0, draw(st.integers(0, 100))))
            row += rows
    return made


@given(pieces(), st.integers(20, 50), st.integers(100, 300))
def test_each_row_is_of_one_shard(given_: list[Piece], most_rows: int, most_bytes: int) -> None:
    shards = split(given_, most_rows, most_bytes)
    wanted = [(piece.file, row) for piece in given_ for row in range(piece.start, piece.stop)]
    found = [
        (piece.file, row)
        for shard in shards
        for piece in shard.pieces
        for row in range(piece.start, piece.stop)
    ]
    assert found == wanted
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert all(0 < shard.rows <= most_rows for shard in shards)
    assert split(given_, most_rows, most_bytes) == shards


def test_a_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    shards = split([Piece("a", 0, 5, 7, 9), Piece("b", 0, 1, damage="why")], 5, 100)
    store = Store(str(tmp_path))
    save_plan(store, shards, [])
    assert load_plan(store) == (shards, [])


TEXTS = st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30), max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    texts=TEXTS,
    ended=st.booleans(),
    packed=st.booleans(),
    most_rows=st.integers(1, 15),
    most_bytes=st.integers(1, 200),
    block=st.integers(1, 64),
)
def test_lines_are_read_once_each_whatever_the_blocks(
    tmp_path_factory, texts: list[str], ended: bool, packed: bool, most_rows: int, most_bytes: int, block: int
) -> None:
    content = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts).encode()
    content += b"\n" if ended and texts else b""
    path = tmp_path_factory.mktemp("lines") / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(content) if packed else content)
    before, jsonl_input._BLOCK_BYTES = jsonl_input._BLOCK_BYTES, block
    try:
        local = fs.LocalFileSystem()
        found = jsonl_pieces(local, str(path), most_rows, most_bytes)
        chunks = list(read_pieces(local, found, Columns("text", None)))
    finally:
        jsonl_input._BLOCK_BYTES = before
    assert [text for chunk in chunks for text in chunk.texts] == texts
    assert [row for chunk in chunks for row in chunk.rows] == list(range(len(texts)))
    assert all(0 < piece.rows <= most_rows for piece in found)
    assert not any(chunk.rejected or chunk.damage for chunk in chunks)

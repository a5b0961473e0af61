"""Ours, the tokenizers library and SentencePiece side by side, on one core, over text files.

SentencePiece joins in for Unigram files if it is installed; its model is written here from the same pieces,
scores and character map. Each takes its turn with the texts once untimed and then timed, so that the
processor's caches are its own.
"""

from __future__ import annotations

import argparse
import base64
import os
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from gateway.tokenization.huggingface import HuggingFaceTokenizer
from gateway.tokenization.loading import compiled
from gateway.tokenization.unsupported import UnsupportedError

_LENGTHS = (16, 128, 500)
_TEXTS, _ROUNDS = 400, 15
# SentencePiece's kinds of pieces.
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3

Encode = Callable[[str], Iterable[int]]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if ours does not support the file or gives other ids."""
    parser = argparse.ArgumentParser(prog="python -m gateway.tokenization.bench", description=__doc__)
    parser.add_argument("texts", type=Path, nargs="+", metavar="text", help="a text file in UTF-8")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    args = parser.parse_args(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        library, encoders = encoders_of(args.tokenizer)
    except UnsupportedError as reason:
        sys.stderr.write(f"{args.tokenizer}: the library does all the work: {reason}\n")
        return 1
    sys.stdout.write(f"{args.tokenizer}, microseconds a text (best of {_ROUNDS} rounds)\n")
    different = 0
    for path in args.texts:
        text = path.read_text(encoding="utf-8")
        for num_tokens in _LENGTHS:
            sys.stdout.write(f"{path.name} ")
            different += not _line(num_tokens, cut(text, library, num_tokens), encoders)
    return min(different, 1)


def encoders_of(path: Path) -> tuple[Library, dict[str, Encode]]:
    """The library's tokenizer of a tokenizer.json, and what makes ids of a text, by name, ours first.

    Raises:
        UnsupportedError: ours does not support the file.
    """
    library = Library.from_file(str(path))
    library.no_truncation()
    library.no_padding()
    reference = HuggingFaceTokenizer.from_file(path)
    ours = compiled(reference)
    encoders: dict[str, Encode] = {
        "ours": lambda text: ours.encode([text])[0],
        "tokenizers": lambda text: library.encode_batch_fast([text])[0].ids,
    }
    if (pieces := _sentencepiece(reference.describe())) is not None:
        encoders["sentencepiece"] = pieces
    return library, encoders


def _line(num_tokens: int, texts: list[str], encoders: dict[str, Encode]) -> bool:
    """One length's line. Whether ours and the library give the same ids."""
    same = all(list(encoders["ours"](text)) == list(encoders["tokenizers"](text)) for text in texts)
    best = dict.fromkeys(encoders, float("inf"))
    for _ in range(_ROUNDS):
        for name, encode in encoders.items():
            best[name] = min(best[name], _turn(encode, texts))
    cells = [f"{name} {taken:8.1f} ({taken / best['ours']:5.2f}x)" for name, taken in best.items()]
    ids = "same ids" if same else "OTHER IDS"
    sys.stdout.write(f"{num_tokens:4d} tokens, {len(texts)} texts: {'  '.join(cells)}  {ids}\n")
    return same


def _turn(encode: Encode, texts: list[str]) -> float:
    """Microseconds a text, the second time."""
    started_s = 0.0
    for _ in range(2):
        started_s = time.process_time()
        for text in texts:
            encode(text)
    return (time.process_time() - started_s) / len(texts) * 1e6


def cut(text: str, library: Library, num_tokens: int) -> list[str]:
    """At most 400 texts of so many tokens each, one after the other."""
    texts: list[str] = []
    for part in _parts(text):
        offsets = library.encode(part, add_special_tokens=False).offsets
        for first in range(0, len(offsets) - num_tokens + 1, num_tokens):
            texts.append(part[offsets[first][0] : offsets[first + num_tokens - 1][1]])
            if len(texts) == _TEXTS:
                return texts
    if not texts:
        raise SystemExit(f"the file has no {num_tokens} tokens in a row")
    return texts


def _parts(text: str) -> Iterator[str]:
    yield from (text[start : start + 100_000] for start in range(0, len(text), 100_000))


def _sentencepiece(file: dict[str, Any]) -> Encode | None:
    if file["model"].get("type") != "Unigram":
        return None
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        sys.stderr.write("sentencepiece is not installed\n")
        return None
    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(_model_proto(file))
    encode: Encode = processor.EncodeAsIds
    return encode


def _model_proto(file: dict[str, Any]) -> bytes:
    """A SentencePiece model of the file's pieces. Source: sentencepiece_model.proto of the project."""
    model, special = file["model"], {token["id"] for token in file["added_tokens"]}
    pieces: list[bytes] = []
    for index, (piece, score) in enumerate(model["vocab"]):
        kind = _UNKNOWN if index == model["unk_id"] else _CONTROL if index in special else _NORMAL
        fields = _bytes(1, piece.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind)
        pieces.append(_bytes(1, fields))
    ids = {piece: index for index, (piece, _) in enumerate(model["vocab"])}
    places = {40: model["unk_id"], 41: ids.get("<s>", -1), 42: ids.get("</s>", -1), 43: ids.get("<pad>", -1)}
    trainer = _number(3, 1) + b"".join(_number(field, value) for field, value in places.items())
    steps = file["normalizer"].get("normalizers", [file["normalizer"]])
    precompiled = base64.b64decode(steps[0].get("precompiled_charsmap", ""))
    return (
        b"".join(pieces)
        + _bytes(2, trainer)
        + _bytes(3, _bytes(2, precompiled) + _number(3, 1) + _number(4, 1))
    )


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value & (1 << 64) - 1)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


if __name__ == "__main__":
    sys.exit(main())

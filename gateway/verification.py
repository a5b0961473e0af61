"""Whether a model's vectors are what its authors' code gives: the texts, the comparison, the verdict.

Knows neither torch nor transformers: the oracle behind the Protocol does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gateway.tokenization.base import Tokenizer
from rose.batch import Engine, Float32, Int32, RaggedBatch

# A dozen scripts; one word, one sentence, one page; what tokenizers stumble over. None begins or ends with a
# blank: sentence-transformers strips those, a server does not.
TEXTS: tuple[str, ...] = (
    "a",
    "Hello, world!",
    "What is the capital of France?",
    "THE QUICK BROWN FOX, the quick brown fox; The Quick Brown Fox.",
    "Der Fluss führt im Frühling mehr Wasser als im Spätsommer, weil oben der Schnee schmilzt.",
    "Où se trouve la bibliothèque municipale, s'il vous plaît ?",
    "El niño comió una manzana y después se durmió bajo el árbol.",
    "Проверка того, что вектор предложения не зависит от соседей по пакету.",
    "今天的天气很好，我们去公园散步吧。",
    "吾輩は猫である。名前はまだ無い。",
    "오늘은 비가 와서 집에서 책을 읽었습니다.",
    "القطار يصل إلى المحطة في الساعة الثامنة صباحا.",
    "השמש זורחת מעל הים בשעת בוקר מוקדמת.",
    "नदी के किनारे बैठकर बच्चे पत्थर फेंक रहे थे।",
    "วันนี้อากาศดีมาก เราไปเดินเล่นที่สวนสาธารณะกันเถอะ",
    "Η θάλασσα ήταν ήρεμη και ο ουρανός καθαρός.",
    "İstanbul'da ılık bir akşamüstü, çay bahçesinde oturuyorduk.",
    "Trời hôm nay đẹp quá, chúng ta đi dạo công viên nhé.",
    "Cafe\u0301 or café: one accent, two spellings; ﬁne ligatures, ½ and ²; full-width ＡＢＣ１２３.",
    "🙂 Emoji 👩‍👩‍👧‍👦 in a row 🇩🇪🇯🇵, and a zero\u200bwidth space.",
    "def norm(x: list[float]) -> float:\n    return sum(v * v for v in x) ** 0.5\n\nprint(norm([3.0]))",
    '{"id": 1234567890, "price": 3.14159, "tags": ["a", "b"], "ok": true, "none": null}',
    "https://example.org/path/to/page?query=embedding&lang=en#section-2 and user@example.org",
    "tabs\tand\nnewlines\r\nand    many     spaces",
    "antidisestablishmentarianism Donaudampfschifffahrtsgesellschaft llanfairpwllgwyngyll",
    " ".join(
        f"Sentence {number} of a text that is longer than any attention window." for number in range(40)
    ),
    "水" * 200,
)

# Cosines that rounding alone explains, by the engine's dtype.
THRESHOLDS = {"float32": 0.99999, "bfloat16": 0.999, "float16": 0.999}


class Oracle(Protocol):
    """The model by its authors' code, one text at a time."""

    def token_ids(self, text: str) -> Int32 | None:
        """Ids i32[n] of `text`, special tokens included; None: it has no tokenizer."""
        ...

    def vector(self, input_ids: Int32) -> Float32:
        """f32[D] of a sequence i32[n] that is alone in its batch."""
        ...


@dataclass(frozen=True, slots=True)
class Finding:
    """One text. same_ids: whether both sides made the same tokens of it. cosine: of the two vectors."""

    text: str
    num_tokens: int
    same_ids: bool
    cosine: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What the verdict depends on."""
    parser.add_argument(
        "--threshold",
        metavar="COSINE",
        type=float,
        help="fail below it; default: 0.99999 in float32, 0.999 in 16 bits",
    )


def verify(
    texts: Sequence[str], tokenizer: Tokenizer | None, engine: Engine, oracle: Oracle
) -> list[Finding]:
    """Compare all texts: the engine's vectors come from ragged batches, the oracle's from single sequences.

    Without a tokenizer the ids are made up from the text. Texts longer than the model are cut, both sides
    alike.

    Raises:
        rose.errors.EngineError: a step failed.
    """
    info = engine.info
    sequences = (
        [_made_up(text, info.vocab_size) for text in texts] if tokenizer is None else tokenizer.encode(texts)
    )
    theirs = [None if tokenizer is None else oracle.token_ids(text) for text in texts]
    cut = [sequence[: info.max_model_len] for sequence in sequences]
    findings = []
    for text, ids, expected_ids, vector in zip(texts, cut, theirs, _vectors(engine, cut), strict=True):
        same = expected_ids is None or np.array_equal(expected_ids[: info.max_model_len], ids)
        findings.append(Finding(text, len(ids), same, _cosine(vector, oracle.vector(ids))))
    return findings


def describe(findings: Sequence[Finding], threshold: float) -> Iterator[str]:
    """Lines for people: what differs, then the worst cosine."""
    for finding in findings:
        name = finding.text if len(finding.text) <= 48 else f"{finding.text[:45]}..."
        if not finding.same_ids:
            yield f"other token ids: {name!r}"
        if not finding.cosine >= threshold:
            yield f"cosine {finding.cosine:.7f}, {finding.num_tokens} tokens: {name!r}"
    worst = worst_cosine(findings)
    verdict = "the same" if passed(findings, threshold) else "NOT the same"
    yield f"{len(findings)} texts, worst cosine {worst:.7f} (at least {threshold:g} wanted): {verdict}"


def passed(findings: Sequence[Finding], threshold: float) -> bool:
    """Whether every text has the same tokens, and vectors as near as `threshold`. NaN is never near."""
    return all(finding.same_ids and finding.cosine >= threshold for finding in findings)


def worst_cosine(findings: Sequence[Finding]) -> float:
    """The least of all; NaN if one is."""
    return float(np.min([finding.cosine for finding in findings]))


def _made_up(text: str, vocab_size: int) -> Int32:
    """Ids that depend on the text: its code points, spread over the vocabulary but for its first few ids."""
    points = np.array([ord(character) for character in text], np.int64)
    return (2 + points * 7919 % max(vocab_size - 2, 1)).astype(np.int32)


def _vectors(engine: Engine, sequences: Sequence[Int32]) -> Iterator[Float32]:
    """f32[D] of each, as many in a batch as the engine takes."""
    batch: list[Int32] = []
    for sequence in [*sequences, None]:
        full = len(batch) == engine.info.max_batch_seqs
        if sequence is None or full or sum(map(len, batch)) + len(sequence) > engine.info.max_batch_tokens:
            if batch:
                yield from engine.step(RaggedBatch.pack(batch)).result().vectors
            batch = []
        if sequence is not None:
            batch.append(sequence)


def _cosine(ours: Float32, theirs: Float32) -> float:
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(invalid="ignore"):  # what is not finite gives NaN, which passes nowhere
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))

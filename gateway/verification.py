"""Whether a model gives what its authors' code gives: the comparison and the verdict.

Knows neither torch nor transformers: the oracle behind the Protocol does.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from gateway.templates import (
    PairTexts,
    Parts,
    SingleTemplate,
    Template,
    cut,
    pair_template,
    text_tokenizer,
)
from gateway.tokenization.base import Tokenizer
from gateway.tokenization.pool import TokenizerPool
from rose.batch import Engine, EngineInfo, Float32, Int32, RaggedBatch

# What rounding alone explains, by the engine's dtype: cosines of vectors, and differences of logits and of
# SPLADE's weights, which are no vectors whose length is free.
COSINES = {"float32": 0.99999, "bfloat16": 0.999, "float16": 0.999, "fp8": 0.98}
DIFFERENCES = {"float32": 0.001, "bfloat16": 0.25, "float16": 0.25, "fp8": 1.0}

# A text, or a query and a document.
Case = tuple[str, ...]
# Ids i32[n] and token types i32[n]; None: all zero.
Encoded = tuple[Int32, Int32 | None]


class Oracle(Protocol):
    """The model by its authors' code, one text or pair at a time."""

    def tokens(self, texts: Sequence[str], max_tokens: int) -> Encoded | None:
        """What it makes of a case in at most max_tokens ids; None: it has no tokenizer."""
        ...

    def output(self, input_ids: Int32, token_type_ids: Int32 | None) -> Float32:
        """f32[D] of a sequence i32[n] alone in its batch: a vector, raw logits or weights of words."""
        ...


@dataclass(frozen=True, slots=True)
class Finding:
    """One case. same_ids: whether both sides made the same tokens, of the same types, of it.

    cosine: of the two outputs. difference: the largest of any two of their numbers.
    """

    text: str
    num_tokens: int
    same_ids: bool
    cosine: float
    difference: float

    @property
    def name(self) -> str:
        """Enough of the text to know it by."""
        return repr(self.text if len(self.text) <= 48 else f"{self.text[:45]}...")


@dataclass(frozen=True, slots=True)
class Criterion:
    """What is near enough: a cosine of at least `limit`, or a difference of at most `limit`."""

    measure: Literal["cosine", "difference"]
    limit: float

    def of(self, finding: Finding) -> float:
        """What is measured."""
        return finding.cosine if self.measure == "cosine" else finding.difference

    def met(self, finding: Finding) -> bool:
        """Whether a case is near enough. NaN never is."""
        value = self.of(finding)
        return value >= self.limit if self.measure == "cosine" else value <= self.limit

    def worst(self, findings: Sequence[Finding]) -> Finding:
        """The farthest case; one with NaN if there is any."""
        sign = -1.0 if self.measure == "cosine" else 1.0
        distances = [sign * self.of(finding) for finding in findings]
        return findings[int(np.argmax(np.where(np.isnan(distances), np.inf, distances)))]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What the verdict depends on."""
    parser.add_argument(
        "--threshold",
        metavar="COSINE",
        type=float,
        help="of vectors: fail below it; default: 0.99999 in float32, 0.999 in 16 bits, 0.98 in fp8",
    )
    parser.add_argument(
        "--tolerance",
        metavar="DIFFERENCE",
        type=float,
        help="of raw logits and SPLADE's weights: fail above it; default: 0.001 in float32, 0.25 in 16 bits, "
        "1 in fp8",
    )


def criterion(info: EngineInfo, args: argparse.Namespace) -> Criterion:
    """By the model's task and dtype, unless a flag says otherwise."""
    if info.task == "embed":
        return Criterion("cosine", COSINES[info.dtype] if args.threshold is None else args.threshold)
    return Criterion("difference", DIFFERENCES[info.dtype] if args.tolerance is None else args.tolerance)


def verify(
    texts: Sequence[str], tokenizer: Tokenizer | None, engine: Engine, oracle: Oracle
) -> list[Finding]:
    """Compare all texts, and with a scorer pairs of them.

    Ours come from ragged batches, the oracle's from single sequences; both get our tokens, which are made up
    from the text if there is no tokenizer.

    Raises:
        rose.errors.EngineError: a step failed.
    """
    info = engine.info
    cases = _cases(texts, info)
    sequences = (
        [_made_up(case, info) for case in cases]
        if tokenizer is None
        else asyncio.run(_encode(cases, info, tokenizer))
    )
    findings = []
    for case, (ids, types), output in zip(cases, sequences, _outputs(engine, sequences), strict=True):
        theirs = None if tokenizer is None else oracle.tokens(case, info.max_model_len)
        same = theirs is None or _same((ids, types), theirs, typed=info.type_vocab_size > 1)
        expected = oracle.output(ids, types)
        distance = float(np.abs(output - expected).max())
        findings.append(Finding(" | ".join(case), len(ids), same, _cosine(output, expected), distance))
    return findings


def describe(findings: Sequence[Finding], wanted: Criterion) -> Iterator[str]:
    """Lines for people: what differs, then the worst case."""
    for finding in findings:
        if not finding.same_ids:
            yield f"other tokens: {finding.name}"
        if not wanted.met(finding):
            value = wanted.of(finding)
            yield f"{wanted.measure} {value:.7f}, {finding.num_tokens} tokens: {finding.name}"
    worst = wanted.worst(findings)
    verdict = "the same" if passed(findings, wanted) else "NOT the same"
    bound = "at least" if wanted.measure == "cosine" else "at most"
    found = f"worst {wanted.measure} {wanted.of(worst):.7f} of {worst.name}"
    yield f"{len(findings)} texts, {found} ({bound} {wanted.limit:g} wanted): {verdict}"


def passed(findings: Sequence[Finding], wanted: Criterion) -> bool:
    """Whether every case has the same tokens and a result that is near enough."""
    return all(finding.same_ids and wanted.met(finding) for finding in findings)


def _cases(texts: Sequence[str], info: EngineInfo) -> list[Case]:
    """Each text, and for a scorer each with the one that follows; for one that reads a chat only those."""
    singles: list[Case] = [(text,) for text in texts]
    if info.task != "score":
        return singles
    pairs: list[Case] = list(zip(texts, [*texts[1:], texts[0]], strict=True))
    return pairs if info.score_template == "qwen3" else singles + pairs


async def _encode(cases: Sequence[Case], info: EngineInfo, tokenizer: Tokenizer) -> list[Encoded]:
    """As the server does it: by its templates, and cut inside the texts to what the model takes."""
    pool = TokenizerPool(text_tokenizer(info, tokenizer), threads=1, inline_chars=sys.maxsize)
    single, pair = SingleTemplate(tokenizer.special_tokens), pair_template(info, tokenizer)
    joined = []
    for case in cases:
        template: Template
        parts: Parts
        if len(case) == 1:
            template, parts = single, (tokenizer.special_tokens.strip((await pool.encode(case))[0]),)
        else:
            template, parts = pair, (await pair.encode(PairTexts([case[0]], [case[1]]), pool))[0]
        room = max(info.max_model_len - template.overhead, 0)
        joined.append(template.join(cut(parts, room, keep_end=False)))
    pool.close()
    return joined


def _made_up(case: Case, info: EngineInfo) -> Encoded:
    """Ids that depend on the text: its code points, spread over the vocabulary but for its first few ids."""
    points = [np.array([ord(character) for character in text], np.int64) for text in case]
    ids = 2 + np.concatenate(points) * 7919 % max(info.vocab_size - 2, 1)
    types = np.repeat(np.arange(len(case)), [len(part) for part in points]).astype(np.int32)
    count = info.max_model_len
    typed = info.type_vocab_size > 1 and len(case) > 1
    return ids.astype(np.int32)[:count], types[:count] if typed else None


def _same(ours: Encoded, theirs: Encoded, *, typed: bool) -> bool:
    """Whether the ids are the same, and of models that tell types apart the types; None: all zero."""
    if not np.array_equal(ours[0], theirs[0]):
        return False
    left, right = (np.zeros_like(ids) if types is None else types for ids, types in (ours, theirs))
    return not typed or np.array_equal(left, right)


def _outputs(engine: Engine, sequences: Sequence[Encoded]) -> Iterator[Float32]:
    """f32[D] of each, as many in a batch as the engine takes."""
    batch: list[Encoded] = []
    for sequence in sequences:
        tokens = sum(len(ids) for ids, _ in [*batch, sequence])
        if batch and (len(batch) == engine.info.max_batch_seqs or tokens > engine.info.max_batch_tokens):
            yield from _step(engine, batch)
            batch = []
        batch.append(sequence)
    yield from _step(engine, batch)


def _step(engine: Engine, batch: Sequence[Encoded]) -> Float32:
    """f32[B, D]."""
    ids, types = zip(*batch, strict=True)
    return engine.step(RaggedBatch.pack(ids, types)).result().vectors


def _cosine(ours: Float32, theirs: Float32) -> float:
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(invalid="ignore"):  # what is not finite gives NaN, which passes nowhere
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))

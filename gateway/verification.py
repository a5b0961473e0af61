"""Whether a model gives what its authors' code gives; `gateway.verification_findings` has the verdict.

Knows neither torch nor transformers: the oracle behind the Protocol does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

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
from gateway.verification_findings import INT8, MAIN, Criterion, Finding
from rose.batch import (
    NO_TOKEN_OUTPUTS,
    BatchResult,
    Engine,
    EngineInfo,
    Float32,
    Int8,
    Int32,
    RaggedBatch,
    TokenOutput,
)

# A text, or a query and a document.
Case = tuple[str, ...]
# Ids i32[n] and token types i32[n]; None: all zero.
Encoded = tuple[Int32, Int32 | None]


class Oracle(Protocol):
    """The model by its authors' code, one text or pair at a time."""

    def tokens(self, texts: Sequence[str], max_tokens: int) -> Encoded | None:
        """What it makes of a case in at most max_tokens ids; None: it has no tokenizer."""
        ...

    def result(self, input_ids: Int32, token_type_ids: Int32 | None) -> BatchResult:
        """What a sequence i32[n] alone gives: a vector, raw logits or weights of words; and its tokens.

        No int8: see `quantised`.
        """
        ...

    def quantised(self, vectors: Float32) -> Int8:
        """i8[S, D]: what the model's own quantiser makes of f32[S, D]."""
        ...


def verify(
    texts: Sequence[str],
    tokenizer: Tokenizer | None,
    engine: Engine,
    oracle: Oracle,
    wanted: Mapping[str, Criterion],
) -> list[Finding]:
    """Compare the outputs in `wanted` of all texts, and with a scorer of pairs of them.

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
    kinds = frozenset(info.token_outputs)
    of_tokens = _results(engine, sequences, kinds) if kinds else [None] * len(cases)
    findings, given = [], zip(_results(engine, sequences), of_tokens, strict=True)
    for case, (ids, types), (ours, tokens) in zip(cases, sequences, given, strict=True):
        theirs = None if tokenizer is None else oracle.tokens(case, info.max_model_len)
        same = theirs is None or _same((ids, types), theirs, typed=info.type_vocab_size > 1)
        for output, pair in _pairs(ours, tokens, oracle.result(ids, types), oracle, MAIN[info.task]):
            measured = wanted[output].of(*pair)
            findings.append(Finding(" | ".join(case), len(ids), output, same, measured))
    return findings


def _pairs(
    ours: BatchResult, of_tokens: BatchResult | None, theirs: BatchResult, oracle: Oracle, main: str
) -> Iterator[tuple[str, tuple[NDArray[Any], NDArray[Any]]]]:
    """Each output of one case: ours and theirs. Their int8 is of our vector, which is itself compared."""
    if of_tokens is not None:
        for kind, values in of_tokens.tokens.items():
            yield kind, (values, theirs.tokens[kind])
    if ours.int8 is not None:
        yield INT8, (ours.int8, oracle.quantised(ours.vectors))
    yield main, (ours.vectors, theirs.vectors)


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


def _results(
    engine: Engine, sequences: Sequence[Encoded], kinds: frozenset[TokenOutput] = NO_TOKEN_OUTPUTS
) -> Iterator[BatchResult]:
    """Of each sequence, and of its tokens if they are wanted; as many in a batch as the engine takes."""
    info, batch = engine.info, list[Encoded]()
    most_tokens = info.most_tokens(kinds)
    for sequence in sequences:
        tokens = sum(len(ids) for ids, _ in [*batch, sequence])
        if batch and (len(batch) == info.max_batch_seqs or tokens > most_tokens):
            yield from _step(engine, batch, kinds)
            batch = []
        batch.append(sequence)
    yield from _step(engine, batch, kinds)


def _step(
    engine: Engine, sequences: Sequence[Encoded], kinds: frozenset[TokenOutput]
) -> Iterator[BatchResult]:
    """One row of a result at a time."""
    ids, types = zip(*sequences, strict=True)
    batch = RaggedBatch.pack(ids, types, token_outputs=kinds)
    result = engine.step(batch).result()
    for row, (start, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        int8 = None if result.int8 is None else result.int8[row : row + 1]
        tokens = {kind: result.tokens[kind][start:end] for kind in kinds}
        yield BatchResult(result.vectors[row : row + 1], int8, tokens=tokens)

"""How a query and a document, or a text to classify, become the one sequence that a scoring model reads.

What is too long is cut inside the texts; what a template puts around them never is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gateway.inputs import check_repeated
from gateway.tokenization.base import PairTokens, SpecialTokens, Tokenizer
from gateway.tokenization.pool import TokenizerPool
from rose.batch import EngineInfo, Int32

# Source: the model card of Qwen/Qwen3-Reranker-0.6B.
QWEN3_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QWEN3_BODY = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
QWEN3_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

_NONE = np.zeros(0, np.int32)
# How many times as much of a pair is read if that does not show which text is longer.
_GROWTH = 4

# One text's own tokens i32[n], or those of two texts.
Parts = tuple[Int32, ...]


@dataclass(frozen=True, slots=True)
class PairTexts:
    """Queries and documents: as many of both, or one query for all documents.

    instruction: what makes a document relevant, for models that read it; None: the model's own words.
    """

    queries: list[str]
    documents: list[str]
    instruction: str | None = None


class Template(Protocol):
    """Puts the tokens of a text, or of two, into what the model was trained to read."""

    @property
    def overhead(self) -> int:
        """Tokens that the template adds."""
        ...

    def join(self, parts: Parts) -> tuple[Int32, Int32 | None]:
        """Ids i32[n] with the template, and token types i32[n]; None: all zero."""
        ...


class PairTemplate(Template, Protocol):
    """A template for a query and a document."""

    async def encode(
        self, texts: PairTexts, tokenizer: TokenizerPool, most: int | None = None, *, keep_end: bool = False
    ) -> list[Parts]:
        """The tokens of each pair, without the template.

        most: `cut` will cut them to so many, with this `keep_end`, so no more need be read than that takes.
        """
        ...


@dataclass(frozen=True, slots=True)
class SingleTemplate:
    """One text, as for an embedding."""

    tokens: SpecialTokens

    @property
    def overhead(self) -> int:
        """See Template."""
        return len(self.tokens.prefix) + len(self.tokens.suffix)

    def join(self, parts: Parts) -> tuple[Int32, Int32 | None]:
        """See Template."""
        return np.concatenate([self.tokens.prefix, *parts, self.tokens.suffix]), None


@dataclass(frozen=True, slots=True)
class TokenizerPairTemplate:
    """Two texts as the tokenizer itself joins them. types: whether the model has token types."""

    tokens: PairTokens
    types: bool

    @property
    def overhead(self) -> int:
        """See Template."""
        return self.tokens.count

    async def encode(
        self, texts: PairTexts, tokenizer: TokenizerPool, most: int | None = None, *, keep_end: bool = False
    ) -> list[Parts]:
        """See PairTemplate. A query for many documents is tokenised once: parts of a pair never meet.

        `cut` gives the odd token to the longer one, so then a pair is read until one of the two ends.
        """
        limit, is_odd = (None, False) if most is None else (most + 1, most % 2 == 1)
        pairs = await self._read(texts, tokenizer, limit, keep_end)
        while limit is not None and is_odd and any(min(map(len, pair)) >= limit for pair in pairs):
            limit *= _GROWTH
            pairs = await self._read(texts, tokenizer, limit, keep_end)
        return pairs

    async def _read(
        self, texts: PairTexts, tokenizer: TokenizerPool, limit: int | None, keep_end: bool
    ) -> list[Parts]:
        ids = await tokenizer.encode_bare([*texts.queries, *texts.documents], limit, ends=keep_end)
        queries, documents = ids[: len(texts.queries)], ids[len(texts.queries) :]
        if len(queries) == 1:
            queries = queries * len(documents)
        return list(zip(queries, documents, strict=True))

    def join(self, parts: Parts) -> tuple[Int32, Int32 | None]:
        """See Template."""
        ids, types = self.tokens.join(*parts)
        return ids, types if self.types else None


@dataclass(frozen=True, slots=True)
class Qwen3Template:
    """A chat in which Qwen3-Reranker is asked for yes or no. Texts and instruction are one part.

    prefix, suffix: i32[p] and i32[s], made by a tokenizer that knows their special tokens; the one that reads
    the texts must not, or a text could end the chat and start its own.
    """

    prefix: Int32
    suffix: Int32

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Qwen3Template:
        """With the tokens that `tokenizer`, not literal, makes of the template."""
        prefix, suffix = tokenizer.encode([QWEN3_PREFIX, QWEN3_SUFFIX])
        strip = tokenizer.special_tokens.strip
        return cls(strip(prefix), strip(suffix))

    @property
    def overhead(self) -> int:
        """See Template."""
        return len(self.prefix) + len(self.suffix)

    async def encode(
        self, texts: PairTexts, tokenizer: TokenizerPool, most: int | None = None, *, keep_end: bool = False
    ) -> list[Parts]:
        """See PairTemplate.

        Raises:
            ApiError: INPUT_TOO_LONG.
        """
        queries, documents = texts.queries, texts.documents
        instruction = QWEN3_INSTRUCTION if texts.instruction is None else texts.instruction
        check_repeated(len(instruction), len(documents), "instruction")
        if len(queries) == 1:
            check_repeated(len(queries[0]), len(documents), "query")
            queries = queries * len(documents)
        bodies = [
            QWEN3_BODY.format(instruction=instruction, query=query, document=document)
            for query, document in zip(queries, documents, strict=True)
        ]
        return [(row,) for row in await tokenizer.encode_bare(bodies, most, ends=keep_end)]

    def join(self, parts: Parts) -> tuple[Int32, Int32 | None]:
        """See Template."""
        return np.concatenate([self.prefix, *parts, self.suffix]), None


def pair_template(info: EngineInfo, tokenizer: Tokenizer | None) -> PairTemplate:
    """The template of a scoring model; `tokenizer`: as loaded, not literal; without one it is empty."""
    if tokenizer is None:
        return TokenizerPairTemplate(PairTokens(_NONE, _NONE, _NONE, (0, 0, 0, 0, 0)), types=False)
    if info.score_template == "qwen3":
        return Qwen3Template.of(tokenizer)
    return TokenizerPairTemplate(tokenizer.pair_tokens, info.type_vocab_size > 1)


def text_tokenizer(info: EngineInfo, tokenizer: Tokenizer) -> Tokenizer:
    """What reads clients' texts: literal where a special token in one would be taken for the template's."""
    templated = info.score_template == "qwen3" or info.chunk_separator is not None
    return tokenizer.literal() if templated else tokenizer


def cut(parts: Parts, max_tokens: int, *, keep_end: bool) -> Parts:
    """`parts` in at most max_tokens, by the end of the longest, or by its beginning if `keep_end`.

    Two parts share the room evenly if both are longer than half of it, as with transformers' longest_first.
    """
    if sum(map(len, parts)) <= max_tokens:
        return parts
    if len(parts) == 1:
        return (_cut(parts[0], max_tokens, keep_end),)
    first, second = parts
    half = max_tokens // 2
    if min(len(first), len(second)) > half:
        # The odd token goes to the longer one; of two as long, to the second.
        rooms = (half, max_tokens - half) if len(first) <= len(second) else (max_tokens - half, half)
    elif len(first) <= len(second):
        rooms = (len(first), max_tokens - len(first))
    else:
        rooms = (max_tokens - len(second), len(second))
    return _cut(first, rooms[0], keep_end), _cut(second, rooms[1], keep_end)


def _cut(ids: Int32, count: int, keep_end: bool) -> Int32:
    return ids[len(ids) - count :] if keep_end and count < len(ids) else ids[:count]

"""How two tokenizers are compared."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gateway.tokenization.base import Tokenizer


def vocabulary(tokenizer: Tokenizer) -> list[str]:
    """Words of a tokenizer, as texts have them; at most 4000."""
    step = max(1, tokenizer.vocab_size // 4000)
    ids = np.arange(0, tokenizer.vocab_size, step, dtype=np.int32)[:, None]
    return [word for word in tokenizer.decode(ids, skip_special_tokens=False) if word] or ["a"]


def assert_same(
    tokenizer: Tokenizer, reference: Tokenizer, texts: Iterable[str], max_tokens: int | None = None
) -> None:
    """Every text has the same ids with both; the message has the first that does not."""
    texts = list(texts)
    rows = zip(texts, tokenizer.encode(texts, max_tokens), reference.encode(texts, max_tokens), strict=True)
    different = [
        (text, own.tolist(), other.tolist()) for text, own, other in rows if own.tolist() != other.tolist()
    ]
    if different:
        text, own, other = min(different, key=lambda row: len(row[0]))
        message = f"{len(different)} of {len(texts)} texts differ, the shortest: {text[:200]!a}"
        raise AssertionError(f"{message}\n ours {own[:40]}\nthe library's {other[:40]}")

"""all-MiniLM-L6-v2 by `transformers`, fp32: what a server on the same weights is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_TOKENS = 256


@cache
def _load(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer

    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


def embed(folder: Path, texts: Sequence[str]) -> NDArray[np.float32]:
    """f32[n, 384]: mean over tokens, L2-normalised, texts cut to 256 tokens."""
    import torch

    tokenizer, model = _load(folder)
    inputs = tokenizer(list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1)
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        vectors: NDArray[np.float32] = torch.nn.functional.normalize(pooled, dim=1).numpy()
    return vectors


def count_tokens(folder: Path, texts: Sequence[str]) -> int:
    """Tokens of all texts, special ones included."""
    tokenizer, _ = _load(folder)
    return sum(len(tokenizer(text)["input_ids"]) for text in texts)


def cosines(left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.float64]:
    """f64[n]: cosine of each pair of rows."""
    a, b = np.asarray(left, np.float64), np.asarray(right, np.float64)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    result: NDArray[np.float64] = (a * b).sum(-1) / norms
    return result

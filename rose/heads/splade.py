"""SPLADE: a weight for every word of the vocabulary, by the masked language model's own head.

By torch's own kernels, which allocate; in a CUDA graph that comes from the graph's pool.
Source: Formal et al., SPLADE v2, arXiv 2109.10086; tensor names as in transformers' BertLMPredictionHead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import layer_norm

from rose.device_batch import Outputs
from rose.kernels.segments import max_pool
from rose.layers.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from rose.config import ModelConfig
    from rose.kernels.pooling import Which
    from rose.weights import WeightSource

# Words whose logits are there at a time: 128 MiB of fp32 at 16 384 tokens, where all would be 2 GB.
_WORDS = 2048


class SpladeHead:
    """log(1 + max(0, largest logit over the sequence's tokens)) of each word; see EmbeddingHead for the use.

    words: the word embedding [V, H] on its device, which is the output embedding too.
    """

    which: Which | None = None

    def __init__(self, config: ModelConfig, weights: WeightSource, words: Tensor) -> None:
        self._words = words
        self._eps = config.norm_eps
        size, name = config.hidden_size, "cls.predictions"

        def read(part: str, *shape: int) -> Tensor:
            return weights.tensor(f"{name}.{part}", shape).to(words.device, words.dtype)

        self._bias = read("bias", config.vocab_size)
        self._dense = Linear(read("transform.dense.weight", size, size), read("transform.dense.bias", size))
        self._norm = [read(f"transform.LayerNorm.{part}", size) for part in ("weight", "bias")]

    def __call__(self, hidden: Tensor, bounds: Tensor, which: Which | None, outputs: Outputs) -> None:
        """Write outputs.vectors f32[S, V] from hidden [T, H]. bounds: i32[S+1]. which: None."""
        weight, bias = self._norm
        x = layer_norm(self._dense.gelu(hidden), weight.shape, weight, bias, self._eps)
        vectors = outputs.vectors
        for start in range(0, len(self._words), _WORDS):
            words = slice(start, start + _WORDS)
            logits = torch.addmm(self._bias[words], x, self._words[words].t())
            max_pool(logits, bounds, Outputs(vectors[:, words]))
        # The same as of each token's logits, since both functions rise; so the largest alone needs them.
        torch.log1p(torch.relu_(vectors), out=vectors)

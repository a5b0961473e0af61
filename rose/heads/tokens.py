"""What a model gives for each token: its hidden states, BGE-M3's lexical weights and its ColBERT vectors.

By torch's own kernels in fp32, which allocate; in a CUDA graph that comes from the graph's pool.
Source: Chen et al., BGE M3-Embedding, arXiv 2402.03216; Khattab and Zaharia, ColBERT, arXiv 2004.12832.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import normalize

from rose.configs.token_heads import HEAD_FILES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from rose.batch import TokenOutput
    from rose.config import ModelConfig
    from rose.weights import WeightSource


class TokenHeads:
    """The linear layers over tokens that a model has; none gives hidden states only."""

    def __init__(self, layers: Mapping[TokenOutput, tuple[Tensor, Tensor]] | None = None) -> None:
        """layers: weight f32[W, H] and bias f32[W] of each head."""
        self._layers = layers or {}

    @classmethod
    def read(cls, config: ModelConfig, weights: WeightSource, device: torch.device) -> TokenHeads:
        """The heads that `config` names, on `device`.

        Raises:
            ModelLoadError: a file is damaged, or a tensor is missing or has a wrong shape.
        """

        def read(kind: TokenOutput, part: str, *shape: int) -> Tensor:
            return weights.tensor(f"{HEAD_FILES[kind]}/{part}", shape).to(device, torch.float32)

        layers = {}
        for kind in config.token_heads:
            width = config.token_outputs[kind]
            layers[kind] = (read(kind, "weight", width, config.hidden_size), read(kind, "bias", width))
        return cls(layers)

    def __call__(self, hidden: Tensor, tokens: Mapping[TokenOutput, Tensor]) -> None:
        """Write f32[T, W] of each wanted kind, from hidden [T, H]."""
        x = tokens["hidden"].copy_(hidden) if "hidden" in tokens else hidden.float()
        for kind, (weight, bias) in self._layers.items():
            if kind not in tokens:
                continue
            out = torch.addmm(bias, x, weight.t(), out=tokens[kind])
            if kind == "lexical":
                torch.relu_(out)
            else:
                normalize(out, dim=1, out=out)

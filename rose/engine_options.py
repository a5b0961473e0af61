"""How an engine is to run: settings that are no property of the model. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DEFAULT_BATCH_TOKENS = 16384
MOST_BATCH_TOKENS = 131072  # of a GPU with memory for them


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of one engine, built once at start.

    dtype: "auto" is float32 on the CPU and bfloat16 on CUDA; of a folder with FP8 weights "fp8" on CUDA
        devices that multiply them. "fp8": products of layers only, all else is as in "auto".
    device: "auto" is CUDA if there is one, else the CPU; "cpu", "cuda" and "cuda:1" choose.
    max_model_len: longest sequence in tokens; None: the model's own limit, cut to max_batch_tokens if set.
    max_batch_tokens: most tokens a step takes, and what CUDA workspaces are sized for; None: 16384, on a
        CUDA device with memory for them up to 131072, or max_model_len if that is more, since a sequence is
        never split.
    max_batch_seqs: most sequences a step takes.
    num_threads: CPU threads of a forward; None: as many as this process may run on.
    seed: of dummy weights.
    max_token_bytes: the most that a step gives of token outputs, in bytes of f32; see rose.batch.EngineInfo.

    Of CUDA engines only:
    capture: "off" runs every step eagerly; "lazy" captures a shape on its second hit; "all" captures
        every shape at start.
    max_capture_tokens: no graph above this many tokens; None: measured at start.
    max_graphs, max_graph_bytes: bounds of what is kept, least recently used out first.
    max_in_flight: steps launched but not done; one more is refused.
    max_pinned_bytes: page-locked memory for results that are running or still in use.
    max_token_pinned_bytes: more of it, once token outputs are asked for.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    max_batch_seqs: int = 256
    num_threads: int | None = None
    seed: int = 0
    max_token_bytes: int = 64 << 20
    capture: Literal["off", "lazy", "all"] = "lazy"
    max_capture_tokens: int | None = None
    max_graphs: int = 512
    max_graph_bytes: int = 2 << 30
    max_in_flight: int = 4
    max_pinned_bytes: int = 256 << 20
    max_token_pinned_bytes: int = 1 << 30

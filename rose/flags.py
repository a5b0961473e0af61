"""The command-line flags of a model and its engine, and the options they make. Reads no argv itself."""

from __future__ import annotations

import argparse
import re
from typing import TypeAlias

from rose.engine_options import DEFAULT_BATCH_TOKENS, MOST_BATCH_TOKENS, EngineOptions
from rose.model_aliases import ALIASES

Group: TypeAlias = "argparse._ArgumentGroup"

# Not as torch reads them: its import takes seconds.
_DEVICE = re.compile(r"auto|(cpu|cuda)(:\d+)?")


def add_model_flags(group: Group) -> None:
    """Which model, and how it is loaded."""
    group.add_argument(
        "--model",
        metavar="NAME_OR_PATH",
        type=_model,
        default="minilm",
        help="a folder in Hugging Face layout, a hub name (org/name or org/name@revision), or one of "
        f"{', '.join(ALIASES)}; default: %(default)s",
    )
    group.add_argument(
        "--load-format",
        choices=("auto", "safetensors", "dummy"),
        default="auto",
        help="auto: safetensors, else pytorch_model.bin; safetensors: refuse the latter; dummy: seeded "
        "random weights in the model's shapes, without a download: right speed, meaningless vectors; "
        "default: %(default)s",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16", "fp8"),
        default="auto",
        help="of weights and arithmetic; 16 bits halve memory and cost precision (cosine 0.999 instead of "
        "0.99999); fp8: 8 bits in the products of layers, fast on Hopper and Ada, at a cosine of some 0.99; "
        "auto: float32 on the CPU, bfloat16 on CUDA; default: %(default)s",
    )
    group.add_argument(
        "--device",
        metavar="auto|cpu|cuda|cuda:N",
        type=_devices,
        default="auto",
        help="auto: CUDA if there is a device, else the CPU; a server takes several, like cuda:0,cuda:1, and "
        "runs an engine on each; default: %(default)s",
    )
    group.add_argument(
        "--seed",
        metavar="N",
        type=int,
        default=0,
        help="of dummy weights: the same seed gives the same vectors; default: %(default)s",
    )


def add_engine_flags(group: Group) -> None:
    """How large batches may be, and what is spent on them."""
    defaults = EngineOptions()
    _add_batch_flags(group, defaults)
    _add_graph_flags(group, defaults)


def _add_batch_flags(group: Group, defaults: EngineOptions) -> None:
    group.add_argument(
        "--max-model-len",
        metavar="TOKENS",
        type=positive,
        help="longest sequence; longer ones are refused, or cut if asked; default: the model's own limit",
    )
    group.add_argument(
        "--max-batch-tokens",
        metavar="TOKENS",
        type=positive,
        help="most tokens in one forward, for which device memory is set aside; the batch that pays is "
        "learned while serving, and smaller, but on a GPU one request may fill a step by itself; default: "
        f"{DEFAULT_BATCH_TOKENS}, on a GPU up to {MOST_BATCH_TOKENS} by its memory, or --max-model-len if "
        "more",
    )
    group.add_argument(
        "--max-batch-seqs",
        metavar="N",
        type=positive,
        default=defaults.max_batch_seqs,
        help="most sequences in one forward; default: %(default)s",
    )
    group.add_argument(
        "--max-token-bytes",
        metavar="BYTES",
        type=positive,
        default=defaults.max_token_bytes,
        help="what the tokens of one request, or of one forward, may give where vectors of tokens or weights "
        "of words are asked for, as float32; default: %(default)s",
    )
    group.add_argument(
        "--threads",
        metavar="N",
        type=positive,
        help="CPU threads of one forward on the CPU; default: all that the process may use",
    )


def _add_graph_flags(group: Group, defaults: EngineOptions) -> None:
    group.add_argument(
        "--capture",
        choices=("lazy", "all", "off"),
        default=defaults.capture,
        help="CUDA graphs. lazy: capture a batch shape when it comes a second time, a stall of milliseconds; "
        "all: capture every shape before ready, a slow start; off: launch kernel by kernel, slow for small "
        "batches; default: %(default)s",
    )
    group.add_argument(
        "--max-graphs",
        metavar="N",
        type=positive,
        default=defaults.max_graphs,
        help="CUDA graphs kept; the least recently used goes first; default: %(default)s",
    )
    group.add_argument(
        "--max-graph-bytes",
        metavar="BYTES",
        type=positive,
        default=defaults.max_graph_bytes,
        help="device memory of all CUDA graphs together; default: %(default)s",
    )


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """What the parsed flags of both groups say."""
    return EngineOptions(
        dtype=args.dtype,
        device=args.device,
        max_model_len=args.max_model_len,
        max_batch_tokens=args.max_batch_tokens,
        max_batch_seqs=args.max_batch_seqs,
        max_token_bytes=args.max_token_bytes,
        num_threads=args.threads,
        seed=args.seed,
        capture=args.capture,
        max_graphs=args.max_graphs,
        max_graph_bytes=args.max_graph_bytes,
    )


def _model(text: str) -> str:
    if not text:  # as a path it is the current folder
        raise argparse.ArgumentTypeError("it is empty; give a folder, a hub name or an alias")
    return text


def _devices(text: str) -> str:
    for part in text.split(","):
        if not _DEVICE.fullmatch(part.strip()):
            raise argparse.ArgumentTypeError(f"{part!r} is not auto, cpu, cuda or cuda:N")
    return text


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value

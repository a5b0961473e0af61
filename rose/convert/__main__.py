"""The command `python -m rose.convert`: a model folder to one whose products have FP8 weights.

Other servers that read compressed-tensors (vLLM, SGLang) read the result, and so does this one. With
--calibration it also holds a fixed scale for each product's input, measured on texts; this server needs none
and finds the scale of every token as it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from rose.batch import Int32
from rose.config import ModelConfig, load_config
from rose.convert.folder import check_absent, fp8_tensors, write_folder
from rose.convert.record import CPU, RecordingWeights, run_texts
from rose.errors import ModelLoadError
from rose.layers.fp8_weights import FP8_ARCHITECTURES
from rose.models.registry import build_model
from rose.oracle import folder_tokenizer
from rose.progress import Bar
from rose.weights import open_weights

# Longer texts are cut for calibration: what a layer makes of a token depends little on how many there are.
_MAX_TOKENS = 1024


def convert(folder: Path, out: Path, texts: Path | None = None) -> int:
    """Write `out`; how many products it has.

    texts: a file with a text a line, to measure inputs on.

    Raises:
        ModelLoadError: the folder, the texts or where to write do not allow it.
    """
    check_absent(out)
    config = load_config(folder)
    if config.fp8_weights:
        raise ModelLoadError(f"{folder} has FP8 weights already")
    if config.architecture not in FP8_ARCHITECTURES:
        families = ", ".join(sorted(FP8_ARCHITECTURES))
        raise ModelLoadError(f"{folder} is of {config.architecture}; FP8 is for {families}")
    sequences = None if texts is None else list(_tokens(folder, _lines(texts), config))
    stored = open_weights(folder)
    with Bar(desc="weights", unit="weight") as bar:
        weights = RecordingWeights(stored, _MAX_TOKENS, bar.update)
        model = build_model(config, weights, torch.float32, CPU, _MAX_TOKENS)
    if sequences is not None:
        run_texts(model, Bar(sequences, "texts", unit="text"))
    static = sequences is not None
    write_folder(folder, out, fp8_tensors(stored.root, weights.products, static), static)
    return len(weights.products)


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from None
    found = [line for line in lines if line.strip()]
    if not found:
        raise ModelLoadError(f"{path} holds no text; a text a line is needed")
    return found


def _tokens(folder: Path, texts: Iterable[str], config: ModelConfig) -> Iterator[Int32]:
    """i32[n] of each text, as the folder's own tokenizer makes them."""
    try:
        tokenizer = folder_tokenizer(folder)
    except ImportError as error:
        raise ModelLoadError(f"--calibration needs transformers: {error}") from None
    if tokenizer is None:
        raise ModelLoadError(f"{folder} has no tokenizer.json, which --calibration needs")
    longest = min(config.max_model_len, _MAX_TOKENS)
    for text in texts:
        yield np.array(tokenizer(text, truncation=True, max_length=longest)["input_ids"], np.int32)


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; 0 if it went well."""
    parser = argparse.ArgumentParser(prog="python -m rose.convert", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="MODEL_FOLDER", help="in Hugging Face layout")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; it must not exist")
    parser.add_argument(
        "--dtype", choices=["fp8"], default="fp8", help="of the products' weights; default: %(default)s"
    )
    parser.add_argument(
        "--calibration", type=Path, metavar="TEXTS", help="file with a text a line, for fixed input scales"
    )
    arguments = parser.parse_args(argv)
    try:
        count = convert(arguments.folder, arguments.out, arguments.calibration)
    except ModelLoadError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    size = (arguments.out / "model.safetensors").stat().st_size
    sys.stdout.write(f"{arguments.out}: {count} FP8 weights, {size / 1e6:.1f} MB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

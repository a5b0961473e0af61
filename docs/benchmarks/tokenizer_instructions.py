"""Instructions that a token takes: of ours, the tokenizers library and SentencePiece, counted by callgrind.

    python docs/benchmarks/tokenizer_instructions.py TEXT --tokenizer tokenizer.json [--lengths 16 128 500]

Needs valgrind. The texts are those of gateway.tokenization.bench, each read once before it counts, so that
caches are warm. What calling a Python function takes is taken off. A busy machine does not change the counts;
valgrind knows no AVX-512, so all three run as on a processor without it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gateway.tokenization import bench
from gateway.tokenization.precompile import precompile

TEXTS = 40
ENVIRONMENT = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "", "TOKENIZERS_PARALLELISM": "false"}
# Two system calls that nobody else makes: counting starts before one, and ends after the other.
VALGRIND = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no"]
VALGRIND += ["--zero-before=getpgid", "--dump-after=getsid"]


def count(encode: bench.Encode, texts: list[str], folder: Path) -> int:
    """Instructions that encoding the texts takes."""
    for text in texts:
        encode(text)
    known = set(folder.iterdir())
    os.getpgid(0)
    for text in texts:
        encode(text)
    os.getsid(0)
    [dump] = set(folder.iterdir()) - known
    found = re.search(r"^(?:summary|totals): (\d+)", dump.read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def instrument(state: str) -> None:
    """Have callgrind count, or not: it is slow meanwhile. state: on or off."""
    command = ["callgrind_control", f"--instr={state}", str(os.getpid())]
    subprocess.run(command, check=True, capture_output=True)


def measure(text: Path, tokenizer: Path, lengths: list[int], folder: Path) -> None:
    """Print a line a length."""
    library, encoders = bench.encoders_of(tokenizer)
    for num_tokens in lengths:
        texts = bench.cut(text.read_text(encoding="utf-8"), library, num_tokens)[:TEXTS]
        for encode in encoders.values():
            encode(texts[0])
        instrument("on")
        call = count(lambda text: text, texts, folder)
        cells = []
        for name, encode in encoders.items():
            a_token = (count(encode, texts, folder) - call) / num_tokens / len(texts)
            cells.append(f"{name} {a_token:7.0f}")
        instrument("off")
        print(f"{num_tokens:4d} tokens, instructions a token: {'  '.join(cells)}", flush=True)


def main() -> None:
    """Measure under valgrind, once the code for such a processor is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 128, 500])
    parser.add_argument("--dumps", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dumps is not None:
        measure(arguments.text, arguments.tokenizer, arguments.lengths, arguments.dumps)
        return
    os.environ.update(ENVIRONMENT)
    precompile(arguments.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        dumps = f"--callgrind-out-file={folder}/dump"
        command = [*VALGRIND, dumps, sys.executable, *sys.argv, "--dumps", folder]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()

"""Machine code made in a process of its own: making it here would take the GIL from requests for seconds."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_NICE = 5


def precompile(path: Path) -> None:
    """Have another process, which ends with this one, keep the code that the tokenizer.json `path` needs.

    Nothing comes of it where that process fails; whoever needs the code makes it.
    """
    command = [sys.executable, "-m", "gateway.tokenization.precompile", str(path.absolute())]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet) as process:
        process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Make and keep the code, unless the pipe from the process that wants it closes first."""
    from gateway.tokenization.huggingface import HuggingFaceTokenizer
    from gateway.tokenization.loading import compiled

    parser = argparse.ArgumentParser(prog="python -m gateway.tokenization.precompile", description=__doc__)
    parser.add_argument("path", type=Path, help="a tokenizer.json")
    path = parser.parse_args(argv).path
    os.nice(_NICE)
    threading.Thread(target=_end_with_the_pipe, daemon=True).start()
    compiled(HuggingFaceTokenizer.from_file(path))
    return 0


def _end_with_the_pipe() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

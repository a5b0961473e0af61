"""Run as a program: build a model's Triton kernels into a folder, then start that model with them.

Argument: the folder. Prints a JSON object: how many were built; what was said when all of them were there,
after the cubin of one was damaged and the record of another, and with none. Not in the test process, because
Triton is either an interpreter or a compiler there.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from rose.aot import build_triton, folders
from rose.config import ModelConfig, load_config
from rose.kernels.jit import prebuilt
from rose.kernels.jit.prebuilt import PrebuiltFunction


class Lines(logging.Handler):
    """What was logged since the last `taken`."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def taken(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines


def start(config: ModelConfig, folder: Path, lines: Lines) -> list[str]:
    """What a start in a new process says."""
    folders.default_folders = lambda: (folder,)
    prebuilt._built.cache_clear()
    for module in list(sys.modules.values()):
        for value in list(vars(module).values()) if module.__name__.startswith("rose.kernels.jit.") else ():
            if isinstance(value, PrebuiltFunction):
                value.device_caches.clear()
    with build_triton.hopper(True, True):
        build_triton.ask_for_kernels(config)
    return lines.taken()


def main(folder: Path) -> None:
    lines = Lines()
    logging.getLogger("rose.kernels.jit").addHandler(lines)
    logging.getLogger("rose.kernels.jit").setLevel(logging.INFO)
    config = load_config(build_triton.PRESETS / "minilm")
    said: dict[str, object] = {"built": build_triton.build([config], folder)}
    lines.taken()
    said["all"] = start(config, folder, lines)
    cubin, record = sorted((folder / prebuilt.SUBFOLDER).glob("_embed_bert_qkv*"))[:2]
    other = sorted((folder / prebuilt.SUBFOLDER).glob("_finish-*.json"))[0]
    assert cubin.suffix == ".cubin" and record.suffix == ".json"
    cubin.write_bytes(cubin.read_bytes()[:-1])
    other.write_text("{")
    said["damaged"] = start(config, folder, lines)
    said["none"] = start(config, folder / "elsewhere", lines)
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

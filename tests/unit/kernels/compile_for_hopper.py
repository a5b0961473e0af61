"""Run as a program: compile what a full-size pplx-embed layer launches, for sm_90, without a GPU.

Prints one JSON object: kernel -> [16-byte global accesses, accesses narrower than 4 bytes, waits for the
kernel before] of each variant; without, then with programmatic dependent launch. Not in the test process,
because Triton is either an interpreter or a compiler there.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from rose.config import load_config
from rose.kernels import dispatch, gemm
from rose.kernels.jit import activation, embedding, norm, pooling, rope
from rose.kernels.jit import compile as compiler
from rose.kernels.jit import gemm as gemm_jit
from rose.layers import projection
from rose.layers.compile_ahead import compile_ahead
from rose.layers.decoder import weight_keys
from rose.models.qwen3 import Qwen3Model
from rose.weights import DummyWeights

MODULES = (activation, embedding, gemm_jit, norm, pooling, rope)


class HopperDriver:
    """As much of Triton's driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(preset: Path) -> None:
    driver.set_active(HopperDriver())
    dispatch.uses_triton = lambda x: True
    projection.uses_table = lambda weight: True
    config = replace(load_config(preset), num_layers=2, vocab_size=64, max_positions=64)
    keys = weight_keys(config)
    fused = gemm.GemmChoice(8, gemm.GemmPlan(1, 16, 64, 64, 4, 4, swiglu=True))
    table = {**gemm.table(), keys[2]: [fused, *gemm.table()[keys[2]]]}
    gemm.table = lambda: table
    model = Qwen3Model(config, DummyWeights(), torch.bfloat16, torch.device("cpu"), 4096)
    model._workspace._partial_elements = max(map(gemm.partial_elements, keys))
    for programmatic in (False, True):
        compiler.programmatic.set(programmatic)
        compile_ahead(model, gemm.row_counts(keys))
    print(json.dumps({name: variants(kernel) for name, kernel in kernels()}))


def kernels() -> list[tuple[str, JITFunction]]:
    def own(module: ModuleType) -> list[tuple[str, JITFunction]]:
        return [(name, value) for name, value in vars(module).items() if isinstance(value, JITFunction)]

    return [found for module in MODULES for found in own(module)]


def variants(kernel: JITFunction) -> list[tuple[int, int, int]]:
    compiled = kernel.device_caches[0][0].values()
    return [accesses(variant.asm["ptx"]) for variant in compiled]


def accesses(ptx: str) -> tuple[int, int, int]:
    found = re.findall(r"(?:ld|st)\.global\S*|cp\.async\.cg\S*", ptx)  # .cg copies 16 bytes
    wide = [name for name in found if ".v4.b32" in name or name.startswith("cp")]
    narrow = [name for name in found if re.search(r"\.(b|u|s)(8|16)\b", name)]
    return len(wide), len(narrow), ptx.count("griddepcontrol.wait")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

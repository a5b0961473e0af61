"""Without Triton everything runs on the plain versions."""

from __future__ import annotations

import torch

from rose.kernels import dispatch
from tests.programs import output_of

PROGRAM = """
import pkgutil, sys
sys.modules["triton"] = None  # any import of it fails
import torch
import rose.kernels
for module in pkgutil.iter_modules(rose.kernels.__path__, "rose.kernels."):
    if module.name not in ("rose.kernels.jit", "rose.kernels.tune_gemm"):
        __import__(module.name)
from rose.kernels.norm import RmsNorm, rms_norm
from rose.models.qwen3 import Qwen3Model
out = torch.empty(1, 2)
rms_norm(torch.tensor([[3.0, 4.0]]), RmsNorm(torch.ones(2), 0.0), out)
assert torch.allclose(out, torch.tensor([[3.0, 4.0]]) / 12.5**0.5)
"""


def test_plain_versions_need_no_triton() -> None:
    output_of("-c", PROGRAM)


def test_cpu_tensors_take_the_plain_version():
    assert not dispatch.uses_triton(torch.zeros(1))

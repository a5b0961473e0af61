"""Compiles one product with a fused epilogue; run in a process of its own, without a GPU.

Kernels and epilogues are QuACK's, composed here; each is traced on fake tensors and exported as an object by
the package's own cache. Row counts, sizes and row strides stay dynamic: the shapes below are arbitrary, but
for the width of a head, which is compiled in.
Source: quack-kernels 0.6.5, epilogue/library.py (swiglu_mod, rms_partial_epi, qk_rope_epi), gemm_sm90.py.
"""

# mypy: disallow-untyped-defs=False
# The epilogues are traced: their parameters are fragments of registers, named as the kernel's arguments.

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from rose.aot.cute import link_cute, the_object
from rose.aot.products import HEAD_DIM, HEAD_EPS, ROW_EPS, TILE_K, Epilogue, ProductKernel

_ROWS, _WIDTH = 4096, 1024


def plain_epilogue() -> Any:
    """Nothing: the product."""
    from quack.epilogue.frontend import gemm_epilogue

    @gemm_epilogue()
    def fused_plain(acc):
        return {"D": acc}

    return fused_plain


def bias_epilogue() -> Any:
    """A number a column added."""
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.ops import RowVecLoad

    @gemm_epilogue(ops={"bias": RowVecLoad("bias")})
    def fused_bias(acc, bias):
        return {"D": acc + bias}

    return fused_bias


def swiglu_epilogue() -> Any:
    """silu of the even columns times the odd ones."""
    from quack.activation import swiglu
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.math import unpack

    @gemm_epilogue(outputs=("out",), mode="acc_pair")
    def fused_swiglu(acc):
        gate, up = unpack(acc)
        return {"out": swiglu(gate, up)}

    return fused_swiglu


def scale_operand(kernel: Epilogue) -> Any:
    """A factor a row: an operand, or made of sums of squares."""
    if kernel.startswith("rms-"):
        from rose.aot.row_rms import RowRms

        return RowRms("scale", ROW_EPS)  # type: ignore[no-untyped-call]
    from quack.epilogue.ops import ColVecLoad

    return ColVecLoad("scale")


def scaled_swiglu_epilogue(kernel: Epilogue = "scaled-swiglu") -> Any:
    """The same of rows times their scale."""
    from quack.activation import swiglu
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.math import unpack

    scale = {"scale": scale_operand(kernel)}

    @gemm_epilogue(outputs=("out",), ops=scale, mode="acc_pair")
    def fused_scaled_swiglu(acc, scale):
        gate, up = unpack(acc * scale)
        return {"out": swiglu(gate, up)}

    return fused_scaled_swiglu


def gelu_epilogue() -> Any:
    """Of the product and a bias; see `rose.aot.gelu`."""
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.ops import RowVecLoad

    from rose.aot.gelu import gelu

    @gemm_epilogue(ops={"bias": RowVecLoad("bias")})
    def fused_gelu(acc, bias):
        return {"D": gelu(acc + bias)}  # type: ignore[no-untyped-call]

    return fused_gelu


def residual_epilogue() -> Any:
    """The residual stream, what the next product takes of it, and sums of its squares."""
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.ops import ColVecReduce, RowVecLoad

    @gemm_epilogue(
        outputs=("stream",),
        ops={"weight": RowVecLoad("weight")},
        reduces={"sums": ColVecReduce("sums", scaled=True)},
    )
    def fused_residual(acc, c, weight):
        total = acc + c
        return {"D": total * weight, "stream": total, "sums": (total, total)}

    return fused_residual


def rope_epilogue(kernel: Epilogue = "rope") -> Any:
    """Columns of value heads have weight 0 and keep 1: they are scaled, neither normed nor rotated."""
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.head_rmsnorm import HeadRstd
    from quack.epilogue.math import pack, unpack
    from quack.epilogue.ops import RowVecLoad
    from quack.epilogue.rotary import rotary_cos_sin_load

    def squares(acc, scale):
        scaled = acc * scale
        return {"norm": scaled * scaled}

    operands = {  # in the order of the kernel's arguments
        "angles": rotary_cos_sin_load("angles"),
        "norm": HeadRstd("norm", eps=HEAD_EPS),
        "weight": RowVecLoad("weight"),
        "keep": RowVecLoad("keep"),
        "scale": scale_operand(kernel),
    }

    @gemm_epilogue(ops=operands, prepass=squares, prepass_outs=("norm",), mode="acc_pair")
    def fused_rope(acc, angles, norm, weight, keep, scale):
        first, second = unpack(acc * scale * (norm * weight + keep))
        cos, sin = unpack(angles)
        kept, _ = unpack(keep)
        cos, sin = cos * (1.0 - kept) + kept, sin * (1.0 - kept)
        return {"D": pack(first * cos - second * sin, first * sin + second * cos)}

    return fused_rope


def unscaled_rope_epilogue() -> Any:
    """The same of the product itself: columns of value heads stay as they are."""
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.head_rmsnorm import HeadRstd
    from quack.epilogue.math import pack, unpack
    from quack.epilogue.ops import RowVecLoad
    from quack.epilogue.rotary import rotary_cos_sin_load

    def squares(acc):
        return {"norm": acc * acc}

    operands = {  # in the order of the kernel's arguments
        "angles": rotary_cos_sin_load("angles"),
        "norm": HeadRstd("norm", eps=HEAD_EPS),
        "weight": RowVecLoad("weight"),
        "keep": RowVecLoad("keep"),
    }

    @gemm_epilogue(ops=operands, prepass=squares, prepass_outs=("norm",), mode="acc_pair")
    def fused_unscaled_rope(acc, angles, norm, weight, keep):
        first, second = unpack(acc * (norm * weight + keep))
        cos, sin = unpack(angles)
        kept, _ = unpack(keep)
        cos, sin = cos * (1.0 - kept) + kept, sin * (1.0 - kept)
        return {"D": pack(first * cos - second * sin, first * sin + second * cos)}

    return fused_unscaled_rope


def fp8_epilogue() -> Any:
    """The product of e4m3 numbers times the scales of its row and column."""
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.ops import ColVecLoad, RowVecLoad

    scales = {"scale": ColVecLoad("scale"), "columns": RowVecLoad("columns")}

    @gemm_epilogue(ops=scales)
    def fused_fp8(acc, scale, columns):
        return {"D": acc * scale * columns}

    return fused_fp8


def fp8_swiglu_epilogue() -> Any:
    """silu of its even columns times the odd ones."""
    from quack.activation import swiglu
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.math import unpack
    from quack.epilogue.ops import ColVecLoad, RowVecLoad

    scales = {"scale": ColVecLoad("scale"), "columns": RowVecLoad("columns")}

    @gemm_epilogue(outputs=("out",), ops=scales, mode="acc_pair")
    def fused_fp8_swiglu(acc, scale, columns):
        gate, up = unpack(acc * scale * columns)
        return {"out": swiglu(gate, up)}

    return fused_fp8_swiglu


def fp8_swiglu_fp8_epilogue() -> Any:
    """The same over the square of the row's scale, in e4m3."""
    from quack.activation import sigmoid
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.math import unpack
    from quack.epilogue.ops import ColVecLoad, RowVecLoad

    from rose.aot.narrow_store import NarrowStore

    scales = {"scale": ColVecLoad("scale"), "columns": RowVecLoad("columns")}
    out = NarrowStore("out")  # type: ignore[no-untyped-call]

    @gemm_epilogue(outputs=(out,), ops=scales, mode="acc_pair")
    def fused_fp8_swiglu_fp8(acc, scale, columns):
        unscaled = acc * columns
        gate, up = unpack(unscaled)
        scaled, _ = unpack(unscaled * scale)
        return {"out": gate * sigmoid(scaled) * up}

    return fused_fp8_swiglu_fp8


# QuACK's epilogue objects; it is imported by what makes them.
EPILOGUE_MAKERS: Mapping[Epilogue, Callable[[], Any]] = {
    "plain": plain_epilogue,
    "bias": bias_epilogue,
    "swiglu": swiglu_epilogue,
    "scaled-swiglu": scaled_swiglu_epilogue,
    "gelu": gelu_epilogue,
    "residual": residual_epilogue,
    "rope": rope_epilogue,
    "unscaled-rope": unscaled_rope_epilogue,
    "rms-swiglu": partial(scaled_swiglu_epilogue, kernel="rms-swiglu"),
    "rms-rope": partial(rope_epilogue, kernel="rms-rope"),
    "fp8": fp8_epilogue,
    "fp8-swiglu": fp8_swiglu_epilogue,
    "fp8-swiglu-fp8": fp8_swiglu_fp8_epilogue,
}


@contextmanager
def next_kernel_early() -> Iterator[None]:
    """Products traced inside let the next kernel come up once all their blocks run (QuACK: as they end).

    It waits for them before it touches memory, as they did for the one before.
    """
    import cutlass.cute as cute
    from quack import gemm_sm90

    barrier = gemm_sm90.pipeline_init_wait

    def barrier_and_launch(*arguments: Any, **options: Any) -> None:
        barrier(*arguments, **options)
        cute.arch.griddepcontrol_launch_dependents()

    with patch.object(gemm_sm90, "pipeline_init_wait", barrier_and_launch):
        yield


def compile_object(kernel: ProductKernel, cache: Path) -> Path:
    """Trace and compile for bf16 or e4m3; the object file in `cache` that holds it.

    The environment names the architecture and the cache folder, read when quack is imported.
    """
    from quack.gemm_runtime import host
    from torch._subclasses.fake_tensor import FakeTensorMode

    host.get_max_active_clusters = lambda size: 1  # asks the GPU; only a launch, which is not here, uses it
    epilogue = EPILOGUE_MAKERS[kernel.epilogue]()
    with FakeTensorMode(), next_kernel_early() if kernel.early else nullcontext():
        traced = operands_of(kernel)
        factors = torch.float8_e4m3fn if kernel.is_fp8 else torch.bfloat16
        epilogue.gemm(
            empty(_ROWS, _WIDTH, dtype=factors), empty(2 * _WIDTH, _WIDTH, dtype=factors),
            traced.out, traced.residual,
            epi_args=traced.operands, tile_M=kernel.tile_m, tile_N=kernel.tile_n,
            pingpong=kernel.pingpong, cluster_M=kernel.cluster_m, cluster_N=kernel.cluster_n,
            tile_K=None if kernel.tile_k == TILE_K else kernel.tile_k, _launch=False, **traced.options,
        )  # fmt: skip
    return the_object(cache)


@dataclass(frozen=True, slots=True)
class TracedOperands:
    """What a product is traced with beside x [M, K] and the weight [N, K].

    out, residual: [M, N] or None. operands: of the epilogue, by the names of its arguments. options: QuACK's.
    """

    out: torch.Tensor | None
    residual: torch.Tensor | None
    operands: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)


def operands_of(kernel: ProductKernel) -> TracedOperands:
    """Fake tensors of the right types; called in a FakeTensorMode."""
    out, column, scale = empty(_ROWS, 2 * _WIDTH), empty(2 * _WIDTH), empty(_ROWS, dtype=torch.float32)
    if kernel.epilogue.startswith("rms-"):
        scale = empty(_ROWS, 8, dtype=torch.float32)
    if kernel.is_fp8:
        scales = {"scale": scale, "columns": empty(2 * _WIDTH, dtype=torch.float32)}
        # Sums stay in the tensor cores' own accumulators, of some 14 bits, as in torch's use_fast_accum.
        options: dict[str, Any] = {"post_init_attrs": (("fp8_slow_accum", False),)}
        if kernel.epilogue == "fp8":
            return TracedOperands(out, None, scales, options)
        halves = {"concat_layout": ("B",)}
        kind = torch.float8_e4m3fn if kernel.epilogue == "fp8-swiglu-fp8" else torch.bfloat16
        outputs = {"out": empty(_ROWS, _WIDTH, dtype=kind)}
        return TracedOperands(None, None, outputs | scales, options | halves)
    if kernel.epilogue.endswith("swiglu"):
        operands = {"out": empty(_ROWS, _WIDTH)} | ({} if kernel.epilogue == "swiglu" else {"scale": scale})
        return TracedOperands(None, None, operands, {"concat_layout": ("B",)})
    if kernel.epilogue == "plain":
        return TracedOperands(out, None, {})
    if kernel.epilogue in ("bias", "gelu"):
        return TracedOperands(out, None, {"bias": column})
    if kernel.epilogue == "residual":
        sums = empty(_ROWS, -(-2 * _WIDTH // kernel.tile_n), dtype=torch.float32)
        stream, residual = empty(_ROWS, 2 * _WIDTH), empty(_ROWS, 2 * _WIDTH)
        return TracedOperands(out, residual, {"weight": column, "stream": stream, "sums": sums})
    angles = empty(_ROWS, HEAD_DIM, dtype=torch.float16)
    columns = {"weight": column, "keep": empty(2 * _WIDTH)}
    scales = {} if kernel.epilogue == "unscaled-rope" else {"scale": scale}
    return TracedOperands(out, None, {"angles": angles, "norm": HEAD_DIM, **columns, **scales})


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A fake tensor on a GPU that need not be there."""
    return torch.empty(*shape, dtype=dtype, device="cuda")


def main() -> None:
    """Arguments: the kernel's name, cache folder, output."""
    kernel, cache, out = ProductKernel.parse(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    link_cute(compile_object(kernel, cache), cache, out)


if __name__ == "__main__":
    main()

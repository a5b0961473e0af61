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
from pathlib import Path
from typing import Any

from rose.aot.cute import link_cute, the_object
from rose.aot.products import HEAD_DIM, HEAD_EPS, Epilogue, ProductKernel

_ROWS, _WIDTH = 4096, 1024


def epilogue_of(name: Epilogue) -> Any:
    """QuACK's epilogue object."""
    from quack.activation import gelu_erf, swiglu
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.head_rmsnorm import HeadRstd
    from quack.epilogue.math import pack, unpack
    from quack.epilogue.ops import ColVecLoad, ColVecReduce, RowVecLoad
    from quack.epilogue.rotary import rotary_cos_sin_load

    scale = ColVecLoad("scale")

    @gemm_epilogue(outputs=("out",), mode="acc_pair")
    def fused_swiglu(acc):
        gate, up = unpack(acc)
        return {"out": swiglu(gate, up)}

    @gemm_epilogue(outputs=("out",), ops={"scale": scale}, mode="acc_pair")
    def fused_scaled_swiglu(acc, scale):
        gate, up = unpack(acc * scale)
        return {"out": swiglu(gate, up)}

    @gemm_epilogue(ops={"bias": RowVecLoad("bias")})
    def fused_gelu(acc, bias):
        return {"D": gelu_erf(acc + bias)}

    @gemm_epilogue(
        outputs=("stream",),
        ops={"weight": RowVecLoad("weight")},
        reduces={"sums": ColVecReduce("sums", scaled=True)},
    )
    def fused_residual(acc, c, weight):
        total = acc + c
        return {"D": total * weight, "stream": total, "sums": (total, total)}

    def squares(acc, scale):
        scaled = acc * scale
        return {"norm": scaled * scaled}

    # Columns of value heads have weight 0 and keep 1: they are scaled, neither normed nor rotated.
    @gemm_epilogue(
        ops={
            "angles": rotary_cos_sin_load("angles"),
            "norm": HeadRstd("norm", eps=HEAD_EPS),
            "weight": RowVecLoad("weight"),
            "keep": RowVecLoad("keep"),
            "scale": scale,
        },
        prepass=squares,
        prepass_outs=("norm",),
        mode="acc_pair",
    )
    def fused_rope(acc, angles, norm, weight, keep, scale):
        first, second = unpack(acc * scale * (norm * weight + keep))
        cos, sin = unpack(angles)
        kept, _ = unpack(keep)
        cos, sin = cos * (1.0 - kept) + kept, sin * (1.0 - kept)
        return {"D": pack(first * cos - second * sin, first * sin + second * cos)}

    made = (fused_swiglu, fused_scaled_swiglu, fused_gelu, fused_residual, fused_rope)
    return {epilogue.fn.__name__: epilogue for epilogue in made}[f"fused_{name.replace('-', '_')}"]


def compile_object(kernel: ProductKernel, cache: Path) -> Path:
    """Trace and compile for bf16; the object file in `cache` that holds it.

    The environment names the architecture and the cache folder, read when quack is imported.
    """
    import torch
    from quack.gemm_runtime import host
    from torch._subclasses.fake_tensor import FakeTensorMode

    host.get_max_active_clusters = lambda size: 1  # asks the GPU; only a launch, which is not here, uses it
    epilogue = epilogue_of(kernel.epilogue)
    with FakeTensorMode():

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="cuda")

        x, weight = empty(_ROWS, _WIDTH), empty(2 * _WIDTH, _WIDTH)
        out: torch.Tensor | None = empty(_ROWS, 2 * _WIDTH)
        scale = {"scale": empty(_ROWS, dtype=torch.float32)}
        options: dict[str, Any] = {}
        residual = None
        operands: dict[str, Any]
        if kernel.epilogue in ("swiglu", "scaled-swiglu"):
            operands = {"out": empty(_ROWS, _WIDTH)} | (scale if kernel.epilogue == "scaled-swiglu" else {})
            out = None
            options["concat_layout"] = ("B",)
        elif kernel.epilogue == "gelu":
            operands = {"bias": empty(2 * _WIDTH)}
        elif kernel.epilogue == "residual":
            residual = empty(_ROWS, 2 * _WIDTH)
            sums = empty(_ROWS, -(-2 * _WIDTH // kernel.tile_n), dtype=torch.float32)
            operands = {"weight": empty(2 * _WIDTH), "stream": empty(_ROWS, 2 * _WIDTH), "sums": sums}
        else:
            angles = empty(_ROWS, HEAD_DIM, dtype=torch.float16)
            columns = {"weight": empty(2 * _WIDTH), "keep": empty(2 * _WIDTH)}
            operands = {"angles": angles, "norm": HEAD_DIM, **columns, **scale}
        epilogue.gemm(
            x, weight, out, residual, epi_args=operands,
            tile_M=kernel.tile_m, tile_N=kernel.tile_n, pingpong=kernel.pingpong,
            cluster_M=kernel.cluster_m, cluster_N=kernel.cluster_n, _launch=False, **options,
        )  # fmt: skip
    return the_object(cache)


def main() -> None:
    """Arguments: the kernel's name, cache folder, output."""
    kernel, cache, out = ProductKernel.parse(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    link_cute(compile_object(kernel, cache), cache, out)


if __name__ == "__main__":
    main()

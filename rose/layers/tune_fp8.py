"""Time FP8 products by kernels built ahead against cuBLAS's, and write what `rose.kernels.fused` reads.

    python -m rose.layers.tune_fp8 [--out FILE.json] [--budget-s SECONDS]

As rose.layers.tune_fused: over the weights of 28 layers in one CUDA graph. The table in use is written anew
with these choices in it. SwiGLU is timed with what makes FP8 of its result, if the product itself does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from rose.aot.products import HEAD_DIM, Epilogue, ProductKernel
from rose.kernels.fp8 import Fp8Rows, quantized
from rose.kernels.fused import TABLE_PATH, FusedGemm, load
from rose.kernels.tables import say, tuner_parser
from rose.layers.fp8_linear import Fp8Gated, Fp8Linear
from rose.layers.layer_case import built
from rose.layers.tune_fused import DECODERS, MIN_GAIN, NUM_LAYERS, Line, forced, layer_us, write

ROWS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 51200)
# One of these, or none, in the place of cuBLAS's product.
Choice = Mapping[Epilogue, FusedGemm]
CUDA = torch.device("cuda")


def candidates(epilogue: Epilogue) -> list[Choice]:
    """The kernels with that epilogue that are built."""
    gemms = (load(ProductKernel.parse(name)) for name in built(epilogue) if name is not None)
    return [{epilogue: gemm} for gemm in gemms if gemm is not None]


def tune(shape: tuple[int, int], gated: bool, deadline: float) -> Iterator[Line]:
    """Products with a weight [n, k], by rows; gated: gate over up."""
    n, k = shape
    weights = [random(n, k) for _ in range(NUM_LAYERS)]
    for m in ROWS:
        if time.monotonic() > deadline:
            say(f"out of time at {m} rows")
            return
        x, wide = random(m, k), torch.zeros(m, n, dtype=torch.bfloat16, device=CUDA)
        narrow = torch.zeros(m, n // 2, dtype=torch.bfloat16, device=CUDA)
        out = Fp8Rows.empty(m, n // 2, CUDA)

        def plain(choice: Choice) -> Callable[[], object]:
            layers = [Fp8Linear(weight, lookup=forced(choice)) for weight in weights]
            return lambda: [layer(x, wide) for layer in layers]  # noqa: B023

        def with_swiglu(choice: Choice) -> Callable[[], object]:
            lookup = forced(choice)
            layers = [Fp8Gated(Fp8Linear(weight, lookup=lookup), lookup) for weight in weights]
            return lambda: [layer(x, wide, narrow, out) for layer in layers]  # noqa: B023

        def stored(choice: Choice) -> Callable[[], object]:
            fused = choice.get("fp8-swiglu-fp8")
            if fused is None:
                return with_swiglu(choice)
            layers = [Fp8Gated(Fp8Linear(weight)) for weight in weights]
            return lambda: [layer.direct(x, fused, out) for layer in layers]  # noqa: B023

        best, us, plain_us = fastest(candidates("fp8"), plain, m, {})
        yield line("fp8", shape, m, best, (us, plain_us))
        if gated:
            best, us, plain_us = fastest(candidates("fp8-swiglu"), with_swiglu, m, best)
            yield line("fp8-swiglu", shape, m, best, (us, plain_us))
            best, us, plain_us = fastest(candidates("fp8-swiglu-fp8"), stored, m, best)
            yield line("fp8-swiglu-fp8", shape, m, best, (us, plain_us))


def fastest(
    choices: Sequence[Choice], enqueue: Callable[[Choice], Callable[[], object]], m: int, now: Choice
) -> tuple[Choice, float, float]:
    """The best of `choices` if it beats `now`, its time and that of `now`, in µs a layer."""
    now_us = layer_us(enqueue(now), m)
    best, best_us = now, now_us * (1 - MIN_GAIN)
    for choice in choices:
        us = layer_us(enqueue(choice), m)
        if us < best_us:
            best, best_us = choice, us
    return best, now_us if best is now else best_us, now_us


def line(
    epilogue: Epilogue, shape: tuple[int, int], m: int, best: Choice, times: tuple[float, float]
) -> Line:
    """What was found of so many rows."""
    name = best[epilogue].kernel.name if epilogue in best else None
    us, plain_us = (round(value, 2) for value in times)
    say(f"{epilogue:14} {list(shape)} M={m:5} {plain_us:8.2f} us, best {us:8.2f} us: {name or 'cuBLAS'}")
    n, k = shape
    return {"epilogue": epilogue, "n": n, "k": k, "min_m": m, "kernel": name, "us": us, "plain_us": plain_us}


def random(rows: int, width: int) -> Fp8Rows:
    """FP8 rows of normal numbers."""
    return quantized(torch.randn(rows, width, device=CUDA), Fp8Rows.empty(rows, width, CUDA))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write."""
    arguments = tuner_parser("rose.layers.tune_fp8", __doc__, TABLE_PATH, budget_s=60.0).parse_args(argv)
    deadline = time.monotonic() + arguments.budget_s
    lines: list[Line] = []
    with torch.inference_mode():
        for shape in DECODERS:
            query, key = shape.num_heads * HEAD_DIM, shape.num_kv_heads * HEAD_DIM
            lines += tune((2 * shape.inner, shape.hidden), True, deadline)
            for weight in (
                (query + 2 * key, shape.hidden),
                (shape.hidden, query),
                (shape.hidden, shape.inner),
            ):
                lines += tune(weight, False, deadline)
            write(arguments.out, lines, ROWS)
    say(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()

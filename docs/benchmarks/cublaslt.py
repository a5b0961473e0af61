"""Whether cublasLt has a faster algorithm for a model's bf16 products than torch takes, at the power limit.

    python docs/benchmarks/cublaslt.py [--rows 2560 12800] [--shapes pplx-embed.qkv bge-m3.up]
        [--seconds 540] [--most 300] [--out FILE.json]

Of each weight [N, K] and number of rows M: what cublasLt's heuristics list for y [M, N] = x [M, K] Wᵀ, with
and without a workspace, and variants of their tiles, clusters and orders of tiles. Each is checked and timed
alone, in a graph of eight products with a weight each, as one weight would stay in the L2 cache. The fastest
and torch's choice are then held in random order (holding.py). Times are microseconds a product. "h3" is the
heuristics' fourth, "z3" the same without a workspace, "vh3" a variant.
"""

from __future__ import annotations

import argparse
import ctypes as c
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from holding import contest

SHAPES = {  # N, K
    "pplx-embed.qkv": (4096, 1024), "pplx-embed.output": (1024, 2048),
    "pplx-embed.gate_up": (6144, 1024), "pplx-embed.down": (1024, 3072),
    "bge-m3.qkv": (3072, 1024), "bge-m3.output": (1024, 1024),
    "bge-m3.up": (4096, 1024), "bge-m3.down": (1024, 4096),
}  # fmt: skip
ROWS, CALLS = (2560, 12800, 25600), 8
MAX_ERROR, WORKSPACE_BYTES = 0.03, 64 << 20
VARIANTS_S = 2.0  # for asking cublasLt about variants
STICKY = 3  # the exit status after an error that CUDA does not recover from

# Source of all values: cublasLt.h, cublas_api.h and library_types.h of CUDA 13.0 (cuBLAS 13.1.0.3).
BF16, FP32, COMPUTE_FP32, TRANSPOSED = 14, 0, 68, 1
DESC_TRANSA, PREF_MAX_WORKSPACE_BYTES, CAP_TILE_IDS = 3, 1, 6
CONFIG: dict[str, tuple[int, Any]] = {
    "id": (0, c.c_int32), "tile": (1, c.c_uint32), "splits": (2, c.c_int32), "reduction": (3, c.c_uint32),
    "swizzle": (4, c.c_uint32), "custom": (5, c.c_uint32), "stages": (6, c.c_uint32),
    "inner": (7, c.c_uint16), "cluster": (8, c.c_uint16),
}  # fmt: skip
NAMES = {
    "tile": {20: "128x128", 23: "128x256", 24: "256x128", 29: "128x160", 31: "192x128", 32: "128x192"},
    "cluster": {0: "auto", 2: "1x1x1", 3: "2x1x1", 4: "4x1x1", 5: "1x2x1", 6: "2x2x1", 8: "1x4x1"},
    "stages": {33: "16xauto", 34: "32xauto", 35: "64xauto", 36: "128xauto"},
}
TRIED_TILES, TRIED_CLUSTERS, TRIED_SWIZZLES = (20, 23, 24, 31, 32), (2, 3, 5, 6, 4, 8), (0, 1)

Config = dict[str, int]
Call = Callable[[Tensor], object]
Algo = c.c_uint64 * 8  # cublasLtMatmulAlgo_t


class Heuristic(c.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (("algo", Algo), ("workspace", c.c_size_t), ("state", c.c_int), ("waves", c.c_float),
                ("reserved", c.c_int * 4))  # fmt: skip


TYPES = {"p": c.c_void_p, "i": c.c_int, "u": c.c_uint64, "z": c.c_size_t}
SIGNATURES = {
    "Create": "p", "MatmulDescCreate": "pii", "MatmulDescSetAttribute": "pipz",
    "MatrixLayoutCreate": "piuuu", "MatmulPreferenceCreate": "p", "MatmulPreferenceSetAttribute": "pipz",
    "MatmulAlgoGetHeuristic": "pppppppipp", "MatmulAlgoCheck": "pppppppp",
    "MatmulAlgoCapGetAttribute": "pipzp", "MatmulAlgoConfigSetAttribute": "pipz",
    "MatmulAlgoConfigGetAttribute": "pipzp", "Matmul": "ppppppppppppppzp",
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """An algorithm of cublasLt and the bytes of workspace that it takes."""

    name: str
    config: Config
    algo: c.Array[c.c_uint64]
    workspace: int


class CublasLt:
    """The library that torch has loaded: torch must have computed a product."""

    def __init__(self) -> None:
        lines = Path("/proc/self/maps").read_text().splitlines()
        self._library = c.CDLL(next(line.split(maxsplit=5)[5] for line in lines if "libcublasLt.so" in line))
        for name, letters in SIGNATURES.items():
            getattr(self._library, f"cublasLt{name}").argtypes = [TYPES[letter] for letter in letters]
        self.handle = self.made("Create")

    def fails(self, name: str, *arguments: object) -> int:
        """The status that the function returns: 0 for success."""
        return int(getattr(self._library, f"cublasLt{name}")(*arguments))

    def made(self, name: str, *arguments: object) -> c.c_void_p:
        """What a constructor makes. It is never freed: there are few, and they are small."""
        made = c.c_void_p()
        if status := self.fails(name, c.byref(made), *arguments):
            raise RuntimeError(f"{name}: status {status}")
        return made


class Product:
    """y bf16[M, N] = x bf16[M, K] Wᵀ of CALLS random weights bf16[N, K], and some rows of it by fp32.

    To cublasLt, column by column, it is D [N, M] = (W [K, N])ᵀ x [K, M].
    """

    def __init__(self, lt: CublasLt, m: int, n: int, k: int) -> None:
        self.x = torch.randn(m, k, device="cuda").bfloat16()
        self.weights = list(torch.randn(CALLS, n, k, device="cuda").mul(0.02).bfloat16())
        self.y = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        self._sample = torch.randperm(m, device="cuda")[:512]
        self._expected = self.x[self._sample].float() @ self.weights[0].float().t()
        self._lt, self._scratch = lt, torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._factors = c.c_float(1), c.c_float(0)
        desc = lt.made("MatmulDescCreate", COMPUTE_FP32, FP32)
        lt.fails("MatmulDescSetAttribute", desc, DESC_TRANSA, c.byref(c.c_int32(TRANSPOSED)), 4)
        sizes = (k, n), (k, m), (n, m)
        self._layouts = [lt.made("MatrixLayoutCreate", BF16, rows, columns, rows) for rows, columns in sizes]
        self._problem = (lt.handle, desc, *self._layouts, self._layouts[2])

    def listed(self, most_bytes: int) -> Iterator[tuple[c.Array[c.c_uint64], int]]:
        """The heuristics' algorithms, and the bytes of workspace of each; by them the fastest first."""
        results, found, most = (Heuristic * 64)(), c.c_int(0), c.c_uint64(most_bytes)
        preference = self._lt.made("MatmulPreferenceCreate")
        where = (PREF_MAX_WORKSPACE_BYTES, c.byref(most), 8)
        self._lt.fails("MatmulPreferenceSetAttribute", preference, *where)
        into = (len(results), results, c.byref(found))
        self._lt.fails("MatmulAlgoGetHeuristic", *self._problem, preference, *into)
        for result in results[: found.value]:
            if result.state == 0:
                yield Algo.from_buffer_copy(result.algo), int(result.workspace)

    def tiles(self, way: Way) -> set[int]:
        """Those that its algorithm can have."""
        query, size = ("MatmulAlgoCapGetAttribute", c.byref(way.algo), CAP_TILE_IDS), c.c_size_t(0)
        self._lt.fails(*query, None, 0, c.byref(size))
        values = (c.c_uint32 * (size.value // 4))()
        failed = self._lt.fails(*query, values, c.sizeof(values), c.byref(size))
        return set() if failed else set(values)

    def way(self, source: str, algo: c.Array[c.c_uint64], workspace: int) -> Way:
        """By this algorithm; -1 for what it does not tell."""
        config = {}
        for name, (attribute, kind) in CONFIG.items():
            value, size = kind(0), c.c_size_t(0)
            where = (attribute, c.byref(value), c.sizeof(kind), c.byref(size))
            untold = self._lt.fails("MatmulAlgoConfigGetAttribute", c.byref(algo), *where)
            config[name] = -1 if untold else int(value.value)
        parts = (f"{name} {NAMES.get(name, {}).get(value, value)}" for name, value in config.items())
        return Way(f"{source}: {', '.join(parts)}", config, algo, workspace)

    def variant(self, base: Way, changes: Config) -> Way | None:
        """As base but for this; None: cublasLt does not take it."""
        algo, result = Algo.from_buffer_copy(base.algo), Heuristic()
        for name, value in changes.items():
            attribute, kind = CONFIG[name]
            where = (attribute, c.byref(kind(value)), c.sizeof(kind))
            if self._lt.fails("MatmulAlgoConfigSetAttribute", c.byref(algo), *where):
                return None
        failed = self._lt.fails("MatmulAlgoCheck", *self._problem, c.byref(algo), c.byref(result))
        if failed or result.state or result.workspace > WORKSPACE_BYTES:
            return None
        return self.way("v" + base.name.partition(":")[0], algo, int(result.workspace))

    def enqueue(self, way: Way, weight: Tensor) -> None:
        """One product, on the current stream."""
        scratch = self._scratch.data_ptr() if way.workspace else None
        w, x, y = zip((t.data_ptr() for t in (weight, self.x, self.y)), self._layouts, strict=True)
        one, zero = map(c.byref, self._factors)
        how = (c.byref(way.algo), scratch, way.workspace, torch.cuda.current_stream().cuda_stream)
        if status := self._lt.fails("Matmul", *self._problem[:2], one, *w, *x, zero, *y, *y, *how):
            raise RuntimeError(f"status {status}")

    def enqueue_all(self, call: Call) -> None:
        """The product with each weight."""
        for weight in self.weights:
            call(weight)

    def error(self, call: Call) -> float:
        """The greatest of a sample, relative to the value and the mean size of all. Raises if it is wrong."""
        self.y.fill_(math.nan)
        call(self.weights[0])
        scale = self._expected.abs() + self._expected.square().mean().sqrt()
        error: float = ((self.y[self._sample].float() - self._expected).abs() / scale).max().item()
        if not error < MAX_ERROR or self.y.sum(dtype=torch.float32).isnan().item():
            raise RuntimeError(f"wrong result, error {error:.3g}")
        return error


def algorithms(product: Product, most: int) -> list[Way]:
    """All that the heuristics list, then variants, up to `most`: those with the fewest changes first."""
    found: dict[tuple[int, ...], Way] = {}
    for letter, most_bytes in ("h", WORKSPACE_BYTES), ("z", 0):
        for index, (algo, workspace) in enumerate(product.listed(most_bytes)):
            way = product.way(f"{letter}{index}", algo, workspace)
            found.setdefault(tuple(way.config.values()), way)
    variants = [(base, changes) for base in found.values() for changes in changes_of(product, base)]
    deadline = time.monotonic() + VARIANTS_S
    for base, changes in sorted(variants, key=lambda variant: len(variant[1])):
        if len(found) >= most or time.monotonic() > deadline:
            break
        changed = product.variant(base, changes)
        if changed is not None:
            found.setdefault(tuple(changed.config.values()), changed)
    return list(found.values())


def changes_of(product: Product, base: Way) -> Iterator[Config]:
    """What is tried of an algorithm of the heuristics."""
    tiles = product.tiles(base).intersection(TRIED_TILES)
    tried = {"tile": tiles, "cluster": TRIED_CLUSTERS, "swizzle": TRIED_SWIZZLES}
    options = [{base.config[name], *values} for name, values in tried.items()]
    for values in itertools.product(*options):
        changes = dict(zip(tried, values, strict=True))
        if changed := {name: value for name, value in changes.items() if value != base.config[name]}:
            yield changed


def measure(lt: CublasLt, shape: str, m: int, most: int) -> dict[str, object]:
    """Of a weight and a number of rows: what was held, the fastest first, and what failed."""
    n, k = SHAPES[shape]
    product = Product(lt, m, n, k)
    ways = algorithms(product, most)
    calls: dict[str, Call] = {"torch": lambda weight: torch.mm(product.x, weight.t(), out=product.y)}
    calls |= {way.name: partial(product.enqueue, way) for way in ways}
    errors: dict[str, float] = {}

    def check(name: str) -> None:
        errors[name] = product.error(calls[name])

    graphs = {name: partial(product.enqueue_all, call) for name, call in calls.items()}
    times = contest(graphs, kept=["torch"], check=check)
    listed = sum(not way.name.startswith("v") for way in ways)
    counts = f"{listed} listed, {len(ways) - listed} variants, {len(times.failures)} failed"
    print(f"{shape} [{n}, {k}] M={m}: {counts}")
    held = []
    for name, held_us in sorted(times.held_us.items(), key=lambda item: item[1]):
        us, alone_us, error = held_us / CALLS, times.alone_us[name] / CALLS, errors[name]
        ratio = held_us / times.held_us["torch"]
        held.append({"way": name, "us": us, "ratio": ratio, "alone_us": alone_us, "error": error})
        speed = f"{us:8.2f} us {ratio:6.3f} {2e-6 * m * n * k / us:4.0f} TFLOP/s"
        print(f"  {speed}  alone {alone_us:8.2f}  error {error:.4f}  {name}", flush=True)
    return {"shape": shape, "m": m, "algorithms": len(ways), "held": held, "failures": times.failures}


def measure_all(arguments: argparse.Namespace) -> None:
    """Print and write all that there is time for; ends the process where CUDA became unusable."""
    products: list[dict[str, object]] = []
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "products": products}
    torch.mm(*torch.ones(2, 64, 64, dtype=torch.bfloat16, device="cuda"))  # loads the library
    lt, deadline = CublasLt(), time.monotonic() + arguments.seconds
    for m, shape in itertools.product(arguments.rows, arguments.shapes):
        if time.monotonic() > deadline:
            print(f"left out: {shape} M={m}")
            continue
        try:
            products.append(measure(lt, shape, m, arguments.most))
        except RuntimeError as error:
            print(f"{shape} M={m}: {error}", flush=True)
            os._exit(STICKY)  # without torch's own end, which would wait for what does not answer
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=tuple(SHAPES), metavar="SHAPE")
    parser.add_argument("--seconds", type=float, default=540, help="begin nothing more after so many")
    parser.add_argument("--most", type=int, default=300, help="algorithms to try for a product")
    parser.add_argument("--out", type=Path, help="a JSON file, written anew after each product")
    arguments = parser.parse_args()
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        measure_all(arguments)


if __name__ == "__main__":
    main()

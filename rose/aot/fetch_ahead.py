"""An operand of QuACK's epilogues that is not read: the weight of a later product, fetched into the L2 cache.

Imported by a build only: needs quack-kernels.
Source: PTX ISA, cp.async.bulk.prefetch.L2.
"""

# mypy: disallow-untyped-defs=False, disable-error-code="import-not-found,import-untyped,misc,no-any-return"
# Methods are traced: their parameters are the DSL's.

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.experimental import primitives
from quack.compile_utils import make_fake_tensor
from quack.epilogue.ops import EpiOp

_BYTES, _LINE, _THREADS = 2, 128, 4


class FetchAhead(EpiOp):
    """bf16[N, K], contiguous. Each tile asks for its share once its product is done, when memory is idle."""

    def host_fake_arg(self, key, fctx):
        """The argument's type: of any size."""
        return make_fake_tensor(key[0], (cute.sym_int(), cute.sym_int()), leading_dim=1, divisibility=8)

    def param_fields(self):
        """One: the tensor."""
        return [(self.name, object, None)]

    def to_params(self, gemm, args):
        """As it came."""
        return {self.name: getattr(args, self.name)}

    @cute.jit
    def begin(self, gemm, param, smem_tensor, ctx):
        """A few threads ask, a range each; more would wait in line for the one instruction."""
        down = cute.ceil_div(ctx.varlen_manager.len_m(ctx.batch_idx), ctx.tile_M)
        across = cute.ceil_div(ctx.varlen_manager.len_n(), ctx.tile_N)
        tile = ctx.tile_coord_mnkl[0] + ctx.tile_coord_mnkl[1] * down
        total = Int32(cute.size(param)) * _BYTES
        share = cute.ceil_div(cute.ceil_div(total, down * across * _THREADS), _LINE) * _LINE
        start = (tile * _THREADS + ctx.tidx) * share
        if ctx.tidx < _THREADS:  # noqa: SIM102 (traced: two branches)
            if start < total:
                size = share if start + share < total else total - start
                source = param.iterator + Int64(start // _BYTES)
                primitives.cp_async_bulk_prefetch(source.llvm_ptr, size)
        return None

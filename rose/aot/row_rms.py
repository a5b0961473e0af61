"""An operand of QuACK's epilogues: 1 / root mean square of each row of x, from sums that its product made.

Imported by a build only: needs quack-kernels.
Source: quack-kernels 0.6.5, epilogue/ops.py (ColVecLoad, whose place in shared memory this fills).
"""

# mypy: disallow-untyped-defs=False, disable-error-code="import-not-found,import-untyped,misc,no-any-return"
# Methods are traced: their parameters are the DSL's.

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from quack.compile_utils import make_fake_tensor
from quack.epilogue.ops import ColVecLoad

# Loads in flight a row; more partial sums take another round.
_PARTS = 16


class RowRms(ColVecLoad):
    """A factor a row, of sums f32[M, parts]: rsqrt(their sum / K + eps), RMSNorm's over K columns of x."""

    def __init__(self, name, eps):
        super().__init__(name)
        self.eps = eps

    def config_key(self):
        """What the code depends on."""
        return (self.eps,)

    def host_fake_arg(self, key, fctx):
        """The argument's type: any number of parts."""
        return make_fake_tensor(key[0], (fctx.m, cute.sym_int()), leading_dim=1)

    @cute.jit
    def begin(self, gemm, param, smem_tensor, ctx):
        """Fill the tile's factors, then give them out as ColVecLoad does."""
        rows = ctx.varlen_manager.len_m(ctx.batch_idx)
        first_row = ctx.tile_coord_mnkl[0] * ctx.tile_M
        parts = Int32(cute.size(param, mode=[1]))
        share = Float32(1.0) / Float32(ctx.varlen_manager.len_k(ctx.batch_idx))
        for start in cutlass.range_constexpr(0, ctx.tile_M, ctx.num_epi_threads):
            row = Int32(start) + ctx.tidx
            # Past the end the last row is read once more: no branch keeps the loads from going out together.
            source = cutlass.min(first_row + row, rows - 1)
            total = Float32(0.0)
            for part in cutlass.range(0, parts, _PARTS):
                for step in cutlass.range_constexpr(_PARTS):
                    found = param[source, cutlass.min(part + step, parts - 1)]
                    total += found if part + step < parts else Float32(0.0)
            if row < ctx.tile_M:
                smem_tensor[row] = cute.math.rsqrt(total * share + Float32(self.eps), fastmath=True)
        spread = cute.make_layout((ctx.tile_M, ctx.tile_N), stride=self._broadcast_stride())
        mine = ctx.partition_for_epilogue_fn(cute.make_tensor(smem_tensor.iterator, spread))
        if const_expr(ctx.tiled_copy_t2r is not None):
            mine = ctx.tiled_copy_r2s.retile(mine)
        first = cute.group_modes(mine, 3, cute.rank(mine))[None, None, None, 0]
        return [mine, cute.make_rmem_tensor(first.layout, gemm.acc_dtype)]

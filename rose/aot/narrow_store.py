"""An output of QuACK's epilogues that is half as wide as the product and has numbers of 8 bits.

QuACK 0.6.5 has these for other GPUs and refuses them for Hopper, though its store takes them: numbers change
places between threads before they are rounded, and go to shared memory by two.
Imported by a build only: needs quack-kernels.
Source: quack-kernels 0.6.5, epilogue/ops.py (TileStore.to_params).
"""

# mypy: disallow-untyped-defs=False, disable-error-code="import-not-found,import-untyped,misc,no-any-return"
# Methods are traced: their parameters are the DSL's.

from __future__ import annotations

import cutlass
from quack.epilogue.ops import TileStore, setup_epi_tensor


class NarrowStore(TileStore):
    """As TileStore with gated=True."""

    def __init__(self, name):
        super().__init__(name, gated=True)

    def to_params(self, gemm, args):
        """Where it is stored and how: as TileStore's, for any width of a number."""
        tensor = getattr(args, self.name)
        setattr(gemm, self._layout_gemm_attr(), cutlass.utils.LayoutEnum.from_tensor(tensor))
        setattr(gemm, self._dtype_gemm_attr(), tensor.element_type)
        tile = self.epi_tile_fn(gemm, gemm.epi_tile)
        atom, tma_tensor, smem_layout, tile = setup_epi_tensor(gemm, tensor, epi_tile=tile)
        return {
            self._tma_atom_key(): atom,
            self.name: tma_tensor,
            self._smem_layout_key(): smem_layout,
            self._epi_tile_key(): tile,
            self._dtype_field(): tensor.element_type,
        }

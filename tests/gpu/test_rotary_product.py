"""QKV with its heads normed and rotated, on a Hopper GPU: against fp64, and launches behind each other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rose.aot.products import HEAD_DIM, ROTARY_PRODUCT, UNSCALED_ROTARY_PRODUCT
from rose.kernels.early import Early, launching
from rose.kernels.fused import FusedGemm, load
from rose.kernels.rope import QkRope, normed, rope_table, rotated
from rose.layers.fused_decoder import angle_table, rope_columns, with_pairs_adjacent

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
PADDING = 300  # rows past M that must stay as they are: more than a tile has
HEADS = (16, 8)
# Of adjacent pairs: where each of a head's columns stood.
PAIRS = torch.arange(HEAD_DIM).view(2, -1).T.flatten()


def loaded(scaled: bool) -> FusedGemm:
    gemm = load(ROTARY_PRODUCT if scaled else UNSCALED_ROTARY_PRODUCT)
    if gemm is None:
        pytest.skip("no Hopper GPU, or python -m rose.kernels.cuda.build has not been run")
    return gemm


def random(*shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
    return torch.empty(shape, dtype=BF16, device="cuda").normal_(mean, std)


@dataclass(frozen=True)
class Case:
    """x, the QKV weight as a checkpoint has it, positions, and factors of rows."""

    x: Tensor
    weight: Tensor
    rope: QkRope
    positions: Tensor
    scale: Tensor

    @classmethod
    def of(cls, m: int, k: int, heads: tuple[int, int] = HEADS) -> Case:
        rope = QkRope(
            *heads, HEAD_DIM, 1e-6, random(2, HEAD_DIM, std=0.2, mean=1.0), rope_table(128, 1e6, 4096, "cuda")
        )
        weight = random((heads[0] + 2 * heads[1]) * HEAD_DIM, k, std=0.05)
        positions = torch.randint(0, 4096, (m,), device="cuda").int()
        return cls(random(m, k), weight, rope, positions, torch.rand(m, device="cuda") + 0.5)

    def run(self, gemm: FusedGemm, scaled: bool) -> Tensor:
        """By the kernel; checks that nothing behind it was written."""
        m = len(self.x)
        out = torch.full((m + PADDING, len(self.weight)), torch.nan, dtype=BF16, device="cuda")
        angles = angle_table(self.rope, gemm.angle_order)[self.positions.long()]
        columns = rope_columns(self.rope, BF16)
        weight = with_pairs_adjacent(self.weight, self.rope)
        gemm.rope(self.x, weight, columns, self.scale if scaled else None, angles, out[:m])
        assert out[m:].isnan().all()
        return out[:m]

    def expected(self, scaled: bool) -> Tensor:
        """f64[M, N], pairs adjacent."""
        product = self.x.double() @ self.weight.double().T
        if scaled:
            product = product * self.scale.double()[:, None]
        heads = product.view(len(product), -1, HEAD_DIM)
        first = self.rope.rotated_heads
        turned = rotated(normed(heads[:, :first], self.rope), self.positions, self.rope)
        return torch.cat([turned[..., PAIRS], heads[:, first:]], dim=1).flatten(1)


# Blocks of one tile, and of odd and even numbers of them; tiles of fewer chunks than there are slots.
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("m", "k"), [*((m, 1024) for m in (1, 127, 128, 129, 2560, 4096, 12_799, 12_800)), (9000, 64), (700, 320)]
)
def test_a_product_against_fp64_twice(m: int, k: int, scaled: bool) -> None:
    gemm, case = loaded(scaled), Case.of(m, k)
    actual = case.run(gemm, scaled)
    torch.testing.assert_close(actual.double(), case.expected(scaled), rtol=2**-7, atol=2**-7)
    for early in Early:
        with launching(early):
            assert torch.equal(case.run(gemm, scaled), actual)


@pytest.mark.parametrize("heads", [(2, 1), (32, 8), (4, 4)])
def test_other_numbers_of_heads(heads: tuple[int, int]) -> None:
    gemm, case = loaded(False), Case.of(333, 512, heads)
    torch.testing.assert_close(case.run(gemm, False).double(), case.expected(False), rtol=2**-7, atol=2**-7)


def test_nan_in_one_row_stays_there() -> None:
    gemm, case = loaded(True), Case.of(300, 1024)
    clean = case.run(gemm, True)
    case.x[150] = torch.nan
    actual = case.run(gemm, True)
    assert actual[150].isnan().all()
    others = torch.arange(300, device="cuda") != 150
    assert torch.equal(actual[others], clean[others])


def test_launches_behind_each_other_in_a_graph() -> None:
    """Early ones, of which each takes rows that the one before made."""
    gemm, case = loaded(False), Case.of(2000, 1024)
    weight, columns = with_pairs_adjacent(case.weight, case.rope), rope_columns(case.rope, BF16)
    angles = angle_table(case.rope, gemm.angle_order)[case.positions.long()]
    rows = [torch.empty_like(case.x) for _ in range(2)]
    outs = torch.empty(2000, 4096, dtype=BF16, device="cuda")

    def chain() -> None:
        rows[0].copy_(case.x)
        for turn in range(6):
            gemm.rope(rows[turn % 2], weight, columns, None, angles, outs)
            rows[1 - turn % 2].copy_(outs[:, :1024])

    with launching(Early.AFTER_WAIT):
        chain()
        first = outs.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
    for _ in range(20):
        outs.fill_(torch.nan)
        graph.replay()
        assert torch.equal(outs, first)

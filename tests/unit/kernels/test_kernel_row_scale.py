"""The row scale kernel against its plain version."""

from __future__ import annotations

import pytest
import torch

from rose.kernels import row_scale
from rose.kernels.jit import row_scale as jit


@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (255, 8), (513, 6)])
def test_row_scale(rows, parts, device, close, poisoned):
    sums = torch.rand(rows, parts, device=device) * 1000
    actual, expected = poisoned(rows + 3, dtype=torch.float32), torch.empty(rows)
    jit.row_scale(sums, 1024, 1e-6, actual[:rows])
    row_scale.row_scale(sums.cpu(), 1024, 1e-6, expected)
    close(actual[:rows].cpu(), expected)
    close(expected, torch.rsqrt(sums.cpu().double().sum(1) / 1024 + 1e-6).float())
    assert actual[rows:].isnan().all()

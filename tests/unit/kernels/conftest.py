"""Each Triton kernel against its plain version: in Triton's interpreter, or natively where there is a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]

if importlib.util.find_spec("triton"):
    from triton.runtime import interpreter

    @pytest.fixture
    def right_casts() -> Iterator[None]:
        """Triton 3.6's interpreter loses a carry when it rounds to e4m3, so 126.6 is 64: torch casts."""
        plain = interpreter._convert_float

        def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
            if target.name != "fp8e4nv":
                return plain(values, source, target, rounding)
            return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

        interpreter._convert_float = convert
        yield
        interpreter._convert_float = plain

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_index(tensor: type, scope: interpreter._LangPatchScope) -> None:
        """Bounds of loops are arrays of one element there, which NumPy 2.4 takes for no number."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_index

Close = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def close() -> Close:
    """Equal to one unit in the last place of bf16 (the interpreter truncates), or to 2e-5 in fp32."""

    def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        tolerance = 2.0**-7 if actual.dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)

    return check


@pytest.fixture
def poisoned(device: str) -> Callable[..., torch.Tensor]:
    """Outputs that hold NaN (or 77 in integers) until a kernel writes every element."""

    def make(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        fill = float("nan") if dtype.is_floating_point else 77
        return torch.full(shape, fill, dtype=dtype, device=device)

    return make

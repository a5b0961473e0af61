"""When kernels are launched early."""

from __future__ import annotations

import pytest
import torch

from rose.kernels import dispatch
from rose.kernels.early import Early, _can_launch_early, current, early_for, launching

GPU = torch.device("cuda", 0)


@pytest.fixture
def on_gpu_of(monkeypatch):
    def pretend(*capability: int) -> None:
        _can_launch_early.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(dispatch, "has_triton", lambda: True)

    yield pretend
    _can_launch_early.cache_clear()


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_small_batches_and_products_that_fetch_launch_early(capability, on_gpu_of):
    on_gpu_of(*capability)
    assert [early_for(tokens, False, GPU) for tokens in (1, 128, 129)] == [
        Early.AFTER_WAIT,
        Early.AFTER_WAIT,
        Early.NO,
    ]
    assert {early_for(tokens, True, GPU) for tokens in (1, 128, 256)} == {Early.AT_ONCE}
    assert {early_for(tokens, False, GPU, True) for tokens in (1, 128, 1024)} == {Early.AFTER_WAIT}


@pytest.mark.parametrize("fetches", [False, True])
def test_other_devices_do_not(fetches, on_gpu_of, monkeypatch):
    on_gpu_of(8, 9)
    assert early_for(16, fetches, GPU, True) is early_for(16, fetches, torch.device("cpu"), True) is Early.NO
    on_gpu_of(9, 0)
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    assert early_for(16, fetches, GPU) is Early.NO


def test_only_what_is_enqueued_inside_is_launched_so():
    assert current() is Early.NO
    with pytest.raises(RuntimeError), launching(Early.AFTER_WAIT):
        assert current() is Early.AFTER_WAIT
        with launching(Early.NO):
            assert current() is Early.NO
        raise RuntimeError
    assert current() is Early.NO

"""A server that is killed leaves nothing on the GPU."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from tests.e2e.server_process import ServerProcess

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FLAGS = ("--device", "cuda", "--model", "pplx-embed", "--load-format", "dummy", "--port", "0")
SLACK_BYTES = 64 << 20


def free_bytes() -> int:
    """Of the device, whoever has the rest."""
    return torch.cuda.mem_get_info()[0]


def test_sigkill_gives_the_device_s_memory_back() -> None:
    before = free_bytes()
    with ServerProcess(*FLAGS) as server:
        server.ready(240)
        assert server.post("/v1/embeddings", {"input": [1, 2, 3]})[0] == 200
        assert before - free_bytes() > 500 << 20
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
    deadline_s = time.monotonic() + 10
    while before - free_bytes() > SLACK_BYTES:
        assert time.monotonic() < deadline_s, f"{before - free_bytes()} bytes are still in use"
        time.sleep(0.1)

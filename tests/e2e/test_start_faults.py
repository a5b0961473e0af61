"""What keeps a server from starting: one line that says why, a status that is not 0, and soon."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from gateway.tokenization.precompile import precompile
from tests.e2e.server_process import ServerProcess

# Those that are read by the same code as another have the mark `long`: each imports torch.
pytestmark = pytest.mark.timeout(120)

# Of the processors' time: others may have them for longer. Idle, the slowest of these is torch's import.
LIMIT_S = 5.0
LOST = "encoder.layer.3.output.dense.weight"


@pytest.fixture(scope="module", autouse=True)
def compiled_before(minilm_folder: Path) -> None:
    """After a change of the source the first start compiles tokenisers, beside the model's load."""
    precompile(minilm_folder / "tokenizer.json")


@pytest.fixture
def folder(minilm_folder: Path, tmp_path: Path) -> Path:
    """A copy of the packaged model, whose weights may be damaged."""
    copied = tmp_path / "model"
    shutil.copytree(minilm_folder, copied)
    return copied


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def refused(*flags: str) -> str:
    """The one line that such a server leaves behind."""
    before_s = _children_s()
    with ServerProcess(*flags) as process:
        status = process.wait(60)
        (line,) = process.stderr
    assert status in (1, 2)
    assert _children_s() - before_s < LIMIT_S
    assert line.startswith("error: ")
    assert "Traceback" not in "".join(process.stdout)
    return line


def serving(folder: Path, *flags: str) -> str:
    return refused("--model", str(folder), "--port", "0", *flags)


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file)


def test_no_such_folder(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in serving(tmp_path / "nowhere")


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "config.json" in serving(tmp_path)


@pytest.mark.long
def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "safetensors" in serving(folder)


def test_a_missing_tensor(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.pop(LOST))
    assert LOST in serving(folder)


def test_a_tensor_of_a_layer_that_the_model_has_not(folder: Path) -> None:
    seventh = LOST.replace(".3.", ".6.")
    _rewrite(folder, lambda tensors: tensors.update({seventh: tensors[LOST]}))
    assert seventh in serving(folder)


@pytest.mark.long
def test_a_tensor_that_no_model_reads_is_passed_over(folder: Path) -> None:
    """Training leaves its heads and buffers behind."""
    _rewrite(folder, lambda tensors: tensors.update({"cls.predictions.bias": np.zeros(3, np.float32)}))
    with ServerProcess("--model", str(folder), "--port", "0") as process:
        process.ready()


@pytest.mark.long
def test_a_tensor_of_no_floating_type(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.update({LOST: tensors[LOST].astype(np.int32)}))
    assert LOST in serving(folder)


@pytest.mark.long
def test_a_tensor_of_another_shape(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.update({LOST: np.zeros((3, 5), np.float32)}))
    line = serving(folder)
    assert LOST in line and "3, 5" in line.replace("3×5", "3, 5")


@pytest.mark.parametrize(
    "keep", [4000, *(pytest.param(keep, marks=pytest.mark.long) for keep in (0, 4, 10_000_000))]
)
def test_truncated_weights(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors" in serving(folder)


@pytest.mark.long
def test_weights_whose_header_lies(folder: Path) -> None:
    header = json.dumps({LOST: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 1 << 40]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)
    assert "model.safetensors" in serving(folder)


def test_a_dtype_that_is_none(folder: Path) -> None:
    assert "--dtype" in serving(folder, "--dtype", "int4")


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_no_gpu_where_one_is_asked_for(folder: Path) -> None:
    assert "cuda" in serving(folder, "--device", "cuda").lower()


def test_a_port_in_use(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in refused("--model", str(folder), "--port", port)


def test_a_folder_that_may_not_be_read(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "config.json" in serving(folder)


def test_a_socket_where_nothing_can_be_written(folder: Path) -> None:
    path = "/proc/bouquet.sock"
    assert path in refused("--model", str(folder), "--uds", path)


def test_a_disk_that_cannot_be_written_is_no_reason_not_to_start(folder: Path) -> None:
    """Caches are a gain and no need: here every place for them is in a file system without files."""
    env = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "HF_HOME", "TMPDIR", "TRITON_CACHE_DIR"), "/proc/nowhere")
    env["NUMBA_CACHE_DIR"] = "/proc/nowhere"
    flags = ("--model", str(folder), "--port", "0")
    with ServerProcess(*flags, env=env) as process:
        process.ready()
        assert process.post("/v1/embeddings", {"input": "written nowhere"})[0] == 200

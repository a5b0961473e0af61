from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadgen.apis import Vectors
from loadgen.check import MAX_DEVIATION, Check, Checker, deviations
from loadgen.conductor import StreamRun, Warmup
from loadgen.http1 import Response
from loadgen.plan import LoadgenError, Shape, Source, Stream
from loadgen.recording import Recorder
from loadgen.reference import TransformersReference
from loadgen.requests import distinct
from loadgen.workload import Inputs

SOURCE = Source(vocab_size=30_522)
STREAM = Stream(Shape(5, 4, 8))


class Sums:
    """A reference that turns ids into a vector by arithmetic. asked: how often."""

    name = "sums"

    def __init__(self) -> None:
        self.asked = 0

    def embed(self, inputs: Inputs) -> Vectors:
        self.asked += 1
        return np.array([[ids.sum(), len(ids), ids[0]] for ids in inputs.ids], np.float32)


def run_of(scale: float = 1.0, shift: float = 0.0) -> tuple[StreamRun, ...]:
    """Two answers to each of the first two distinct requests."""
    recorder = Recorder(keep=4)
    for number in (0, 1, 0, 1):
        vectors = Sums().embed(distinct(STREAM, SOURCE, 0)[number]) * scale
        vectors[:, 1] += shift * vectors[:, 0]
        body = {"embeddings": vectors.tobytes(), "shape": vectors.shape, "usage": {"prompt_tokens": 1}}
        recorder.answered(number, 0.0, 0.0, Response(200, b"", msgspec.msgpack.encode(body), 1.0))
    return (StreamRun(STREAM, (recorder.freeze([], [5], [5]),), 0.0, 2.0, Warmup(0, 0.0, True)),)


def test_equal_directions_pass_whatever_their_length() -> None:
    reference = Sums()
    found = Checker(reference, SOURCE).check(run_of(scale=0.01), "bouquet-msgpack")
    assert found.passed and found.vectors == 8 and found.deviation < 1e-6
    assert reference.asked == 2, "each sequence once"


@pytest.mark.parametrize(("shift", "passes"), [(0.03, True), (0.06, False)])
def test_the_bound_is_a_thousandth(shift: float, passes: bool) -> None:
    # The angle's tangent is the shift: cosine 1 - shift²/2.
    found = Checker(Sums(), SOURCE).check(run_of(shift=shift), "bouquet-msgpack")
    assert found.deviation == pytest.approx(shift**2 / 2, rel=0.1)
    assert found.passed is passes is (found.deviation <= MAX_DEVIATION)


def test_what_cannot_be_compared_does_not_pass() -> None:
    with pytest.raises(LoadgenError, match="shape"):
        deviations(np.ones((2, 3), np.float32), np.ones((2, 4), np.float32))
    assert deviations(np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)) == [1.0]
    assert not Check("r", 0, 0.0).passed
    assert not Check("r", 5, 0.0, "why").passed
    nothing = (StreamRun(STREAM, (), 0.0, 1.0, Warmup(0, 0.0, True)),)
    assert not Checker(Sums(), SOURCE).check(nothing, "bouquet-msgpack").passed


def test_transformers_gives_the_known_vector(minilm_folder: Path) -> None:
    """The first five values of a sentence that sentence-transformers embedded, normalised."""
    vector = TransformersReference(minilm_folder).embed(Inputs(texts=("A man is eating food.",)))[0]
    expected = [0.0332416, 0.0044061, -0.0062770, 0.0483787, -0.1387023]
    assert (vector / np.linalg.norm(vector))[:5] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "config", [None, "{}", '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}']
)
def test_a_folder_without_a_pooling_is_refused(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(config)
    with pytest.raises(LoadgenError, match="1_Pooling"):
        TransformersReference(tmp_path)

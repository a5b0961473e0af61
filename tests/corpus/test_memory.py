"""A corpus of any size goes through a bounded number of rows in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.corpus import local, parquet_input
from gateway.corpus.worker import Progress
from rose.batch import RaggedBatch
from tests.corpus.jobs import embed, fake_model, write_parquet, write_texts
from tests.fakes import FakeEngine, FakeLazyTensor
from tests.programs import output_of

RSS = """
import resource, sys
from pathlib import Path
from tests.corpus.jobs import embed, fake_model, write_parquet
from tests.fakes import FakeEngine

class Forgetful(FakeEngine):
    def step(self, batch):
        for record in (self.batches, self.captures, self.in_flight_at_launch):
            record.clear()
        return super().step(batch)

count = int(sys.argv[2])
folder = Path(sys.argv[1], str(count))
texts = ["word " * 80 + str(n) for n in range(count)]
write_parquet(folder / "in.parquet", {"text": texts}, row_group_size=2000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
summary, status = embed(
    folder / "in.parquet", folder / "out", fake_model(Forgetful()), window_rows=1000, shard_rows=5000
)
assert status == 0 and summary.rows_out == count
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> list[Progress]:
    """What the workers count."""
    made: list[Progress] = []

    class Kept(Progress):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(local, "Progress", Kept)
    return made


def test_rows_held_are_those_of_the_windows(tmp_path: Path, progress: list[Progress]) -> None:
    source = write_texts(tmp_path / "in.parquet", 3000, row_group_size=500)
    engine = FakeEngine(service_s=0.001)
    summary, _ = embed(source, tmp_path / "out", fake_model(engine), shard_rows=500, window_rows=100)
    assert summary.rows_out == 3000
    [kept] = progress
    assert kept.held_rows == 0
    # Windows end with a chunk, here with a row group at the latest.
    assert 100 < kept.most_held_rows <= 3 * 500


def test_long_texts_make_smaller_windows(
    tmp_path: Path, progress: list[Progress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_input, "_CHUNK_BYTES", 20_000)
    texts = [f"{number} " + "x" * 400 for number in range(1000)]
    source = write_parquet(tmp_path / "in.parquet", {"text": texts}, use_dictionary=False)
    embed(source, tmp_path / "out", window_bytes=30_000)
    assert progress[0].most_held_rows <= 3 * 125  # 75 rows fill a window, which ends with a chunk of 50


class Following(FakeEngine):
    """A step ends as the next one begins, however long that takes; one that nothing follows, after a while.

    left: how many steps nothing followed.
    """

    def __init__(self) -> None:
        super().__init__(service_s=None)
        self.left = 0

    def step(self, batch: RaggedBatch) -> FakeLazyTensor:
        lazy = super().step(batch)
        if len(self.running) > 1:
            self.finish()
        asyncio.get_running_loop().call_later(0.5, self._end, lazy)
        return lazy

    def _end(self, lazy: FakeLazyTensor) -> None:
        if lazy in self.running:
            self.left += 1
            self.finish()


def test_two_steps_are_in_flight(tmp_path: Path) -> None:
    engine = Following()
    embed(write_texts(tmp_path / "in.parquet", 2000), tmp_path / "out", fake_model(engine), shard_rows=400)
    assert engine.most_in_flight == 2
    assert len(engine.batches) > 40
    # The first steps of a start, the last one, and where a busy machine was slow to commit a shard.
    assert engine.left < 0.1 * len(engine.batches)


@pytest.mark.long
def test_ten_times_the_rows_take_no_more_memory(tmp_path: Path) -> None:
    small, large = (
        int(output_of("-c", RSS, tmp_path, str(count), timeout_s=110.0)) for count in (10_000, 100_000)
    )
    assert large < small + 30_000  # kB; 90 000 texts and their ids would take 180 000

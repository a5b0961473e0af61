"""The CUDA engine at full size: right at every length and bucket edge, eager, replayed, alone and packed."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import uvloop

from rose.batch import BatchResult, Float32, Int32, RaggedBatch
from rose.buckets import token_buckets
from rose.config import ModelConfig, load_config
from rose.engine import EngineOptions, load_engine
from rose.errors import EngineDeadError, StepError
from rose.graph_engine import GraphEngine
from rose.reference import reference_vectors
from rose.weights import WeightSource, dummy_weights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
MIN_COSINE = 0.999
GROWTH_BYTES = 64 << 20
# Nine lengths around the buckets of short queries, and what issue reports of other servers name.
LENGTHS = (1, 2, 15, 16, 17, 31, 100, 128, 300, 511, 512, 1000, 2048, 3000, 4096)


@dataclass(frozen=True)
class Loaded:
    """One engine, and what its fp32 reference needs."""

    engine: GraphEngine
    config: ModelConfig
    weights: WeightSource

    def sequences(self, lengths: Sequence[int], seed: int = 0) -> list[Int32]:
        rng = np.random.default_rng(seed)
        return [rng.integers(0, self.config.vocab_size, length, dtype=np.int32) for length in lengths]

    def run(self, sequences: Sequence[Int32]) -> BatchResult:
        return self.engine.step(RaggedBatch.pack(sequences)).result()

    def reference(self, sequences: Sequence[Int32]) -> Float32:
        vectors: Float32 = reference_vectors(self.config, self.weights, sequences, device="cuda").numpy()
        return vectors


def load(alias: str, **options: Any) -> Loaded:
    folder = ROOT / "rose" / "presets" / alias
    engine = load_engine(folder, EngineOptions(device="cuda", **options), dummy=True, model_name=alias)
    assert isinstance(engine, GraphEngine)
    config = load_config(folder)
    return Loaded(engine, config, dummy_weights(config, 0, "cuda"))


@pytest.fixture(scope="module", params=["pplx-embed", "bge-m3"])
def loaded(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    loaded = load(request.param, max_capture_tokens=4352)
    yield loaded
    loaded.engine.close()
    del loaded
    gc.collect()
    torch.cuda.empty_cache()


def cosines(a: Float32, b: Float32) -> Float32:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return np.asarray((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)), np.float32)


def counts(engine: GraphEngine) -> dict[str, int]:
    graphs: Any = engine.stats()["graphs"]
    return dict(graphs["counts"])


def test_every_length_is_the_reference_eagerly_captured_and_replayed(loaded: Loaded) -> None:
    longest = min(loaded.config.max_model_len, 4096)
    for length in (length for length in LENGTHS if length <= longest):
        (sequence,) = loaded.sequences([length], seed=length)
        wanted = loaded.reference([sequence])
        for run in range(3):
            assert cosines(loaded.run([sequence]).vectors, wanted)[0] > MIN_COSINE, (length, run)


@pytest.mark.parametrize("rows", [512, 640, 768, 1024, 1152, 1536, 2048])
def test_whole_layers_of_every_kind_are_the_reference(loaded: Loaded, rows: int) -> None:
    """Wherever other products, attention or launches serve: one sequence, and two with a little padding."""
    for lengths in ([rows], [rows // 2, rows // 2 - 3]):
        sequences = loaded.sequences(lengths, seed=rows)
        wanted = loaded.reference(sequences)
        for run in range(3):
            assert cosines(loaded.run(sequences).vectors, wanted).min() > MIN_COSINE, (lengths, run)


@pytest.mark.parametrize("length", [8192, 32_768])
def test_long_sequences_are_the_reference(loaded: Loaded, length: int) -> None:
    if length > loaded.config.max_model_len:
        pytest.skip(f"this model takes {loaded.config.max_model_len} tokens")
    (sequence,) = loaded.sequences([length])
    assert cosines(loaded.run([sequence]).vectors, loaded.reference([sequence]))[0] > MIN_COSINE


def test_every_bucket_edge_is_the_reference(loaded: Loaded) -> None:
    edges = {edge + step for edge in token_buckets(4096) for step in (-1, 0, 1)}
    sequences = loaded.sequences(sorted(edges), seed=1)
    wanted = loaded.reference(sequences)
    for sequence, vector in zip(sequences, wanted, strict=True):
        for run in range(3):
            cosine = cosines(loaded.run([sequence]).vectors, vector[None])[0]
            assert cosine > MIN_COSINE, (len(sequence), run)


def test_int8_is_the_quantised_vector(loaded: Loaded) -> None:
    result = loaded.run(loaded.sequences([3, 200, 17]))
    if not loaded.engine.info.has_int8:
        assert result.int8 is None
        return
    assert result.int8 is not None
    wanted = np.round(np.tanh(result.vectors) * 127)
    assert np.abs(result.int8 - wanted).max() <= 1  # the device's tanh may round another way
    assert (result.int8 == wanted).mean() > 0.999


def test_alone_is_packed(loaded: Loaded) -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        lengths = rng.integers(1, 513, rng.integers(1, 65))
        lengths = lengths[np.cumsum(lengths) <= loaded.engine.info.max_batch_tokens]
        sequences = loaded.sequences(lengths.tolist(), seed=int(rng.integers(1 << 30)))
        packed = loaded.run(sequences).vectors
        for row in rng.choice(len(sequences), min(4, len(sequences)), replace=False):
            alone = loaded.run([sequences[row]]).vectors
            assert cosines(packed[row : row + 1], alone)[0] > MIN_COSINE


def test_the_largest_step_is_as_right_as_a_small_one(loaded: Loaded) -> None:
    info = loaded.engine.info
    length = min(info.max_model_len, info.max_batch_tokens // info.max_batch_seqs)
    sequences = loaded.sequences([length] * info.max_batch_seqs, seed=11)
    packed = loaded.run(sequences).vectors
    for row in (0, 1, info.max_batch_seqs // 2, info.max_batch_seqs - 1):
        assert cosines(packed[row : row + 1], loaded.run([sequences[row]]).vectors)[0] > MIN_COSINE


def test_eager_is_the_first_and_the_hundredth_replay(loaded: Loaded) -> None:
    sequences = loaded.sequences([100, 37, 300, 1], seed=3)
    with patch.object(loaded.engine._runner, "_may_capture", return_value=False):
        eager = loaded.run(sequences).vectors.copy()
    before = counts(loaded.engine)["replayed"]
    replays = [loaded.run(sequences).vectors.copy() for _ in range(102)]
    assert counts(loaded.engine)["replayed"] - before >= 100
    assert cosines(replays[0], eager).min() > 0.99999
    assert all((replay == replays[0]).all() for replay in replays)


def activations(model: Any) -> Iterator[torch.Tensor]:
    """Every float buffer that a forward leaves something in."""
    for holder in ("_workspace", "_buffers", "_scratch"):
        found = getattr(model, holder, None)
        memory = getattr(found, "_memory", found)
        if dataclasses.is_dataclass(memory):
            memory = [getattr(memory, field.name) for field in dataclasses.fields(memory)]
        for tensor in memory if isinstance(memory, list | tuple) else [memory]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                yield tensor


@pytest.mark.parametrize("lengths", [[1], [100], [129], [60, 1, 60], [1] * 17, [500, 11]])
def test_what_an_earlier_batch_left_in_the_padding_changes_nothing(
    loaded: Loaded, lengths: list[int]
) -> None:
    sequences = loaded.sequences(lengths, seed=4)
    clean = [loaded.run(sequences).vectors.copy() for _ in range(3)][-1]
    bucket_mates = loaded.sequences([sum(lengths)], seed=5)
    forward: Any = loaded.engine._forward
    poisoned = list(activations(forward._model))
    assert len(poisoned) >= 3
    for junk in (1e4, -3e4, 0.0):
        torch.cuda.synchronize()
        for tensor in poisoned:
            tensor.fill_(junk)
        forward._input.fill_(7)
        forward._output.fill_(0x7F)
        torch.cuda.synchronize()
        assert (loaded.run(sequences).vectors == clean).all(), junk
    for _ in range(3):
        loaded.run(bucket_mates)
        assert (loaded.run(sequences).vectors == clean).all()


def test_a_vector_with_nan_is_marked_and_leaves_nothing_behind(loaded: Loaded) -> None:
    model: Any = loaded.engine._forward  # type: ignore[assignment]
    model = model._model
    table = model._table if hasattr(model, "_table") else model._tables.word
    sequences = loaded.sequences([40, 3, 77], seed=6)
    for sequence in sequences:
        sequence[sequence == 7] = 8
    clean = [loaded.run(sequences).vectors.copy() for _ in range(3)][-1]
    kept = table[7].clone()
    table[7] = torch.nan
    torch.cuda.synchronize()
    for _ in range(2):
        assert loaded.run([np.full(126, 7, np.int32)]).non_finite == (0,)
    table[7] = kept
    torch.cuda.synchronize()
    for _ in range(3):
        assert (loaded.run(sequences).vectors == clean).all()


@pytest.mark.parametrize("wrong", [-1, 2**31 - 1, -(2**31)])
def test_an_id_out_of_range_fails_its_own_row_alone(loaded: Loaded, wrong: int) -> None:
    sequences = loaded.sequences([40, 3, 77], seed=8)
    sequences[1][1] = 0  # what it counts as
    clean = [loaded.run(sequences).vectors.copy() for _ in range(3)][-1]
    sequences[1][1] = wrong
    for _ in range(3):
        result = loaded.run(sequences)
        assert result.non_finite == (1,)
        assert (result.vectors[[0, 2]] == clean[[0, 2]]).all()
    sequences[1][1] = 0
    assert (loaded.run(sequences).vectors == clean).all()
    assert loaded.engine.stats()["dead"] is None


async def run_two_in_flight(loaded: Loaded, batches: int, singles: Float32, sequences: list[Int32]) -> int:
    """How many of the rows of random batches are not the vector of their sequence alone."""
    rng = np.random.default_rng(7)
    mean = singles.mean(0)
    directions = (singles - mean) / np.linalg.norm(singles - mean, axis=1, keepdims=True)
    running: deque[tuple[Int32, Any]] = deque()
    mismatches = 0

    async def check_oldest() -> int:
        rows, lazy = running.popleft()
        vectors = (await lazy).vectors
        nearest = ((vectors - mean) @ directions.T).argmax(1)
        return int(((nearest != rows) | (cosines(vectors, singles[rows]) < MIN_COSINE)).sum())

    memory: dict[int, tuple[int, int]] = {}
    for number in range(batches):
        rows = random_rows(rng, sequences)
        running.append((rows, loaded.engine.step(RaggedBatch.pack([sequences[row] for row in rows]))))
        if len(running) == 2:
            mismatches += await check_oldest()
        if number in (batches // 2, batches - 1):
            memory[number] = (resident_bytes(), device_bytes(loaded))
    while running:
        mismatches += await check_oldest()
    (host_before, device_before), (host_after, device_after) = memory.values()
    assert host_after - host_before < GROWTH_BYTES
    assert device_after - device_before < GROWTH_BYTES
    return mismatches


def random_rows(rng: np.random.Generator, sequences: list[Int32]) -> Int32:
    """1 to 64 sequences of 1 to 1024 tokens together."""
    rows, tokens = [], 0
    for row in rng.integers(0, len(sequences), rng.integers(1, 65)):
        if tokens + len(sequences[row]) > 1024 and rows:
            break
        rows.append(row)
        tokens += len(sequences[row])
    return np.array(rows, np.int32)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def device_bytes(loaded: Loaded) -> int:
    """Used by anyone: graphs are the driver's memory, which torch does not count."""
    memory: Any = loaded.engine.stats()["memory"]
    return torch.cuda.get_device_properties(0).total_memory - int(memory["free_bytes"])


def test_ten_thousand_random_batches_with_two_in_flight(loaded: Loaded) -> None:
    rng = np.random.default_rng(8)
    lengths = np.minimum(rng.geometric(1 / 60, 256), 1024)
    sequences = loaded.sequences(lengths.tolist(), seed=9)
    singles = np.concatenate([loaded.run([sequence]).vectors for sequence in sequences])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(run_two_in_flight(loaded, 10_000, singles, sequences)) == 0
    stats = counts(loaded.engine)
    assert stats["replayed"] > stats["eager"]


def test_rehearsals_change_no_result_and_take_no_memory(loaded: Loaded) -> None:
    engine, rng = loaded.engine, np.random.default_rng(11)
    batches = [
        RaggedBatch.pack(loaded.sequences(rng.integers(1, 200, count).tolist(), seed=count))
        for count in range(1, 9)
    ]
    wanted = [[engine.step(batch).result().vectors.copy() for _ in range(10)][-1] for batch in batches]
    rehearsal: Any = engine._rehearsal
    pinned: Any = engine.stats()["pinned"]
    device_before, replays_before = device_bytes(loaded), rehearsal._runner._replays
    for _ in range(250):
        running = []
        for batch in batches[:2]:
            running.append(engine.step(batch))
            engine.rehearse(batch)
        for lazy, vectors in zip(running, wanted[:2], strict=True):
            assert (lazy.result().vectors == vectors).all()
        del running, lazy
        batches, wanted = batches[1:] + batches[:1], wanted[1:] + wanted[:1]
    assert not rehearsal._failed
    assert rehearsal._runner._replays - replays_before > 500  # each step's, and some of rehearsals
    after: Any = engine.stats()["pinned"]
    assert after["allocated_bytes"] == pinned["allocated_bytes"]
    assert device_bytes(loaded) - device_before < GROWTH_BYTES


def test_a_long_step_is_rehearsed_while_it_is_awaited(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed: list[RaggedBatch] = []
    monkeypatch.setattr(loaded.engine, "rehearse", rehearsed.append)
    batch = RaggedBatch.pack(loaded.sequences([512] * 8, seed=12))

    async def await_steps() -> None:
        for _ in range(20):
            await loaded.engine.step(batch)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(await_steps())
    assert 10 <= len(rehearsed) <= 40


def test_a_full_set_of_steps_in_flight_is_refused_and_the_rest_come_right(loaded: Loaded) -> None:
    sequences = loaded.sequences([512] * 8, seed=10)
    wanted = loaded.run(sequences).vectors.copy()
    stream: Any = torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # some 0.1 s
    lazies = []
    with pytest.raises(StepError, match="in flight"):
        for _ in range(10):
            lazies.append(loaded.engine.step(RaggedBatch.pack(sequences)))  # noqa: PERF401
    assert len(lazies) == EngineOptions().max_in_flight
    for lazy in lazies:
        assert cosines(lazy.result().vectors, wanted).min() > MIN_COSINE


def test_a_closed_engine_refuses_and_gives_its_memory_back() -> None:
    loaded = load("minilm", max_batch_tokens=1024)
    kept = loaded.run(loaded.sequences([5])).vectors
    loaded.engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        loaded.run(loaded.sequences([5]))
    assert np.isfinite(kept).all()
    pinned: Any = loaded.engine.stats()["pinned"]
    assert pinned["free_bytes"] == 0
    loaded.engine.close()

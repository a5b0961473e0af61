"""A simulated device: a thread that does copies and forwards later, and batches for it.

It reads a staging slot when its stream gets to the copy, not when that is launched, so a slot refilled too
early, or an output overwritten too early, shows as a wrong vector.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from cuda_utils.errors import CudaError
from cuda_utils.event import CpuEvent
from cuda_utils.pinned import PlainHostAllocator
from cuda_utils.stream import CpuStream
from rose.batch import NO_TOKEN_OUTPUTS, EngineInfo, Float32, Int32, RaggedBatch, TokenOutput
from rose.buckets import sequence_bucket, token_bucket
from rose.engine_options import EngineOptions
from rose.graph_device import DeviceNouns, SideStream
from rose.graph_engine import GraphEngine
from rose.graph_runner import GraphKey
from rose.limits import StepLimits
from rose.staging import StagingLayout, StagingSlot

DIMENSIONS = 4
WIDTHS: dict[TokenOutput, int] = {"hidden": 3, "lexical": 1}
KINDS: list[frozenset[TokenOutput]] = [
    frozenset({"hidden"}),
    frozenset({"lexical"}),
    frozenset({"hidden", "lexical"}),
]
INFO = EngineInfo(
    "m",
    "bert",
    "float32",
    "sim",
    DIMENSIONS,
    1000,
    128,
    512,
    16,
    "mean",
    True,
    has_int8=True,
    token_outputs=WIDTHS,
)
LIMITS = StepLimits(512, 16, 128, 1000, 2, True, {kind: 4 * width for kind, width in WIDTHS.items()}, 8192)
OPTIONS = EngineOptions(
    max_in_flight=3, max_capture_tokens=256, max_pinned_bytes=1 << 20, max_token_pinned_bytes=0
)
BROKEN = CudaError(700, "cudaMemcpyAsync to the device")
REFUSED = CudaError(701, "cudaGraphLaunch")


class Simulation:
    """One stream, its memory, and a model whose vectors are [sum, length, first id, sum of types].

    Its tokens' hidden states are [id, type, -id], their lexical weights the ids' last digits.

    pause() stops the stream until resume(). fails: raised by the next call of that name.
    delivers: whether it writes its rows to the host itself; to be set before there is an engine.
    """

    def __init__(self, info: EngineInfo = INFO) -> None:
        self.info = info
        self.layout = StagingLayout(token_bucket(512), sequence_bucket(16), has_types=True)
        self.input = np.full(self.layout.capacity, -7, np.int32)
        self.output = np.zeros(self.output_bytes(self.layout.max_seqs), np.uint8)
        self.tokens = np.zeros(self.layout.max_tokens * sum(WIDTHS.values()), np.float32)
        self.input_ptr, self.output_ptr = self.input.ctypes.data, self.output.ctypes.data
        self.tokens_ptr = self.tokens.ctypes.data
        self.stream = CpuStream("simulated-device")
        self.allocator = PlainHostAllocator()
        self.gate = threading.Event()
        self.gate.set()
        self.delivers = False
        self.launches = self.computed = 0
        self.eager: list[GraphKey] = []
        self.captured: list[GraphKey] = []
        self.replayed: list[GraphKey] = []
        self.plans: list[tuple[int, list[int]]] = []
        self.fails: dict[str, Exception] = {}
        self.poison = 0.0
        self.dirty = range(0)  # rows of the activations that a NaN may lie in
        self.bound: list[int] = []
        self.side = SimulatedSide(self.layout.capacity)
        self.nouns = DeviceNouns(
            memcpy=self,
            allocator=self.allocator,
            new_event=lambda: CpuEvent(self.stream),
            synchronize=self.stream.synchronize,
            bind_thread=lambda: self.bound.append(threading.get_ident()),
            side=self.side.nouns(),
        )

    def engine(self, options: EngineOptions = OPTIONS) -> GraphEngine:
        return GraphEngine(self, self.nouns, self.info, LIMITS, options)

    def pause(self) -> None:
        self.gate.clear()
        self.stream.launch(lambda: self.gate.wait(20) or None)

    def resume(self) -> None:
        self.gate.set()

    # Memcpy
    def host_to_device(self, destination: int, source: int, nbytes: int) -> None:
        self._fail("host_to_device")
        self.stream.launch(lambda: ctypes.memmove(destination, source, nbytes) or None)

    def device_to_host(self, destination: int, source: int, nbytes: int) -> None:
        self._fail("device_to_host")
        self.stream.launch(lambda: ctypes.memmove(destination, source, nbytes) or None)

    # Forward
    def output_bytes(self, num_seqs: int) -> int:
        return num_seqs * DIMENSIONS * (5 if self.info.has_int8 else 4)

    def key_of(self, num_tokens: int, num_seqs: int, longest: int) -> GraphKey:
        return GraphKey(num_tokens, num_seqs, "sim")

    def plan(self, key: GraphKey, work: StagingSlot) -> None:
        self._fail("plan")
        self.plans.append((work.index, work.host_cu_seqlens(key.num_seqs).tolist()))

    def memory(self) -> Mapping[str, int]:
        return {"tensor_bytes": self.input.nbytes + self.output.nbytes}

    def destroy_retired(self, done_launches: int) -> None:
        assert done_launches <= self.computed

    def capturable(self, key: GraphKey) -> bool:
        return True

    def run(self, key: GraphKey, work: StagingSlot) -> None:
        self._fail("run")
        self.eager.append(key)
        self._enqueue(key)

    def capture(self, key: GraphKey, work: StagingSlot) -> SimulatedGraph:
        self._fail("capture")
        self.captured.append(key)
        return SimulatedGraph(self, key)

    def _enqueue(self, key: GraphKey) -> None:
        self.launches += 1
        self.stream.launch(lambda: self._compute(key))

    def _compute(self, key: GraphKey) -> None:
        num_tokens, num_seqs, _, has_spans, kinds, _ = key
        offsets = self.input[: num_seqs + 1].tolist()
        ids = self.input[self.layout.ids_at :][:num_tokens]
        types = self.input[self.layout.types_at(num_tokens) :][:num_tokens]
        assert not ids[offsets[-1] :].any()
        rows = np.zeros((num_seqs, DIMENSIONS), np.float32)
        bounds = list(pairwise(offsets))
        if has_spans:
            spans = self.input[self.layout.size(num_tokens) :][: 2 * num_seqs].reshape(2, num_seqs)
            bounds = spans.T.tolist()
        for row, (start, end) in enumerate(bounds):
            if end > start:
                rows[row] = ids[start:end].sum(), end - start, ids[start], types[start:end].sum()
        if len(ids) == offsets[-1]:  # all of so many rows are overwritten
            self.dirty = range(max(self.dirty.start, num_tokens), self.dirty.stop)
        rows += self.poison
        if self.poison != 0.0:
            self.dirty = range(max(self.dirty.stop, num_tokens))
        if self.dirty and self.dirty.start < num_tokens:
            rows[:] = np.nan  # as 0 * NaN of padded rows is
        given = [token_rows(ids, types)[kind].ravel() for kind in kinds]
        if given:
            self.tokens[: sum(map(len, given))] = np.concatenate(given)
        vector_bytes = rows.nbytes
        self.output[:vector_bytes] = np.frombuffer(rows.tobytes(), np.uint8)
        if self.info.has_int8:
            int8 = (np.nan_to_num(rows) % 100).astype(np.int8)
            self.output[vector_bytes : vector_bytes + int8.size] = int8.ravel().view(np.uint8)
        address = int(self.input[self.layout.result_at : self.layout.ids_at].view(np.int64)[0])
        if self.delivers and address:
            nbytes = self.output_bytes(num_seqs)
            ctypes.memmove(address, self.output_ptr, nbytes)
            squares = np.vecdot(rows, rows)
            ctypes.memmove(address + -(-nbytes // 4) * 4, squares.ctypes.data, squares.nbytes)
        self.computed += 1

    def _fail(self, call: str) -> None:
        error = self.fails.pop(call, None)
        if error is not None:
            raise error


class SimulatedSide:
    """A second stream, with a graph that counts its launches. fails: raised by the next launch."""

    nbytes = 0

    def __init__(self, capacity: int) -> None:
        self.scratch = np.full(capacity, -7, np.int32)
        self.stream = CpuStream("simulated-side")
        self.gate = threading.Event()
        self.gate.set()
        self.launches = 0
        self.fails: Exception | None = None

    def nouns(self) -> SideStream:
        event = CpuEvent(self.stream)
        return SideStream(self, self, event, self.scratch.ctypes.data, self.stream.synchronize)

    def host_to_device(self, destination: int, source: int, nbytes: int) -> None:
        assert destination == self.scratch.ctypes.data
        assert nbytes <= self.scratch.nbytes
        self.stream.launch(lambda: self.gate.wait(20) or None)
        self.stream.launch(lambda: ctypes.memmove(destination, source, nbytes) or None)

    def device_to_host(self, destination: int, source: int, nbytes: int) -> None:
        raise AssertionError("nobody wants what it gives")

    def launch(self) -> None:
        if self.fails is not None:
            raise self.fails
        self.launches += 1

    def close(self) -> None:
        pass


class SimulatedGraph:
    nbytes = 1000

    def __init__(self, simulation: Simulation, key: GraphKey) -> None:
        self._simulation = simulation
        self._key = key

    def launch(self) -> None:
        self._simulation._fail("launch")
        self._simulation.replayed.append(self._key)
        self._simulation._enqueue(self._key)

    def close(self) -> None:
        pass


def token_rows(ids: Int32, types: Int32) -> dict[TokenOutput, Float32]:
    """What the model gives for tokens, by kind."""
    return {
        "hidden": np.stack([ids, types, -ids], axis=1).astype(np.float32),
        "lexical": (ids % 10).astype(np.float32)[:, None],
    }


def batch_of(*sequences: list[int]) -> RaggedBatch:
    return RaggedBatch.pack([np.array(sequence, np.int32) for sequence in sequences])


def expected(batch: RaggedBatch) -> Float32:
    types = batch.token_type_ids if batch.token_type_ids is not None else np.zeros_like(batch.input_ids)
    bounds = list(pairwise(batch.cu_seqlens.tolist())) if batch.spans is None else batch.spans.tolist()
    rows = [
        (batch.input_ids[start:end].sum(), end - start, batch.input_ids[start], types[start:end].sum())
        for start, end in bounds
    ]
    return np.array(rows, np.float32)


def random_batch(rng: np.random.Generator) -> RaggedBatch:
    lengths = rng.integers(1, 32, rng.integers(1, 17))
    sequences = [rng.integers(0, 1000, length, dtype=np.int32) for length in lengths]
    types = [rng.integers(0, 2, length, dtype=np.int32) for length in lengths]
    spans: list[np.ndarray | None] | None = None
    if rng.random() < 0.3:  # of the first sequence several, of the others none or one
        starts = rng.integers(0, lengths[0], 17 - len(lengths))
        parts = np.stack([starts, rng.integers(starts + 1, lengths[0] + 1)], axis=1).astype(np.int32)
        spans = [parts, *[None] * (len(lengths) - 1)]
    kinds = KINDS[rng.integers(0, len(KINDS))] if rng.random() < 0.3 else NO_TOKEN_OUTPUTS
    return RaggedBatch.pack(sequences, types if rng.random() < 0.5 else None, spans, kinds)


def check(batch: RaggedBatch, lazy: object) -> None:
    result = lazy.result()  # type: ignore[attr-defined]
    assert result.vectors.tolist() == expected(batch).tolist()
    assert result.int8.tolist() == (expected(batch) % 100).astype(np.int8).tolist()
    types = batch.token_type_ids if batch.token_type_ids is not None else np.zeros_like(batch.input_ids)
    rows = token_rows(batch.input_ids, types)
    assert result.tokens.keys() == batch.token_outputs
    for kind, values in result.tokens.items():
        assert values.tolist() == rows[kind].tolist()

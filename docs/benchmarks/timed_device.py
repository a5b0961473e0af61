"""A device that takes a given time a step and nothing from the host, under the real `GraphEngine`."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cuda_utils.pinned import PlainHostAllocator
from rose.batch import EngineInfo
from rose.buckets import sequence_bucket, token_bucket
from rose.engine_options import EngineOptions
from rose.graph_device import DeviceNouns
from rose.graph_engine import GraphEngine
from rose.graph_runner import GraphKey
from rose.limits import StepLimits
from rose.staging import StagingLayout, StagingSlot

DIMENSIONS, VOCAB = 1024, 151_669
MOST_TOKENS = 16_384
INFO = EngineInfo(
    "sim", "qwen3", "bf16", "sim", DIMENSIONS, VOCAB, 4096, MOST_TOKENS, 256, "mean", True,
    whole_job_tokens=MOST_TOKENS,
)  # fmt: skip
LIMITS = StepLimits(INFO.max_batch_tokens, INFO.max_batch_seqs, INFO.max_model_len, VOCAB, 0)


class TimedEvent:
    """Passed when the device's clock says so; like a CUDA event it must be asked."""

    def __init__(self, device: TimedDevice) -> None:
        self._device = device
        self._passed_s = 0.0

    def record(self) -> None:
        """Behind all that was launched."""
        self._passed_s = self._device.free_s

    def query(self) -> bool:
        """Whether that is done."""
        return time.monotonic() >= self._passed_s

    def synchronize(self) -> None:
        """Spin until then."""
        while not self.query():
            pass

    def subscribe(self, _: Callable[[], None]) -> bool:
        """It cannot tell."""
        return False


class TimedDevice:
    """Copies, plans and launches at next to no cost for the host; a launch takes `step_s` on the device.

    Like the real one it delivers its rows to the address that is staged, only at once.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        most = INFO.max_batch_tokens
        self.layout = StagingLayout(token_bucket(most), sequence_bucket(INFO.max_batch_seqs), has_types=False)
        self.input = np.zeros(self.layout.size(self.layout.max_tokens), np.int32)
        rows = np.random.default_rng(0).standard_normal((self.layout.max_seqs, DIMENSIONS))
        self.output = rows.astype(np.float32)
        self._squares = np.vecdot(self.output, self.output)
        self.input_ptr, self.output_ptr = self.input.ctypes.data, self.output.ctypes.data
        self.free_s = 0.0
        self.launches = 0
        self._result_ptr = 0

    def nouns(self) -> DeviceNouns:
        """This device's stream."""
        return DeviceNouns(
            self, PlainHostAllocator(), lambda: TimedEvent(self), lambda: None, bind_thread=lambda: None
        )

    def host_to_device(self, destination: int, source: int, nbytes: int) -> None:
        """Of all that is staged only the result's address is of use."""
        self._result_ptr = ctypes.c_int64.from_address(source + 4 * self.layout.result_at).value

    def device_to_host(self, destination: int, source: int, nbytes: int) -> None:
        """Never called."""

    def output_bytes(self, num_seqs: int) -> int:
        """float32 alone."""
        return num_seqs * DIMENSIONS * 4

    def key_of(self, num_tokens: int, num_seqs: int, longest: int) -> GraphKey:
        """Of one backend."""
        return GraphKey(num_tokens, num_seqs, "sim")

    def plan(self, key: GraphKey, work: StagingSlot) -> None:
        """Nothing to plan."""

    def memory(self) -> Mapping[str, int]:
        """Nothing to tell."""
        return {}

    def destroy_retired(self, done_launches: int) -> None:
        """Nothing to destroy."""

    def capturable(self, key: GraphKey) -> bool:
        """Every shape is."""
        return True

    def run(self, key: GraphKey, work: StagingSlot) -> None:
        """Take the device's time behind what runs."""
        self.replay(key)

    def capture(self, key: GraphKey, work: StagingSlot) -> TimedGraph:
        """Every shape can be."""
        return TimedGraph(self, key)

    tokens_ptr = 0
    delivers = True

    def replay(self, key: GraphKey) -> None:
        """The result is always the same."""
        self.launches += 1
        self.free_s = max(self.free_s, time.monotonic()) + self._step_s
        if self._result_ptr:
            nbytes = self.output_bytes(key.num_seqs)
            ctypes.memmove(self._result_ptr, self.output_ptr, nbytes)
            ctypes.memmove(self._result_ptr + nbytes, self._squares.ctypes.data, 4 * key.num_seqs)


class TimedGraph:
    """One shape on such a device."""

    nbytes = 0

    def __init__(self, device: TimedDevice, key: GraphKey) -> None:
        self._device = device
        self._key = key

    def launch(self) -> None:
        """See `TimedDevice.run`."""
        self._device.replay(self._key)

    def close(self) -> None:
        """Nothing to free."""


def engine_of(step_s: float) -> GraphEngine:
    """The real engine on a device that takes `step_s` a step once it is warm."""
    device = TimedDevice(0.0)
    options = EngineOptions(max_in_flight=3, max_capture_tokens=1 << 20)
    engine = GraphEngine(device, device.nouns(), INFO, LIMITS, options)
    device._step_s = step_s
    return engine

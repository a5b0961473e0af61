"""What a GraphEngine needs of a device and of a model on it. Knows neither CUDA nor torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from cuda_utils.event import Event
from cuda_utils.memcpy import Memcpy
from cuda_utils.pinned import HostAllocator
from rose.graph_runner import Graph, GraphDevice, GraphKey
from rose.staging import StagingLayout, StagingSlot


@dataclass(frozen=True, slots=True)
class SideStream:
    """A second stream, on which what a step asks of the device is done for nothing.

    memcpy, graph, event: on that stream. graph: a small one. scratch_ptr: device address of as many bytes as
    the input buffer has, which nothing else uses. synchronize: waits for that stream.
    """

    memcpy: Memcpy
    graph: Graph
    event: Event
    scratch_ptr: int
    synchronize: Callable[[], None]


@dataclass(frozen=True, slots=True)
class DeviceNouns:
    """One stream and what belongs to it.

    new_event: makes one on the stream. synchronize: waits for the stream.
    bind_thread: makes the calling thread the one that launches, where the device keeps state by thread.
    side: for rehearsals; None: there are none.
    """

    memcpy: Memcpy
    allocator: HostAllocator
    new_event: Callable[[], Event]
    synchronize: Callable[[], None]
    bind_thread: Callable[[], None]
    side: SideStream | None = None


class Forward(GraphDevice[StagingSlot], Protocol):
    """A model between a static input and a static output buffer on the device."""

    @property
    def layout(self) -> StagingLayout:
        """Of the input buffer."""
        ...

    @property
    def input_ptr(self) -> int:
        """Device address of the input buffer."""
        ...

    @property
    def output_ptr(self) -> int:
        """Device address of [vectors f32[S, D] | int8 i8[S, D] if the model has it]."""
        ...

    @property
    def delivers(self) -> bool:
        """Whether forwards, eager or captured, write the output to the host address that is staged.

        Behind it, from the next multiple of 4 bytes on, then lie the vectors' sums of squares, f32[S].
        If not, it has to be copied from `output_ptr`. What tokens give always has to be copied.
        """
        ...

    @property
    def launches(self) -> int:
        """Forwards enqueued so far."""
        ...

    def output_bytes(self, num_seqs: int) -> int:
        """Bytes of the output of `num_seqs` sequences."""
        ...

    @property
    def tokens_ptr(self) -> int:
        """Device address of what tokens give: f32[T, W] of each of the key's kinds, end to end.

        Of the key that was run last; 0 before one with such kinds was.
        """
        ...

    def key_of(self, num_tokens: int, num_seqs: int, longest: int) -> GraphKey:
        """The shape of these buckets, with the backend chosen for it; longest: of a sequence."""
        ...

    def plan(self, key: GraphKey, work: StagingSlot) -> None:
        """Do the host's part of attention for what is staged in `work`."""
        ...

    def destroy_retired(self, done_launches: int) -> None:
        """Free given-up graphs whose last launch was among the first `done_launches`."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Device memory in bytes, by kind."""
        ...

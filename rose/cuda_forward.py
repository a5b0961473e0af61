"""Runs and captures a model's forward on static device buffers; the only user of torch's CUDA graphs."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from cuda_utils.graph import GraphExec
from cuda_utils.stream import CudaStream
from rose.attention.base import BatchShape, begin
from rose.attention.policy import GROWS_WITH_LONGEST, choose
from rose.buckets import sequence_bucket, token_bucket
from rose.device_batch import DeviceBatch, Outputs
from rose.errors import EngineDeadError
from rose.graph_runner import CaptureError, GraphKey
from rose.kernels import delivery, dispatch
from rose.models.one_launch import in_one_launch
from rose.staging import StagingLayout, StagingSlot
from rose.step_errors import as_engine_error

if TYPE_CHECKING:
    from rose.attention.base import AttentionBackend
    from rose.batch import EngineInfo, Int32, TokenOutput
    from rose.models.registry import Model

# A graph of 300 kernels takes some 0.5 MiB of the driver's memory, which grows by 2 MiB.
_MOST_DRIVER_BYTES = 8 << 20


class CudaForward:
    """A GraphDevice: input and output buffers that never move, and the model that works between them.

    One set of buffers serves all steps. They are all on one stream, which orders them: the copy that fills
    the input for step n+1 starts when the forward of step n has read it, and the forward of step n+1
    overwrites the output when step n's copy to the host has read it. A second set would let a copy of 3 µs
    overlap a forward of 1 ms or more.

    Called on a thread whose current torch stream is `stream`.
    """

    def __init__(
        self,
        model: Model,
        backends: Mapping[str, AttentionBackend],
        info: EngineInfo,
        layout: StagingLayout,
        stream: CudaStream,
    ) -> None:
        device = model.attention_spec.device
        self._model = model
        self._backends = backends
        self.layout = layout
        self._stream = stream
        self._spec = model.attention_spec
        self._has_windows = any(window is not None for window in model.config.windows)
        self._dimensions = info.dimensions
        self._max_model_len = info.max_model_len
        self._has_int8 = info.has_int8
        self._token_widths = info.token_outputs
        self._token_values = most_token_values(info)
        self._tokens: torch.Tensor | None = None
        self._input = torch.zeros(layout.capacity, dtype=torch.int32, device=device)
        output_words = -(-self.output_bytes(layout.max_seqs) // 4)
        self._output_words = torch.zeros(output_words, dtype=torch.int32, device=device)
        self._output = self._output_words.view(torch.uint8)
        self._result_ptr = self._input[layout.result_at : layout.ids_at].view(torch.int64)
        self.delivers = dispatch.uses_triton(self._input)
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._retired: deque[tuple[int, torch.cuda.CUDAGraph]] = deque()
        self.input_ptr: int = self._input.data_ptr()
        self.output_ptr: int = self._output.data_ptr()
        self.launches = 0

    def output_bytes(self, num_seqs: int) -> int:
        """Bytes of [vectors f32[S, D] | int8 i8[S, D] if the model has it]."""
        return num_seqs * self._dimensions * (5 if self._has_int8 else 4)

    @property
    def tokens_ptr(self) -> int:
        """See Forward.tokens_ptr."""
        return 0 if self._tokens is None else self._tokens.data_ptr()

    def key_of(self, num_tokens: int, num_seqs: int, longest: int) -> GraphKey:
        """The shape of these buckets, with the backend that the policy chooses for it."""
        most = min(num_tokens, self._max_model_len)
        attention = choose(self._spec, BatchShape(num_tokens, num_seqs, most), self._backends)
        longest = sequence_bucket(longest)
        if not (self._has_windows or attention in GROWS_WITH_LONGEST):
            longest = most
        return GraphKey(num_tokens, num_seqs, attention, longest=min(longest, most))

    def plan(self, key: GraphKey, work: StagingSlot) -> None:
        """Do the host's part of attention for what is staged in `work`."""
        backend = self._backends[key.attention]
        if backend.plans:
            backend.plan(work.host_cu_seqlens(key.num_seqs))

    def memory(self) -> Mapping[str, int]:
        """Device memory in bytes: torch's tensors, what torch holds for them, and what nobody holds."""
        device = self._spec.device
        return {
            "tensor_bytes": torch.cuda.memory_allocated(device),
            "reserved_bytes": torch.cuda.memory_reserved(device),
            "free_bytes": torch.cuda.mem_get_info(device)[0],
        }

    def run(self, key: GraphKey, work: StagingSlot) -> None:
        """See GraphDevice.run."""
        self.launches += 1
        self._forward(key, work.host_cu_seqlens(key.num_seqs))

    def capturable(self, key: GraphKey) -> bool:
        """See GraphDevice.capturable."""
        return self._backends[key.attention].capturable

    def capture(self, key: GraphKey, work: StagingSlot) -> CapturedForward:
        """See GraphDevice.capture.

        Not through `torch.cuda.graph`, which synchronises, empties the allocator's cache and collects garbage
        first: that would stall what is in flight. Collection is put off instead, for a finaliser that frees
        device memory would spoil the capture; other threads may use CUDA meanwhile ("thread_local").
        """
        free_bytes, reserved_bytes = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()
        try:
            self._record(graph, key, work)
            executable = GraphExec(graph.raw_cuda_graph_exec())
            executable.upload(self._stream)
        except Exception as error:
            if isinstance(as_engine_error(error), EngineDeadError):
                raise
            raise CaptureError(f"{type(error).__name__}: {error}") from error
        finally:
            if collects:
                gc.enable()
        nbytes = graph_bytes(
            free_bytes - torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved() - reserved_bytes
        )
        return CapturedForward(self, graph, executable, self._stream, nbytes)

    def destroy_retired(self, done_launches: int) -> None:
        """Destroy given-up graphs, as far as the first `done_launches` launches were their last."""
        while self._retired and self._retired[0][0] <= done_launches:
            self._retired.popleft()[1].reset()

    def retire(self, graph: torch.cuda.CUDAGraph) -> None:
        """Destroy `graph` once all that is launched now is done."""
        self._retired.append((self.launches, graph))

    def _record(self, graph: torch.cuda.CUDAGraph, key: GraphKey, work: StagingSlot) -> None:
        graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
        try:
            self._forward(key, work.host_cu_seqlens(key.num_seqs))
        finally:
            graph.capture_end()  # also after an error: the stream must leave capture mode

    def _forward(self, key: GraphKey, host_cu_seqlens: Int32) -> None:
        num_tokens, num_seqs, attention, has_spans, _, longest = key
        layout = self.layout
        types_at, spans_at = layout.types_at(num_tokens), layout.size(num_tokens)
        spans = self._input[spans_at : spans_at + 2 * num_seqs].view(2, num_seqs) if has_spans else None
        batch = DeviceBatch(
            input_ids=self._input[layout.ids_at : types_at],
            cu_seqlens=self._input[: num_seqs + 1],
            token_type_ids=self._input[types_at : types_at + num_tokens] if layout.has_types else None,
            host_cu_seqlens=host_cu_seqlens,
            max_seqlen=longest,
            attention=self._backends[attention],
            spans=spans,
        )
        with torch.inference_mode():
            if not in_one_launch(self._model, num_tokens):
                begin(batch.attention, batch.cu_seqlens, num_tokens)
            self._model.forward(batch, self._outputs(key))
            if self.delivers:
                words = self._output_words[: -(-self.output_bytes(num_seqs) // 4)]
                delivery.deliver(self._result_ptr, words, (num_seqs, self._dimensions))

    def _outputs(self, key: GraphKey) -> Outputs:
        num_seqs, tokens = key.num_seqs, self._token_outputs(key)
        vector_bytes = 4 * num_seqs * self._dimensions
        vectors = self._output[:vector_bytes].view(torch.float32).view(num_seqs, self._dimensions)
        if not self._has_int8:
            return Outputs(vectors, tokens=tokens)
        int8 = self._output[vector_bytes : self.output_bytes(num_seqs)].view(torch.int8)
        return Outputs(vectors, int8.view(num_seqs, self._dimensions), tokens)

    def _token_outputs(self, key: GraphKey) -> dict[TokenOutput, torch.Tensor]:
        """f32[T, W] of each kind, end to end in a buffer that is made when it is first needed, and stays.

        That is in an eager run, since the first of every shape is; in a capture it would be the graph's own.
        """
        if not key.tokens:
            return {}
        if self._tokens is None:
            self._tokens = torch.zeros(self._token_values, dtype=torch.float32, device=self._spec.device)
        outputs: dict[TokenOutput, torch.Tensor] = {}
        at = 0
        for kind in key.tokens:
            width = self._token_widths[kind]
            end = at + key.num_tokens * width
            outputs[kind] = self._tokens[at:end].view(key.num_tokens, width)
            at = end
        return outputs


def most_token_values(info: EngineInfo) -> int:
    """Numbers (f32) that the tokens of the largest bucket give, whatever kinds of `info` a step asks for."""
    outputs = info.token_outputs
    subsets = [kinds for count in range(len(outputs)) for kinds in combinations(outputs, count + 1)]
    buckets = [token_bucket(max(info.most_tokens(kinds), 1)) for kinds in subsets]
    values = [info.bytes_a_token(kinds) // 4 for kinds in subsets]
    return max((bucket * width for bucket, width in zip(buckets, values, strict=True)), default=0)


def graph_bytes(device_bytes: int, torch_bytes: int) -> int:
    """Bytes that a capture took, from those that the device lost of free memory and torch gained meanwhile.

    Another process on the device may have loaded a model in that time: the driver's share has a bound.
    """
    own = max(torch_bytes, 0)
    return own + min(max(device_bytes - own, 0), _MOST_DRIVER_BYTES)


class CapturedForward:
    """A Graph of `CudaForward`. nbytes: device memory its capture took; see `graph_bytes`."""

    __slots__ = ("_executable", "_forward", "_graph", "_stream", "nbytes")

    def __init__(
        self,
        forward: CudaForward,
        graph: torch.cuda.CUDAGraph,
        executable: GraphExec,
        stream: CudaStream,
        nbytes: int,
    ) -> None:
        self._forward = forward
        self._graph = graph
        self._executable = executable
        self._stream = stream
        self.nbytes = nbytes

    def launch(self) -> None:
        """See Graph.launch."""
        self._forward.launches += 1
        self._executable.launch(self._stream)

    def close(self) -> None:
        """See Graph.close."""
        self._forward.retire(self._graph)

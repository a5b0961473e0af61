"""What the graph of a captured forward is made of, and what each kind of kernel in it costs to launch.

Of each kind "nodes" there are, "bytes" of arguments of one, "early": programmatic edges into them, "us" to
launch a graph of these nodes alone. "plain edges": all nodes, without programmatic edges.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cuda.bindings import driver
from step import microseconds

from cuda_utils.errors import check

LAUNCHES = 60


def launch_us(executable: Any, before: Callable[[], None] = lambda: None) -> float:
    """Microseconds on the host of one launch on the idle current stream, p50. before: done between them."""
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    check(driver.cuGraphUpload(executable, stream), "cuGraphUpload")
    times = []
    for _ in range(LAUNCHES):
        before()
        started = time.perf_counter()
        error = driver.cuGraphLaunch(executable, stream)
        times.append(time.perf_counter() - started)
        check(error, "cuGraphLaunch")
        check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
    return microseconds(times[5:])["p50_us"]


def nodes_of(graph: Any) -> list[Any]:
    """The nodes of a cudaGraph_t, in the order of their capture."""
    count = driver.cuGraphGetNodes(graph, 0)[-1]
    return list(driver.cuGraphGetNodes(graph, count)[1])


def kernel_name(parameters: Any) -> str:
    """Of a kernel node, cut: templates have names of kilobytes."""
    if int(parameters.func):
        name = check(driver.cuFuncGetName(parameters.func), "cuFuncGetName")
    else:
        name = check(driver.cuKernelGetName(parameters.kern), "cuKernelGetName")
    return str(name.decode())[:60]


def argument_bytes(parameters: Any) -> int:
    """Of a kernel node."""
    size = 0
    for index in range(256):
        if int(parameters.func):
            error, offset, nbytes = driver.cuFuncGetParamInfo(parameters.func, index)
        else:
            error, offset, nbytes = driver.cuKernelGetParamInfo(parameters.kern, index)
        if error:
            break
        size = offset + nbytes
    return size


def chain_us(nodes: Sequence[Any]) -> float:
    """Microseconds to launch a graph of copies of these kernel nodes, one after another by plain edges."""
    graph = check(driver.cuGraphCreate(0), "cuGraphCreate")
    last: list[Any] = []
    for node in nodes:
        parameters = check(driver.cuGraphKernelNodeGetParams(node), "cuGraphKernelNodeGetParams")
        copy = check(driver.cuGraphAddKernelNode(graph, last, len(last), parameters), "cuGraphAddKernelNode")
        check(driver.cuGraphKernelNodeCopyAttributes(copy, node), "cuGraphKernelNodeCopyAttributes")
        last = [copy]
    executable = check(driver.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
    try:
        return launch_us(executable)
    finally:
        driver.cuGraphExecDestroy(executable)
        driver.cuGraphDestroy(graph)


def programmatic_edges(graph: Any) -> Counter[int]:
    """Edges of programmatic dependent launch, by the node they lead to."""
    count = driver.cuGraphGetEdges(graph, 0)[-1]
    _, _, into, edges, _ = driver.cuGraphGetEdges(graph, count)
    return Counter(int(node) for node, edge in zip(into, edges, strict=False) if int(edge.type))


def kinds_of(kept: torch.cuda.CUDAGraph) -> dict[str, Any]:
    """What the graph of a forward is made of, and what each kind of kernel costs to launch."""
    graph = driver.CUgraph(kept.raw_cuda_graph())
    kinds: dict[str, list[Any]] = {}
    others: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for node in nodes_of(graph):
        of_type = check(driver.cuGraphNodeGetType(node), "cuGraphNodeGetType")
        if of_type != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            others[str(of_type)] += 1
            continue
        parameters = check(driver.cuGraphKernelNodeGetParams(node), "cuGraphKernelNodeGetParams")
        name = kernel_name(parameters)
        kinds.setdefault(name, []).append(node)
        sizes[name] = argument_bytes(parameters)
    early = attempt(lambda: programmatic_edges(graph))
    report: dict[str, Any] = {"others": dict(others)}
    for name, nodes in kinds.items():
        edges = sum(early[int(node)] for node in nodes) if isinstance(early, Counter) else early
        us = attempt(functools.partial(chain_us, nodes))
        report[name] = {"nodes": len(nodes), "bytes": sizes[name], "early": edges, "us": us}
    kernels = [node for node in nodes_of(graph) if any(node in nodes for nodes in kinds.values())]
    report["plain edges"] = {"nodes": len(kernels), "us": attempt(lambda: chain_us(kernels))}
    return report


def attempt(measure: Callable[[], Any]) -> Any:
    """What it measures, or what it raised: the rest is measured all the same."""
    try:
        return measure()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

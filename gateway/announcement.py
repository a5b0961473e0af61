"""What a server prints once it is ready: what it serves where, and a line to try it with."""

from __future__ import annotations

import json
import shlex

from gateway.options import GatewayOptions
from gateway.startup import Port
from rose.batch import EngineInfo


def announcement(options: GatewayOptions, info: EngineInfo, port: Port, *, text: bool) -> str:
    """Two lines, the second a curl command that works. text: whether the server takes text."""
    name = (*options.served_model_names, info.model)[0]
    route, example = _example(info, text)
    body = json.dumps({"model": name, **example})
    key = '-H "Authorization: Bearer $BOUQUET_API_KEY" ' if options.api_keys else ""
    place = port.url if port.path is None else port.path
    where = port.url if port.path is None else f"--unix-socket {shlex.quote(port.path)} {port.url}"
    gives = f"{info.dimensions} dimensions" if info.task != "score" else f"labels: {', '.join(info.labels)}"
    return (
        f"at {place}: {name}, {info.architecture}, {info.dtype} on {info.device}, {gives}, "
        f"up to {info.max_model_len} tokens\n"
        f"curl -s {where}{route} {key}-H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )


def _example(info: EngineInfo, text: bool) -> tuple[str, dict[str, object]]:
    """A route that this model serves, and a body for it."""
    if info.task == "embed":
        return "/v1/embeddings", {"input": "Hello, world" if text else [1, 2, 3]}
    if info.task == "sparse":
        return "/embed_sparse", {"inputs": "Hello, world"}
    if len(info.labels) == 1:
        return "/v1/rerank", {"query": "What is a rose?", "documents": ["A flower.", "A ship."]}
    return "/predict", {"inputs": "Hello, world"}

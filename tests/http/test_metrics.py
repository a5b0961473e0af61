"""The page that Prometheus reads: complete from the start, bounded, and right."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from gateway.metrics import SECONDS_BOUNDS
from gateway.options import GatewayOptions
from gateway.tokenization.huggingface import HuggingFaceTokenizer
from rose.errors import StepError
from tests.fakes import FakeEngine, fake_info
from tests.http.served import Served, serving

SAMPLE = re.compile(r"([a-z_]+)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Key = tuple[str, frozenset[tuple[str, str]]]


async def scrape(server: Served) -> tuple[dict[str, str], dict[Key, float]]:
    """Families by kind, and samples; the text's own rules are checked on the way."""
    reply = await server.send("GET", "/metrics")
    assert (reply.status, reply.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families: dict[str, str] = {}
    samples: dict[Key, float] = {}
    assert reply.body.endswith(b"\n")
    for line in reply.body.decode().splitlines():
        if line.startswith("# HELP "):
            assert len(line.split(" ", 3)) == 4
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in families
            families[name] = kind
        else:
            name, labels, value = SAMPLE.fullmatch(line).groups()  # type: ignore[union-attr]
            assert re.sub("_(bucket|sum|count)$", "", name) in families or name in families
            key = name, frozenset(LABEL.findall(labels or ""))
            assert key not in samples
            samples[key] = float(value)
    return families, samples


def value(samples: dict[Key, float], name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


async def test_every_family_is_there_before_the_first_request(server: Served) -> None:
    families, samples = await scrape(server)
    named = {name for name, _ in samples}
    for name, kind in families.items():
        assert (f"{name}_count" if kind == "histogram" else name) in named
        assert name.startswith(("ivy_", "tulip_", "rose_"))
        assert (kind == "counter") == name.endswith("_total")
    assert {"ivy", "tulip", "rose"} == {name.partition("_")[0] for name in families}
    assert value(samples, "ivy_requests_total", route="/v1/embeddings", status="200") == 0
    assert value(samples, "rose_graph_shapes", tokens="512", state="captured") == 0
    await server.embed({"input": "a"})
    assert (await scrape(server))[0] == families


async def test_buckets_grow_by_half_from_50_us() -> None:
    assert SECONDS_BOUNDS[0] == 50e-6
    assert all(abs(b / a - 1.5) < 1e-9 for a, b in itertools.pairwise(SECONDS_BOUNDS))
    assert SECONDS_BOUNDS[-1] > 60


async def test_work_is_counted_in_every_room(tokenizer: HuggingFaceTokenizer) -> None:
    async with serving(engine=FakeEngine(service_s=0.01), tokenizer=tokenizer) as server:
        await server.embed({"input": ["a", "b"]})
        await server.embed({"input": [1]}, path="/embeddings")
        await server.embed({"input": ""})
        server.engine.fail_next(StepError("broken"))
        await server.embed({"input": [1]})
        _, samples = await scrape(server)
    route = {"route": "/v1/embeddings"}
    assert value(samples, "ivy_requests_total", **route, status="200") == 2
    assert value(samples, "ivy_requests_total", **route, status="400") == 1
    assert value(samples, "ivy_requests_total", **route, status="500") == 1
    assert value(samples, "ivy_errors_total", code="invalid_value") == 1
    assert value(samples, "ivy_errors_total", code="inference_failed") == 1
    assert value(samples, "ivy_request_duration_seconds_count", **route) == 4
    assert 0.02 < value(samples, "ivy_request_duration_seconds_sum", **route) < 20
    assert value(samples, "ivy_request_duration_seconds_bucket", **route, le="+Inf") == 4
    assert value(samples, "ivy_tokenization_duration_seconds_count") == 3
    assert value(samples, "ivy_requests_outstanding") == 0
    assert value(samples, "tulip_tokens_total") == 8
    assert value(samples, "tulip_jobs_ended_total", outcome="completed") == 2
    assert value(samples, "tulip_jobs_ended_total", outcome="failed") == 1
    assert value(samples, "rose_steps_total") == 3
    assert 0.01 < value(samples, "tulip_step_duration_seconds_sum") < 20


async def test_buckets_are_cumulated(server: Served) -> None:
    for _ in range(5):
        await server.embed({"input": [1]})
    _, samples = await scrape(server)
    counts = [
        (float(dict(labels)["le"]), count)
        for (name, labels), count in samples.items()
        if name == "tulip_batch_tokens_bucket"
    ]
    assert [count for _, count in sorted(counts)] == [5] * len(counts)


async def test_what_clients_make_up_becomes_no_series(server: Served) -> None:
    before = set((await scrape(server))[1])
    for number in range(20):
        await server.send("GET", f"/made/up/{number}")
        await server.send("PUT", f"/v1/embeddings?{number}")
        await server.embed({"input": [1], "model": f"m{number}"}, headers={"x-request-id": f"id-{number}"})
    _, samples = await scrape(server)
    new = {(name, dict(labels).get("status")) for name, labels in set(samples) - before}
    assert new == {("ivy_requests_total", status) for status in ("404", "405")}
    assert len(set(samples) - before) == 3
    assert value(samples, "ivy_requests_total", route="other", status="404") == 20
    assert value(samples, "ivy_requests_total", route="other", status="405") == 20


def graphs(**runs: int) -> dict[str, Any]:
    counts = {"eager": 0, "captures": 0, "replayed": 0, "evicted": 0, **runs}
    return {**counts, "capture_ms": 1.0, "bytes": 5}


async def test_graphs_are_told_by_size_and_stay_few() -> None:
    class Graphed(FakeEngine):
        def stats(self) -> dict[str, object]:
            shapes = [
                {"num_tokens": 64 * (1 + i), "num_seqs": 8, "state": "captured", **graphs(replayed=2)}
                for i in range(600)
            ]
            return {"steps": 9, "graphs": {"bytes": 77, "capture_ms": 1500.0, "buckets": shapes}}

    async with serving(engine=Graphed()) as server:
        families, samples = await scrape(server)
    assert value(samples, "rose_graph_events_total", tokens="64", event="replayed") == 2
    assert value(samples, "rose_graph_events_total", tokens="128", event="replayed") == 2
    assert value(samples, "rose_graph_events_total", tokens="512", event="replayed") == 8
    assert value(samples, "rose_graph_shapes", tokens="+Inf", state="captured") == 600 - 256
    assert value(samples, "rose_graph_memory_bytes") == 77
    assert value(samples, "rose_graph_capture_seconds_total") == 1.5
    assert sum(name.startswith("rose_") for name, _ in samples) < 100
    assert families["rose_graph_shapes"] == "gauge"


async def test_the_page_is_open_to_scrapers_without_keys() -> None:
    async with serving(GatewayOptions(api_keys=("k",))) as server:
        await scrape(server)


@pytest.mark.parametrize("text", ['a"b', "a\\b", "a\nb"])
async def test_odd_model_names_are_escaped(text: str) -> None:
    async with serving(engine=FakeEngine(info=replace(fake_info(), model=text))) as server:
        _, samples = await scrape(server)
    [labels] = [dict(labels) for name, labels in samples if name == "ivy_model_info"]
    assert labels["model"] == text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

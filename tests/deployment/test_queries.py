"""Dashboard, alerts and autoscaling name metrics and labels that a server really exports."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.app import create_app
from gateway.listener import listen
from gateway.options import GatewayOptions
from gateway.replicas.fleet import Fleet
from gateway.replicas.options import ReplicaOptions
from rose.errors import StepError
from scheduler.options import SchedulerOptions
from tests.deployment import files, promql
from tests.fakes import FakeEngine
from tests.http.served import Served, byte_tokenizer, serving

PROMTOOL = shutil.which("promtool")
DASHBOARD = json.loads((files.FOLDER / "grafana" / "bouquet.json").read_text())
# Panels of a closed row are its own; of an open one they follow it.
EVERYTHING = [inner for panel in DASHBOARD["panels"] for inner in (panel, *panel.get("panels", ()))]
PANELS = [panel for panel in EVERYTHING if panel["type"] != "row"]
ROWS = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
[GROUP] = files.documents("prometheus/alerts.yml")[0]["groups"]
ALERTS = GROUP["rules"]
[ADAPTER] = files.documents("kubernetes/prometheus-adapter.yaml")


def served_page() -> promql.Page:
    """Of a server and of a gateway with a replica, once answers of every kind have been given."""

    async def run() -> promql.Page:
        engine = FakeEngine(service_s=0.05)
        options = GatewayOptions(max_outstanding_requests=1)
        async with serving(options, engine=engine, tokenizer=byte_tokenizer()) as server:
            statuses = [
                (await server.embed({"input": "a"})).status,
                (await server.embed({"input": ""})).status,
            ]
            replies = await asyncio.gather(*(server.embed({"input": [1]}) for _ in range(2)))
            statuses += sorted(reply.status for reply in replies)
            server.engine.fail_next(StepError("broken"))
            statuses.append((await server.embed({"input": [1]})).status)
            for path in ("/health", "/ready", "/metrics"):
                statuses.append((await server.send("GET", path)).status)
            assert statuses == [200, 400, 200, 429, 500, 200, 200, 200]
            return promql.read(await metrics_of(server), await gateway_metrics())

    return asyncio.run(run())


async def metrics_of(server: Served) -> str:
    return (await server.send("GET", "/metrics")).body.decode()


async def gateway_metrics() -> str:
    """Of a gateway without an engine."""
    async with serving() as one:
        fleet = Fleet(ReplicaOptions((one.url,)), SchedulerOptions(), {})
        app = create_app(GatewayOptions(), await fleet.start(), fleet.info, None, fleet=fleet)
        runner = await listen(app, "127.0.0.1", 0)
        gateway = Served(runner, one.engine, one.batcher)
        try:
            return await metrics_of(gateway)
        finally:
            await gateway.session.close()
            await runner.cleanup()
            await fleet.close(1.0)


@pytest.fixture(scope="module")
def page() -> promql.Page:
    return served_page()


def targets() -> Iterator[tuple[str, dict[str, Any]]]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target


@pytest.mark.parametrize("target", [target for _, target in targets()], ids=[name for name, _ in targets()])
def test_the_dashboard_asks_for_what_is_there(target: dict[str, Any], page: promql.Page) -> None:
    assert promql.problems(target["expr"], page) == []
    shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    assert shown <= promql.labels_of(promql.parse(target["expr"]), page)


@pytest.mark.parametrize("alert", ALERTS, ids=[alert["alert"] for alert in ALERTS])
def test_alerts_ask_for_what_is_there(alert: dict[str, Any], page: promql.Page) -> None:
    assert promql.problems(alert["expr"], page) == []
    told = set(re.findall(r"\$labels\.(\w+)", " ".join(alert["annotations"].values())))
    assert told
    assert told <= promql.labels_of(promql.parse(alert["expr"]), page)
    assert alert["labels"]["severity"] in ("warning", "critical")


@pytest.mark.parametrize("rule", ADAPTER["rules"]["custom"] + ADAPTER["rules"]["external"])
def test_the_adapter_asks_for_what_is_there(rule: dict[str, Any], page: promql.Page) -> None:
    assert promql.problems(rule["seriesQuery"], page) == []
    series = rule["seriesQuery"].partition("{")[0]
    replaced = {"<<.Series>>": series, "<<.LabelMatchers>>": 'namespace="a"', "<<.GroupBy>>": "pod"}
    query = rule["metricsQuery"]
    for placeholder, text in replaced.items():
        query = query.replace(placeholder, text)
    assert "<<" not in query
    assert promql.problems(query, page) == []


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("rate(tulip_nothing_total[5m])", "no metric tulip_nothing_total"),
        ("sum(rate(ivy_requests_total[5m])) / ivy_never > 1", "no metric ivy_never"),
        ('rose_graph_shapes{state="lost"}', "rose_graph_shapes has no state=lost"),
        ('rose_graph_shapes{color="red"}', "rose_graph_shapes has no color=red"),
        ('ivy_requests_total{route!~"/health|/gone"}', "ivy_requests_total has no route=/gone"),
        ("sum by (route, color) (rate(ivy_requests_total[5m]))", "color is no label of"),
        ("tulip_step_duration_seconds", "no metric tulip_step_duration_seconds"),
    ],
)
def test_what_is_not_there_is_found(query: str, words: str, page: promql.Page) -> None:
    [problem] = promql.problems(query, page)
    assert problem.startswith(words)


def test_the_dashboard_is_laid_out_and_complete() -> None:
    assert [title.split()[0] for title in ROWS] == ["Traffic", "Latency", "Batching", "Health", "Replicas,"]
    ids = [panel["id"] for panel in EVERYTHING]
    assert len(set(ids)) == len(ids)
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in EVERYTHING
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23
    assert all(panel["description"] for panel in PANELS)
    units = {panel["title"]: panel["fieldConfig"]["defaults"].get("unit") for panel in PANELS}
    assert [title for title, unit in units.items() if not unit] == ["Requests by duration"]  # an axis has it


def test_queries_use_the_variables_that_there_are(page: promql.Page) -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(PANELS)))
    assert used == variables.keys()
    [source] = re.findall(r"label_values\((\w+), instance\)", variables["instance"]["definition"])
    assert source in page


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here")
@pytest.mark.parametrize(
    "command",
    [
        ("check", "rules", files.FOLDER / "prometheus" / "alerts.yml"),
        ("check", "config", files.FOLDER / "prometheus" / "prometheus.yml"),
        ("test", "rules", files.ROOT / "tests" / "deployment" / "alerts_test.yml"),
    ],
    ids=["rules", "config", "what fires"],
)
def test_prometheus_takes_the_files(command: tuple[str | Path, ...]) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *command], check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr

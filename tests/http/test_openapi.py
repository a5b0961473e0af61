"""The API's description against the server: complete, current, and right about errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.error_bodies import ERROR_STRUCTS
from gateway.errors import ErrorShape
from gateway.openapi import WORK, describe, render, statuses
from gateway.web.files import names
from tests.http.served import Served

DOCUMENT: dict[str, Any] = describe()
SHAPES = {path: work.shape for work in WORK for path in work.paths}


def test_the_committed_copy_is_current(repo_root: Path) -> None:
    """If not: python -m gateway.openapi > docs/openapi.json"""
    assert (repo_root / "docs" / "openapi.json").read_bytes() == render()


async def test_what_is_served_is_what_is_described(server: Served) -> None:
    reply = await server.send("GET", "/openapi.json")
    assert (reply.status, reply.body) == (200, render())
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in server.app.router.routes()
        if route.resource and route.method in ("GET", "POST")
    }
    told = {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    files = {("get", "/docs/swagger-ui.css"), ("get", "/docs/swagger-ui-bundle.js")}
    files |= {("get", f"/dashboard/{name}") for name in names()}
    assert routes - files == told


def test_every_reference_leads_somewhere() -> None:
    for reference in set(re.findall(r'"\$ref":\s*"#/([^"]+)"', render().decode())):
        place = DOCUMENT
        for step in reference.split("/"):
            place = place[step]
        assert place


@pytest.mark.parametrize("path", SHAPES)
@pytest.mark.parametrize("body", [b"{", b"[]", b"{}"])
async def test_errors_have_the_shape_that_is_told(server: Served, path: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    reply = await server.send("POST", path, data=body, headers=headers)
    shape = SHAPES[path]
    assert reply.status == (422 if shape in (ErrorShape.TEI, ErrorShape.PERPLEXITY) else 400)
    assert reply.status in statuses(shape)
    msgspec.json.decode(reply.body, type=ERROR_STRUCTS[shape])
    assert set(reply.value) == set(ERROR_STRUCTS[shape].__struct_fields__)


@pytest.mark.parametrize("path", SHAPES)
async def test_errors_outside_of_a_request_have_it_too(server: Served, path: str) -> None:
    data: Any = {"headers": {"Content-Type": "text/plain"}, "data": b"{}"}
    reply = await server.send("POST", path, **data)
    assert reply.status == 415
    msgspec.json.decode(reply.body, type=ERROR_STRUCTS[SHAPES[path]])


def test_the_table_of_dialects_is_the_code_s(repo_root: Path) -> None:
    """docs/api.md: | dialect | `/path`, `/path` | status of a bad request | body |."""
    text = (repo_root / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ((?:`/[^`]*`(?:, )?)+) \| (4\d\d) \| `(\{.*\})` \|$", text, re.MULTILINE)
    told = {
        path: (name, int(status)) for name, paths, status, _ in rows for path in re.findall("`(.*?)`", paths)
    }
    bad = {shape: next(iter(statuses(shape))) for shape in ErrorShape}
    bad |= dict.fromkeys((ErrorShape.TEI, ErrorShape.PERPLEXITY), 422)
    assert told == {path: (shape.value, bad[shape]) for path, shape in SHAPES.items()}
    fields = {name: set(re.findall(r'"(\w+)":', body)) for name, _, _, body in rows}
    for shape, struct in ERROR_STRUCTS.items():
        assert set(struct.__struct_fields__) <= fields[shape.value]


async def test_the_page_needs_nothing_from_elsewhere(server: Served) -> None:
    page = await server.send("GET", "/docs")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    links = re.findall(r'(?:href|src)="([^"]+)"', page.body.decode())
    assert {"docs/swagger-ui.css", "docs/swagger-ui-bundle.js"} <= set(links)
    assert not [link for link in links if "//" in link]
    for link in links:
        if not link.startswith("data:"):
            reply = await server.send("GET", f"/{link}")
            assert reply.status == 200
            assert len(reply.body) > 100_000
            assert reply.headers["Content-Type"].startswith(("text/css", "text/javascript"))

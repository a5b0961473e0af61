"""GET /openapi.json and /docs: the API's description, and Swagger UI from an installed package, not a CDN."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

from gateway.exchange import Answer
from gateway.media import Media
from gateway.openapi import render

SCHEMA_PATH, PATH = "/openapi.json", "/docs"
# The two files that the page needs, and their types.
FILES = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}
_CACHED = (("Cache-Control", "public, max-age=86400"),)
_PAGE = b"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Bouquet</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="docs"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#docs", validatorUrl: null});</script>
</body>
</html>
"""


@cache
def schema() -> Answer:
    """/openapi.json, made when it is first asked for."""
    return Answer(render(), Media.JSON.value)


def page() -> Answer:
    """/docs."""
    return Answer(_PAGE, "text/html; charset=utf-8")


def file(name: str) -> Callable[[], Answer]:
    """/docs/NAME: read when it is first asked for, and then kept: 1.7 MB in all."""

    @cache
    def read() -> Answer:
        folder: Path = importlib.import_module("swagger_ui_bundle").swagger_ui_path
        return Answer((folder / name).read_bytes(), f"{FILES[name]}; charset=utf-8", _CACHED)

    return read

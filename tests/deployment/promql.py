"""What a query asks of a page of metrics. Parses by Prometheus' own grammar (promql-parser)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import promql_parser as ast

Page = Mapping[str, list[dict[str, str]]]
"""Names of samples; of each the labels of every one."""

# Prometheus makes these of every scrape, and gives these labels to every sample.
OF_PROMETHEUS = {"up": set[str](), "scrape_duration_seconds": set[str]()}
ATTACHED = {"job", "instance", "namespace", "pod"}
_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? \S+")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read(*pages: str) -> Page:
    """The samples of all of them."""
    samples: dict[str, list[dict[str, str]]] = {}
    for line in (line for page in pages for line in page.splitlines() if not line.startswith("#")):
        name, labels = _SAMPLE.fullmatch(line).groups()  # type: ignore[union-attr]
        samples.setdefault(name, []).append(dict(_LABEL.findall(labels or "")))
    return samples


def parse(query: str) -> Any:
    """Its tree; Grafana's variables are replaced by something of their kind."""
    return ast.parse(query.replace("$__rate_interval", "5m").replace("$instance", ".*"))


def problems(query: str, page: Page) -> list[str]:
    """All that it names and `page` has not: metrics, labels, values of labels."""
    tree = parse(query)
    found = [fault for selector in selectors(tree) for fault in _missing(selector, page)]
    return found or _ungrouped(tree, page)


def selectors(tree: Any) -> Iterator[Any]:
    """All in it."""
    if isinstance(tree, ast.VectorSelector):
        yield tree
    for part in _parts(tree):
        yield from selectors(part)


def labels_of(tree: Any, page: Page) -> set[str]:
    """Those that its result has."""
    if isinstance(tree, ast.AggregateExpr):
        return set(tree.modifier.labels) if tree.modifier is not None else set()
    if isinstance(tree, ast.VectorSelector):
        own = page[tree.name][0] if tree.name in page else OF_PROMETHEUS[tree.name]
        return {*own, *ATTACHED}
    if isinstance(tree, ast.BinaryExpr):
        sides = [side for side in (tree.lhs, tree.rhs) if any(selectors(side))]
        return labels_of(sides[0], page)
    inner = next(part for part in _parts(tree) if any(selectors(part)))
    dropped = {"le"} if isinstance(tree, ast.Call) and tree.func.name == "histogram_quantile" else set()
    return labels_of(inner, page) - dropped


def _parts(tree: Any) -> list[Any]:
    if isinstance(tree, ast.Call):
        return list(tree.args)
    if isinstance(tree, ast.BinaryExpr):
        return [tree.lhs, tree.rhs]
    if isinstance(tree, ast.MatrixSelector):
        return [tree.vector_selector]
    inner = getattr(tree, "expr", None)
    return [] if inner is None else [inner]


def _missing(selector: Any, page: Page) -> list[str]:
    if selector.name in OF_PROMETHEUS:
        samples: list[dict[str, str]] = [{}]
    elif selector.name in page:
        samples = page[selector.name]
    else:
        return [f"no metric {selector.name}"]
    found = []
    for matcher in selector.matchers.matchers:
        if matcher.name in ATTACHED:
            continue
        values = {sample[matcher.name] for sample in samples if matcher.name in sample}
        regex = matcher.op in (ast.MatchOp.Re, ast.MatchOp.NotRe)
        wanted = matcher.value.split("|") if regex else [re.escape(matcher.value)]
        absent = [value for value in wanted if not any(re.fullmatch(value, own) for own in values)]
        found += [f"{selector.name} has no {matcher.name}={value}" for value in absent]
    return found


def _ungrouped(tree: Any, page: Page) -> list[str]:
    """Labels that are grouped by and that what is grouped has not."""
    found = []
    if isinstance(tree, ast.AggregateExpr) and tree.modifier is not None:
        lost = sorted(set(tree.modifier.labels) - labels_of(tree.expr, page))
        found = [f"{label} is no label of {tree.expr.prettify()}" for label in lost]
    return found + [fault for part in _parts(tree) for fault in _ungrouped(part, page)]

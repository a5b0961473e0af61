"""Prometheus' text format, version 0.0.4. Knows no metric by name.

Written here and not with prometheus_client: that keeps samples behind locks of its own, where counting one
takes microseconds; ours are plain numbers that are read only when a page is asked for.
Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]


class Page:
    """A page being written, a family after another."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def counter(self, name: str, meaning: str, value: float) -> None:
        """A family of one sample that only grows; `name` ends in _total."""
        self.family(name, "counter", meaning, [({}, value)])

    def gauge(self, name: str, meaning: str, value: float) -> None:
        """A family of one sample that goes up and down."""
        self.family(name, "gauge", meaning, [({}, value)])

    def family(self, name: str, kind: str, meaning: str, samples: Iterable[tuple[Labels, float]]) -> None:
        """A family of any number of labelled samples."""
        self._head(name, kind, meaning)
        self._lines += [_sample(name, labels, value) for labels, value in samples]

    def histogram(self, name: str, meaning: str, series: Iterable[tuple[Labels, Counts]]) -> None:
        """A family of histograms, one for each set of labels."""
        self._head(name, "histogram", meaning)
        for labels, counts in series:
            others = "".join(f"{pair}," for pair in _pairs(labels))
            cumulated = accumulate(counts.counts)
            self._lines += [
                f'{name}_bucket{{{others}le="{bound}"}} {seen}'
                for bound, seen in zip(_bounds(counts.bounds, counts.scale), cumulated, strict=True)
            ]
            self._lines.append(_sample(f"{name}_sum", labels, counts.total * counts.scale))
            self._lines.append(_sample(f"{name}_count", labels, sum(counts.counts)))

    def render(self) -> bytes:
        """The page so far."""
        return "\n".join([*self._lines, ""]).encode()

    def _head(self, name: str, kind: str, meaning: str) -> None:
        self._lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]


class Counts:
    """A histogram as this page wants it: counts of values up to each of bounds and above, not cumulated."""

    __slots__ = ("bounds", "counts", "scale", "total")

    def __init__(
        self, bounds: tuple[float, ...], counts: Sequence[int], total: float, scale: float = 1.0
    ) -> None:
        """scale: what bounds and total are multiplied with, 1e-3 for milliseconds that shall be seconds."""
        self.bounds = bounds
        self.counts = counts
        self.total = total
        self.scale = scale


def _sample(name: str, labels: Labels, value: float) -> str:
    if not labels:
        return f"{name} {_number(value)}"
    return f"{name}{{{','.join(_pairs(labels))}}} {_number(value)}"


def _pairs(labels: Labels) -> list[str]:
    return [f'{key}="{_escaped(text)}"' for key, text in labels.items()]


@lru_cache(maxsize=16)
def _bounds(bounds: tuple[float, ...], scale: float) -> list[str]:
    """Written once: of a page's 10 ms they were 9."""
    return [_number(bound * scale) for bound in (*bounds, float("inf"))]


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

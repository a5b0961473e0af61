"""A chart as SVG, for a page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from loadgen.report.charts import Chart, Point, Series

WIDTH, HEIGHT = 760, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 44
LEGEND_ROW = 17
COLOURS = ("#0b6e6e", "#d1495b", "#3d5a98", "#e09f3e", "#5f8f3e", "#8a4f9e", "#555555", "#00a0c6")
# One dash a round of colours, so that 12 lines can be told apart.
DASHES = ("", "6 3", "2 3")


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` onto pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high, value = (self._scaled(v) for v in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values inside."""
        if self.log:
            decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            steps = (1, 2, 5) if self.high / self.low < 1000 else (1,)
            found = [10.0**decade * step for decade in decades for step in steps]
        else:
            rough = (self.high - self.low) / 5 or 1.0
            unit = 10.0 ** floor(log10(rough))
            step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough * 0.999)
            found = [step * n for n in range(ceil(self.low / step), floor(self.high / step + 1e-9) + 1)]
        return [tick for tick in found if self.low * 0.999 <= tick <= self.high * 1.001]

    def _scaled(self, value: float) -> float:
        return log10(max(value, self.low)) if self.log else value


def render(chart: Chart) -> str:
    """The chart as one <svg> element."""
    x = _axis([p[0] for s in chart.series for p in s.points], (LEFT, WIDTH - RIGHT), chart.log_x)
    y = _axis([p[1] for s in chart.series for p in s.points], (HEIGHT - BOTTOM, TOP), chart.log_y)
    height = HEIGHT + LEGEND_ROW * ceil(len(chart.series) / 2)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(chart.title)}">',
        _text(LEFT, 18, chart.title, "title"),
        *_grid(chart, x, y),
    ]
    for number, series in enumerate(chart.series):
        parts += _line(number, series, x, y)
        parts += _legend(number, series)
    return "\n".join([*parts, "</svg>"])


def tick_label(chart: Chart, value: float) -> str:
    """What stands at a tick of x: a percentile where x is 1/(1-q)."""
    if not chart.tail:
        return f"{value:g}"
    return "0" if value <= 1 else f"{100 - 100 / value:.6g}"


def _axis(values: list[float], pixels: tuple[int, int], log: bool) -> Axis:
    low, high = min(values), max(values)
    if log:
        low = max(low, 1e-6)
        high = max(high, low * 1.01)
    else:
        low, high = 0.0, (high * 1.05 or 1.0)
    return Axis(low, high, *pixels, log)


def _grid(chart: Chart, x: Axis, y: Axis) -> Iterator[str]:
    for tick in x.ticks():
        at = x.at(tick)
        yield f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}"/>'
        yield _text(at, HEIGHT - BOTTOM + 16, tick_label(chart, tick), "middle")
    for tick in y.ticks():
        at = y.at(tick)
        yield f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>'
        yield _text(LEFT - 6, at + 4, f"{tick:g}", "end")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, chart.x_label, "middle")
    yield _text(LEFT - 6, TOP - 8, chart.y_label, "end")


def _line(number: int, series: Series, x: Axis, y: Axis) -> Iterator[str]:
    colour = COLOURS[number % len(COLOURS)]
    path = " ".join(f"{x.at(px):.1f},{y.at(py):.1f}" for px, py in series.points)
    yield f'<polyline fill="none" {_stroke(number)} points="{path}"/>'
    if len(series.points) <= 30:
        for px, py in series.points:
            words = escape(f"{series.name}: {px:.4g}, {py:.4g}")
            at = f'cx="{x.at(px):.1f}" cy="{y.at(py):.1f}"'
            yield f'<circle fill="{colour}" r="2.6" {at}><title>{words}</title></circle>'
    if series.marked is not None:
        yield from _mark(*series.marked, colour, x, y)


def _mark(point: Point, words: str, colour: str, x: Axis, y: Axis) -> Iterator[str]:
    at_x, at_y = x.at(point[0]), y.at(point[1])
    yield f'<circle fill="none" stroke="{colour}" stroke-width="2" r="7" cx="{at_x:.1f}" cy="{at_y:.1f}"/>'
    anchor, shift = ("end", -10) if at_x > WIDTH * 0.7 else ("start", 10)
    below = at_y < HEIGHT - BOTTOM - 40
    yield _text(at_x + shift, at_y + (18 if below else -12), words, anchor)


def _legend(number: int, series: Series) -> Iterator[str]:
    left = LEFT + (number % 2) * (WIDTH - LEFT) / 2
    at = HEIGHT + LEGEND_ROW * (number // 2) + 4
    yield f'<line {_stroke(number)} x1="{left}" y1="{at}" x2="{left + 22}" y2="{at}"/>'
    yield _text(left + 28, at + 4, series.name, "start")


def _stroke(number: int) -> str:
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
    return f'stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"'


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'

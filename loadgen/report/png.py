"""Charts as PNG, drawn by matplotlib where it is installed (`pip install -e '.[report]'`)."""

from __future__ import annotations

from pathlib import Path

from loadgen.report.charts import Chart
from loadgen.report.svg import COLOURS, tick_label

STYLES = ("-", "--", ":")


def write(chart: Chart, path: Path) -> bool:
    """Draw it. Returns False, and draws nothing, without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ImportError:
        return False
    # A bare Figure draws by Agg; pyplot would look for a display and keep every figure alive.
    plain = FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else "")
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    for number, series in enumerate(chart.series):
        x, y = [p[0] for p in series.points], [p[1] for p in series.points]
        marker = "o" if len(x) <= 30 else ""
        colour, dash = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]
        axes.plot(x, y, label=series.name, marker=marker, markersize=3, color=colour, linestyle=dash)
        if series.marked is not None:
            axes.annotate(series.marked[1], series.marked[0], xytext=(8, -14), textcoords="offset points")
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    axes.set_xscale("log" if chart.log_x else "linear")
    axes.set_yscale("log" if chart.log_y else "linear")
    if chart.log_y:
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_formatter(plain)
    axes.margins(y=0.15)  # room for what is said below the lowest point
    if chart.tail:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_label(chart, value)))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    return True

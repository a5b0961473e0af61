"""One HTML page with everything in it: no script, no font, no file beside it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from loadgen.report.charts import charts
from loadgen.report.svg import render
from loadgen.report.table import markdown
from loadgen.results import Results

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em; }
body { color: #1d2429; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; margin: 1em 0; }
th, td { padding: 3px 8px; border-bottom: 1px solid #d9dfe3; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; }
.invalid { color: #b00020; font-weight: 600; }
svg { width: 100%; max-width: 900px; margin: 1.2em 0; }
svg text { font-size: 12px; fill: #333; }
svg .title { font-weight: 600; font-size: 14px; }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; } svg .start { text-anchor: start; }
svg .grid { stroke: #e3e8eb; }
code { font-size: 13px; }
"""


def page(results: Results) -> str:
    """The report as HTML."""
    plots = "\n".join(render(chart) for chart in charts(results))
    targets = "".join(f"<li>{escape(_target(target))}</li>" for target in results.targets)
    machine = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in results.machine.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Load test, {escape(results.started)}</title>
<style>{STYLE}</style></head><body>
<h1>Load test</h1>
<p>{escape(results.started)}; {escape(machine)}</p>
<ul>{targets}</ul>
<p><code>{escape(" ".join(results.command))}</code></p>
{_tables(markdown(results))}
{plots}
</body></html>
"""


def _target(target: dict[str, object]) -> str:
    return f"{target['name']}: {target['model'] or 'the only model'} at {target['url']}, {target['api']}"


def _tables(text: str) -> str:
    """The Markdown that this package writes, as HTML: tables, lines of a list, and lines of text."""
    return "\n".join(_blocks(text.splitlines()))


def _blocks(lines: list[str]) -> Iterator[str]:
    inside = ""
    for number, line in enumerate(lines):
        kind = "table" if line.startswith("|") else "ul" if line.startswith("- ") else ""
        if kind != inside:
            yield (f"</{inside}>" if inside else "") + (f"<{kind}>" if kind else "")
            inside = kind
        if kind == "table" and not line.startswith("|---"):
            head = number + 1 < len(lines) and lines[number + 1].startswith("|---")
            yield _row(line, "th" if head else "td")
        elif kind == "ul":
            bad = line.startswith(("- WARNING", "- FAILED")) or "INVALID" in line
            yield f"<li{_class(bad)}>{escape(line[2:])}</li>"
        elif not kind and line:
            yield f"<p>{escape(line)}</p>"
    if inside:
        yield f"</{inside}>"


def _row(line: str, tag: str) -> str:
    cells = [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]
    return (
        f"<tr{_class('INVALID' in line)}>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"
    )


def _class(bad: bool) -> str:
    return ' class="invalid"' if bad else ""

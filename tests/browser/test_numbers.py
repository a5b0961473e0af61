"""How the page works out rates and quantiles, and how it writes numbers: its modules, asked one by one."""

from __future__ import annotations

import pytest

from tests.browser.bidi import Wire
from tests.browser.conftest import Opener
from tests.e2e.server_process import ServerProcess

QUANTILES = [
    ("quantile([1, 2, 4], [0, 10, 0, 0], 0.5)", 1.5),
    ("quantile([1, 2, 4], [10, 0, 10, 0], 0.75)", 3),
    ("quantile([1, 2, 4], [0, 0, 0, 5], 0.99)", 4),
    ("quantile([1, 2, 4], [0, 0, 0, 0], 0.5)", None),
]
WRITTEN = {
    "short(0)": "0",
    "short(0.756)": "0.76",
    "short(12.34)": "12.3",
    "short(999.6)": "1,000",
    "short(51234)": "51.2k",
    "short(1234567)": "1.2M",
    "tally(9999)": "9,999",
    "time(0.0312)": "30 µs",
    "time(12.34)": "12.3 ms",
    "time(1500)": "1.5 s",
    "time(null)": "–",
    "share(0.004)": "< 1 %",
    "brief(7)": "7",
    "brief(1234)": "1.2k",
    "brief(345678)": "350k",
    "ago(61)": "1 min ago",
    "count(1, 'batch', 'batches')": "1 batch",
    "count(2, 'token')": "2 tokens",
}
# Ten seconds apart: the histogram counts what came in the last minute.
_WINDOW = """import('/dashboard/history.js').then(({ History }) => {
  const history = new History();
  for (let s = 0; s <= 100; s += 10) history.add({ s, tokens: s * s, step: [s, 7] });
  return [history.rate("tokens", 10), ...history.counts("step"), history.rates("tokens").length];
})"""
_QUIET = """import('/dashboard/history.js').then(({ History }) => {
  const history = new History();
  for (let s = 0; s <= 300; s += 1) history.add({ s, tokens: 5, step: [3, 7] });
  return [history.rate("tokens"), ...history.counts("step"), history.samples.length];
})"""


async def test_numbers(light: Wire, opened: Opener, graphed: ServerProcess) -> None:
    tab = await opened(light, graphed.url)
    for expression, value in QUANTILES:
        found = await tab.value(f"import('/dashboard/history.js').then(({{ quantile }}) => {expression})")
        assert found == (None if value is None else pytest.approx(value)), expression
    for expression, words in WRITTEN.items():
        name = expression.partition("(")[0]
        found = await tab.value(f"import('/dashboard/format.js').then(({{ {name} }}) => {expression})")
        assert found == words, expression
    assert await tab.value(_WINDOW) == [190, [60, 0], True, 10]
    assert await tab.value(_QUIET) == [0, [3, 7], False, 121]

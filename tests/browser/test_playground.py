"""The playground: real similarities, a ranking, programs that run as printed, text that stays text."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.bidi import ENTER, TAB, Tab, Wire
from tests.browser.conftest import GRAPHED, Opener
from tests.browser.graph_server import TASK
from tests.e2e.server_process import ServerProcess
from tests.http.served import byte_backend

DONE = "!document.getElementById('try-result').hidden && document.activeElement.id === 'result-title'"
HOSTILE = "<img src=x onerror=alert(1)>'\"\\ $API_KEY `id`"


async def matrix(tab: Tab) -> list[list[str]]:
    rows = "[...document.querySelectorAll('#result tbody tr')]"
    found: list[list[str]] = await tab.value(f"{rows}.map((row) => [...row.cells].map((c) => c.innerText))")
    return found


async def put(tab: Tab, selector: str, text: str) -> None:
    await tab.value(f"(document.querySelector({selector!r}).value = {text!r})")


async def code(tab: Tab, name: str) -> str:
    """The snippet behind this tab."""
    await tab.value(
        f"[...document.querySelectorAll('#tabs button')].find((b) => b.textContent === {name!r}).click()"
    )
    return str(await tab.value("document.querySelector('#code pre').textContent"))


async def run(*command: str, **env: str) -> str:
    """What a program prints."""
    ran = await asyncio.to_thread(
        lambda: subprocess.run(
            command, env=os.environ | env, check=False, capture_output=True, text=True, timeout=60
        )
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


async def test_texts_are_compared(light: Wire, opened: Opener, minilm: ServerProcess) -> None:
    tab = await opened(light, minilm.url)
    await tab.until("!document.getElementById('try-form').hidden")
    texts = ("A man is eating food.", "A man is eating a meal.", "The new movie is awesome.", HOSTILE)
    for number, text in enumerate(texts, 1):
        await put(tab, f"#text-{number}", text)
    await tab.click("#run")
    await tab.until(DONE)
    rows = await matrix(tab)
    assert [row[0] for row in rows] == [f"{n} {text}" for n, text in enumerate(texts, 1)]
    assert abs(float(rows[0][2]) - 0.926) < 0.002
    assert rows[2][3] == "1.000"
    assert [rows[i][j + 1] for i in range(4) for j in range(4)] == [
        rows[j][i + 1] for i in range(4) for j in range(4)
    ]
    assert int(rows[0][5]) == 8
    assert "ms" in rows[0][6]
    assert await tab.value("document.querySelectorAll('main img').length") == 0
    scopes = "[...document.querySelectorAll('#result th')].every((th) => ['row', 'col'].includes(th.scope))"
    assert await tab.value(scopes)


async def test_programs_run_as_they_are_printed(
    light: Wire, opened: Opener, minilm: ServerProcess, tmp_path: Path
) -> None:
    tab = await opened(light, minilm.url)
    await tab.until("!document.getElementById('try-form').hidden")
    await put(tab, "#text-1", HOSTILE)
    await tab.click("#run")
    await tab.until(DONE)
    assert "Authorization" not in await code(tab, "curl")  # no key is wanted here
    answer = await run("sh", "-c", await code(tab, "curl"))
    assert '"embedding"' in answer
    for name, printed in (("Python (openai)", HOSTILE), ("Python (msgpack)", "[[")):
        program = tmp_path / "program.py"
        program.write_text(await code(tab, name))
        assert printed in await run(sys.executable, str(program))


async def test_programs_name_a_key_that_is_in_use(
    light: Wire, opened: Opener, minilm: ServerProcess, tmp_path: Path
) -> None:
    tab = await opened(light, minilm.url)
    await tab.until("!document.getElementById('try-form').hidden")
    await tab.value("sessionStorage.setItem('bouquet-key', 'secret')")
    await tab.click("#run")
    await tab.until(DONE)
    for name in ("curl", "Python (openai)", "Python (msgpack)"):
        printed = await code(tab, name)
        assert "secret" not in printed
        assert "API_KEY" in printed
        program = tmp_path / "program"
        program.write_text(printed)
        await run("sh" if name == "curl" else sys.executable, str(program), API_KEY="secret")


async def test_it_works_by_keyboard_alone(light: Wire, opened: Opener, minilm: ServerProcess) -> None:
    tab = await opened(light, minilm.url)
    await tab.until("!document.getElementById('try-form').hidden")
    await tab.press(TAB, ENTER)  # the skip link
    await tab.press(TAB)
    assert await tab.focused() == "text-1"
    for _ in range(9):
        if await tab.focused() == "more":
            break
        await tab.press(TAB)
    await tab.press(ENTER)  # a fifth text, which has the focus
    assert await tab.focused() == "text-5"
    await tab.press(*"Sunday", TAB, TAB)
    assert await tab.focused() == "run"
    await tab.press(ENTER)
    await tab.until(DONE)
    assert len(await matrix(tab)) == 5


async def test_texts_are_two_to_ten(light: Wire, opened: Opener, minilm: ServerProcess) -> None:
    tab = await opened(light, minilm.url)
    await tab.until("!document.getElementById('try-form').hidden")
    for number in range(5, 11):
        await tab.click("#more")
        await put(tab, f"#text-{number}", "שלום עולם, a text that is longer than what is shown of it, by far")
    await tab.click("#run")
    await tab.until(DONE)
    assert len((await matrix(tab))[0]) == 13
    cut_off = "(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth)"
    assert await tab.value(f"{cut_off}(document.getElementById('result').parentElement)") <= 0
    direction = "getComputedStyle(document.querySelector({!r})).direction"
    assert await tab.value(direction.format("#result tr:last-child .words")) == "rtl"
    assert await tab.value(direction.format("#text-10")) == "rtl"
    assert await tab.value("document.getElementById('more').disabled")
    assert await tab.value("document.querySelectorAll('#texts .text').length") == 10
    for _ in range(8):
        await tab.click("#texts .text:last-child button")
    assert await tab.value("[...document.querySelectorAll('#texts button')].every((b) => b.disabled)")
    assert await tab.value("document.querySelectorAll('#texts .text').length") == 2


async def test_a_refusal_is_told(light: Wire, opened: Opener, minilm: ServerProcess) -> None:
    tab = await opened(light, minilm.url, expected="400")
    await tab.until("!document.getElementById('try-form').hidden")
    await put(tab, "#text-1", "long " * 300)
    await tab.click("#run")
    await tab.until("document.getElementById('try-error').textContent.includes('takes at most 256')")
    assert (await tab.text("#try-error")).startswith("Text 1: ")
    assert await tab.value("document.getElementById('try-result').hidden")
    await put(tab, "#text-1", "short")
    await put(tab, "#text-3", "")
    await tab.click("#run")
    await tab.until("document.getElementById('try-error').textContent.startsWith('Text 3: ')")
    assert await tab.focused() == "text-3"
    assert await tab.value("document.querySelectorAll('[aria-invalid]').length") == 1
    await put(tab, "#text-3", "short, too")
    await tab.click("#run")
    await tab.until(DONE)
    assert await tab.value("document.querySelectorAll('[aria-invalid]').length") == 0


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    tokenizer = tmp_path_factory.mktemp("scorer") / "tokenizer.json"
    tokenizer.write_text(byte_backend().to_str())
    flags = ("--load-format", "dummy", "--port", "0", "--tokenizer", str(tokenizer))
    with ServerProcess(*flags, program=GRAPHED, env={TASK: "score"}) as server:
        yield server.ready()


async def test_texts_are_ranked(light: Wire, opened: Opener, scorer: ServerProcess, tmp_path: Path) -> None:
    tab = await opened(light, scorer.url)
    await tab.until("!document.getElementById('query-box').hidden")
    await tab.click("#run")
    await tab.until(DONE)
    rows = await matrix(tab)
    scores = [float(row[-1].replace("−", "-")) for row in rows]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert "relevance_score" in await run("sh", "-c", await code(tab, "curl"))
    program = tmp_path / "program.py"
    program.write_text(await code(tab, "Python (msgpack)"))
    assert float((await run(sys.executable, str(program))).split()[1]) == pytest.approx(scores[0], abs=1e-4)

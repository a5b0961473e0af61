"""The page in Chromium and Firefox: what it tells, what it shows of graphs, errors and replicas, and keys."""

from __future__ import annotations

import asyncio
import signal
import socket

from tests.browser.bidi import DOWN, ENTER, ESCAPE, LEFT, RIGHT, TAB, Wire
from tests.browser.conftest import GRAPHED, KEY, Opener, post
from tests.e2e.fake_server import SLOW_LOAD_SEED
from tests.e2e.server_process import FAKE, ServerProcess

STATE = "document.getElementById('state').textContent"
LEAD = "document.getElementById('lead').textContent"
CELL = "[...document.querySelectorAll('.map td.cell')].find((td) => td.ariaLabel.startsWith({start!r}))"


def cell(tokens: int, seqs: int) -> str:
    """An expression: the map's cell of this size."""
    noun = "sequence" if seqs == 1 else "sequences"
    return CELL.format(start=f"up to {tokens} tokens, up to {seqs} {noun}.")


async def test_it_tells_what_the_server_does(light: Wire, opened: Opener, graphed: ServerProcess) -> None:
    tab = await opened(light, graphed.url)
    await tab.until(f"{STATE} === 'Idle'")
    assert (await tab.text("#lead")).startswith("Ready to turn texts into vectors.")
    assert "bfloat16 on cuda:0" in await tab.text("#model")
    assert "takes token ids and no text" in await tab.text("#try-note")
    assert await tab.value("document.getElementById('try-form').hidden")
    await post(graphed, *({"input": [[5] * 100] * 3} for _ in range(20)))
    await tab.until(f"{STATE} === 'Serving' && {LEAD}.includes('GPU busy')")
    tiles = await tab.text("#tiles")
    assert "GPU busy" in tiles
    await tab.until("[...document.querySelectorAll('#batch tr')][2].innerText.match(/3–4\\s+\\d/)")
    stages = await tab.value("[...document.querySelectorAll('#split tr')].map((row) => row.innerText)")
    assert [row.split("\t")[0].strip() for row in stages] == [
        "Text to tokens",
        "Wait for a batch",
        "Forward",
        "Whole request",
    ]
    assert all("ms" in row or "µs" in row for row in stages)
    await tab.until(f"{STATE} === 'Idle'")
    assert await tab.value("document.getElementById('replicas').hidden")


async def test_the_map_turns_from_cold_to_captured(light: Wire, opened: Opener) -> None:
    body, mine = {"input": [[5] * 40] * 16}, cell(640, 16)
    with ServerProcess("--load-format", "dummy", "--port", "0", program=GRAPHED) as server:
        await asyncio.to_thread(server.ready)
        tab = await opened(light, server.url)
        await tab.until(f"!!{mine}")
        for state, hits in (("cold", "no hits"), ("warmed", "1 hit, 0 by"), ("captured", "2 hits, 0 by")):
            await tab.until(f"{mine}.dataset.state === '{state}' && {mine}.ariaLabel.includes('{hits}')")
            await post(server, body)
        await tab.until(f"{mine}.ariaLabel.includes('3 hits, 1 by graph')")
        assert await tab.value(f"{mine}.innerText") == "3"
        assert "captured" in await tab.text("#legend")


async def test_the_map_is_read_by_pointer_and_by_keys(
    light: Wire, opened: Opener, graphed: ServerProcess
) -> None:
    tab = await opened(light, graphed.url)
    await tab.until("!!document.querySelector('.map td.cell')")
    await tab.click(".map tbody tr:nth-child(2) td.cell")
    assert "up to 2 sequences" in await tab.text("#tip")
    await tab.value("document.querySelector('.map td.cell[tabindex=\"0\"]').focus()")
    label = "document.activeElement.ariaLabel"
    await tab.press(RIGHT, RIGHT, DOWN)
    assert "up to 64 tokens, up to 2 sequences." in await tab.value(label)
    assert await tab.value(label) == await tab.text("#tip")
    await tab.press(LEFT)
    assert "up to 32 tokens, up to 2 sequences." in await tab.value(label)
    await tab.press(ESCAPE)
    assert await tab.value("document.getElementById('tip').hidden")
    stops = await tab.value("document.querySelectorAll('.map [tabindex=\"0\"]').length")
    assert stops == 1  # of a hundred cells Tab stops at one


async def test_errors_are_listed(light: Wire, opened: Opener, graphed: ServerProcess) -> None:
    await post(graphed, {"input": [[10**6]]}, {"input": [[1]], "model": "<b>another</b>"})
    tab = await opened(light, graphed.url)
    await tab.until("document.querySelectorAll('#error-rows tr').length === 2")
    rows = await tab.text("#error-rows")
    assert "invalid_value" in rows
    assert "404" in rows
    assert "another" not in await tab.value("document.body.innerText")


async def test_a_key_is_asked_for_and_stays_in_the_tab(light: Wire, opened: Opener) -> None:
    flags = ("--load-format", "dummy", "--port", "0", "--api-key", KEY)
    with ServerProcess(*flags, program=GRAPHED) as server:
        await asyncio.to_thread(server.ready)
        tab = await opened(light, server.url, expected="401")
        await tab.until(f"{STATE} === 'Key wanted'")
        assert await tab.value("document.getElementById('board').hidden")
        await tab.click("#key-field")
        await tab.press(*"wrong", ENTER)
        await tab.until("document.getElementById('key-note').textContent.includes('does not know')")
        await tab.press(*KEY, ENTER)
        await tab.until(f"{STATE} === 'Idle'")
        assert await tab.value("location.href") == server.url + "/"
        assert await tab.value("localStorage.length") == 0
        assert await tab.value("document.cookie") == ""
        assert KEY not in await tab.value("document.documentElement.outerHTML")
        await tab.go(server.url)
        await tab.until(f"{STATE} === 'Idle'")  # the tab knows it still
        other = await opened(light, server.url, expected="401")
        await other.until(f"{STATE} === 'Key wanted'")  # and another does not
    assert KEY not in "".join([*server.stdout, *server.stderr])


async def test_a_server_that_loads_has_it_already(light: Wire, opened: Opener) -> None:
    seed = ("--seed", str(SLOW_LOAD_SEED))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ServerProcess("--load-format", "dummy", "--port", str(port), *seed, program=FAKE) as server:
        await asyncio.to_thread(server.wait_for, "bouquet")
        await asyncio.sleep(0.5)
        tab = await opened(light, f"http://127.0.0.1:{port}", expected="503")
        await tab.until(f"{STATE} === 'Not ready'")
        assert (await tab.text("#lead")).startswith("The model is still loading.")
        assert await tab.text("#model") == "An embedding server"


async def test_a_server_that_went_is_found_again(light: Wire, opened: Opener) -> None:
    flags = ("--load-format", "dummy")
    with ServerProcess(*flags, "--port", "0", program=FAKE) as server:
        await asyncio.to_thread(server.ready)
        tab = await opened(light, server.url, expected="ERR_CONNECTION_REFUSED")
        await tab.until(f"{STATE} === 'Idle'")
        assert "Nobody has asked" in await tab.text("#lead")
        assert await tab.text("#batch-note") == "No batch yet."  # the warm-up's are not shown
        server.signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.wait) == 0
        await tab.until(f"{STATE} === 'No connection'")
    port = server.url.rsplit(":", 1)[1]
    with ServerProcess(*flags, "--port", port, program=FAKE) as server:
        await tab.until(f"{STATE} === 'Idle'", 20.0)


async def test_replicas_have_a_table(light: Wire, opened: Opener) -> None:
    flags = ("--load-format", "dummy", "--port", "0", "--replicas", "2")
    with ServerProcess(*flags, program=FAKE) as server:
        await asyncio.to_thread(server.ready)
        tab = await opened(light, server.url)
        await tab.until("document.querySelectorAll('#replica-rows .state-ready').length === 2")
        assert "Replicas serving" in await tab.text("#tiles")
        assert await tab.value("document.getElementById('replicas').hidden") is False
        assert await tab.value("document.getElementById('graphs').hidden")
        narrow = await opened(light, server.url, width=360)
        await narrow.until("document.querySelectorAll('#replica-rows .state-ready').length === 2")
        assert (
            await narrow.value("document.querySelector('#replica-rows th').offsetHeight") < 60
        )  # not a letter a line


async def test_a_tab_that_was_hidden_goes_on_where_it_was(
    light: Wire, opened: Opener, graphed: ServerProcess
) -> None:
    hide = "Object.defineProperty(document, 'hidden', {{ value: {}, configurable: true }})"
    tell = "document.dispatchEvent(new Event('visibilitychange'))"
    points = "(document.querySelector('.tile .line')?.getAttribute('d') ?? '').split('L').length"
    tab = await opened(light, graphed.url)
    await tab.until(f"{points} > 2")
    await tab.value(hide.format("true"))
    await tab.value(tell)
    before = await tab.value(points)
    await asyncio.sleep(1.5)
    assert await tab.value(points) == before  # nothing is sent to it
    await tab.value(hide.format("false"))
    await tab.value(tell)
    await tab.until(f"{points} !== {before}")
    assert await tab.value(points) > before  # and does not begin anew


async def test_tab_goes_through_the_page_in_order(light: Wire, opened: Opener, minilm: ServerProcess) -> None:
    tab = await opened(light, minilm.url)
    await tab.until("!document.getElementById('try-form').hidden")
    stops = []
    for _ in range(7):
        await tab.press(TAB)
        stops.append(await tab.focused())
        outline = await tab.value("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", stops
    stops = [stop for stop in stops if stop != "errors-box"]  # there are some if another test made them
    assert stops[:6] == ["Skip to the playground", "try-link", "API", "Metrics", "text-1", "Remove"]

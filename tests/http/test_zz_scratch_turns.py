import asyncio, pytest, os, json
import aiohttp.web_protocol as wp
from tests.http.served import serving
from tests.http.conftest import *  # noqa
from tests.http.test_raw import HEAD
from tests.wire import first_answer
if os.environ.get("PYPARSER"):
    from aiohttp.http_parser import HttpRequestParserPy
    wp.HttpRequestParser = HttpRequestParserPy
if os.environ.get("PLAINLOOP"):
    def pytest_asyncio_loop_factories(): return {"asyncio": asyncio.new_event_loop}

CH=[b"5\r\nabc\r\nzz\r\n", b"zz\r\nabc\r\n", b"f" * 30 + b"\r\nabc", b"-1\r\n\r\n"]
@pytest.mark.parametrize("turns", range(9))
@pytest.mark.parametrize("chunks", CH)
@pytest.mark.parametrize("first", [True, False])
async def test_turns(server, turns, chunks, first):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    while not server.transports: await asyncio.sleep(0)
    if not first:
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"); await asyncio.sleep(0.05)
        await reader.read(65536)
    p = server.transports[0].get_protocol()
    p.data_received(HEAD)
    for _ in range(turns): await asyncio.sleep(0)
    st = (p._waiter is not None, len(p._messages), p._current_request is not None)
    p.data_received(chunks)
    try:
        async with asyncio.timeout(1): a = first_answer(await reader.read())
    except TimeoutError:
        pytest.fail(f"HANG at waiter,messages,current={st}")
    assert a.status == 422, a
    writer.close()

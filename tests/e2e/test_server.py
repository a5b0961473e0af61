"""The whole server on real weights, as a client sees it: a process on loopback, MiniLM in fp32."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from openai import OpenAI

from tests.attempts import best_of, in_time
from tests.e2e import oracle
from tests.e2e.server_process import ServerProcess, held_port

EMBED = "/v1/embeddings"
TEXTS = (
    "A man is eating food.",
    "The new movie is awesome.",
    "Der Mann isst eine Mahlzeit.",
    "  ",
    "word " * 200,
)
# A long job: 96 texts of 252 tokens are seconds of a forward on two cores.
LONG = ["word " * 250] * 96
PROMPTS = {"query": "Represent this sentence for searching: ", "document": "text: "}


@pytest.fixture(scope="module")
def server(minilm_folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess("--model", "minilm", "--port", "0", env={"OMP_DISPLAY_ENV": "VERBOSE"}) as process:
        yield process.ready()


@pytest.fixture(scope="module")
def prompted_folder(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged model with PROMPTS."""
    folder = tmp_path_factory.mktemp("models") / "prompted"
    shutil.copytree(minilm_folder, folder, copy_function=os.symlink)
    file = folder / "config_sentence_transformers.json"
    settings = json.loads(file.read_text()) | {"prompts": PROMPTS}
    file.unlink()
    file.write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def small_steps(prompted_folder: Path) -> Iterator[ServerProcess]:
    """Takes 64 tokens a step."""
    limits = ("--max-model-len", "64", "--max-batch-tokens", "64")
    with ServerProcess("--model", str(prompted_folder), "--port", "0", *limits) as process:
        yield process.ready()


def embed(server: ServerProcess, texts: object, **fields: object) -> np.ndarray[Any, Any]:
    """f32[n, D] by plain JSON floats."""
    status, answer = server.post(EMBED, {"input": texts, **fields})
    assert status == 200, answer
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return np.array([item["embedding"] for item in answer["data"]], np.float32)


def test_openai_client_gets_the_vectors_of_transformers(server: ServerProcess, minilm_folder: Path) -> None:
    """Unmodified: it asks for base64 and decodes it itself."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="minilm", input=list(TEXTS))
    vectors = np.array([item.embedding for item in answer.data], np.float32)
    assert oracle.cosines(vectors, oracle.embed(minilm_folder, TEXTS)).min() >= 0.9999
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-4)
    assert vectors[0, :5] == pytest.approx(
        [0.0332416, 0.0044061, -0.0062770, 0.0483787, -0.1387023], abs=1e-4
    )
    assert answer.model == "minilm"
    assert (
        answer.usage.prompt_tokens == answer.usage.total_tokens == oracle.count_tokens(minilm_folder, TEXTS)
    )


def test_msgpack_client_gets_the_same_vectors_as_raw_bytes(
    server: ServerProcess, minilm_folder: Path
) -> None:
    connection = server.connect()
    headers = {"Content-Type": "application/msgpack"}
    connection.request("POST", EMBED, msgspec.msgpack.encode({"model": "minilm", "input": TEXTS}), headers)
    response = connection.getresponse()
    answer = msgspec.msgpack.decode(response.read())
    assert response.status == 200, answer
    assert isinstance(answer["embeddings"], bytes)
    vectors = np.frombuffer(answer["embeddings"], "<f4").reshape(answer["shape"])
    assert oracle.cosines(vectors, oracle.embed(minilm_folder, TEXTS)).min() >= 0.9999
    assert np.abs(vectors - embed(server, list(TEXTS))).max() < 1e-5


def test_threads_that_wait_for_work_sleep(server: ServerProcess) -> None:
    """As OpenMP itself prints it when torch loads it: spinning, they would take the cores from others."""
    (spins,) = {line.split("=")[1].strip() for line in server.stderr if "GOMP_SPINCOUNT" in line}
    assert spins == "'0'"


def test_ids_give_the_vector_of_their_text(server: ServerProcess) -> None:
    ids = [101, 1037, 2158, 2003, 5983, 2833, 1012, 102]  # [CLS] a man is eating food . [SEP]
    assert oracle.cosines(embed(server, ids), embed(server, TEXTS[0]))[0] > 0.999999
    status, answer = server.post(EMBED, {"input": [[101, 99_999_999]]})
    assert status == 400
    assert "99999999" in answer["error"]["message"]
    assert server.post(EMBED, {"input": "still here"})[0] == 200


def sequences_launched(server: ServerProcess) -> int:
    count: int = server.get("/info")[1]["engine"]["sequences"]
    return count


@pytest.mark.parametrize("name", ["single", "batch"])
def test_vectors_recorded_elsewhere_are_reproduced(
    server: ServerProcess, shared_folder: Path, name: str
) -> None:
    rows = json.loads((shared_folder / "goldens" / f"test_bert__bert_{name}.json").read_text())["rows"]
    inputs = ["What is Deep Learning?", "Deep Learning is...", "What is Deep Learning?"][: len(rows)]
    assert oracle.cosines(embed(server, inputs), np.array(rows)).min() > 0.9999


def test_fewer_dimensions_are_cut_first_and_normalised_after(
    server: ServerProcess, shared_folder: Path
) -> None:
    golden = json.loads((shared_folder / "goldens" / "tei_mrl128_minilm_test_single.json").read_text())[
        "rows"
    ]
    vectors = embed(server, "test", dimensions=128)
    assert vectors.shape == (1, 128)
    assert np.abs(vectors - np.array(golden)).max() < 4e-3


def embed_at_once(server: ServerProcess, inputs: Sequence[object]) -> list[np.ndarray[Any, Any]]:
    """f32[n, D] of each input, all asked for at the same time."""

    async def ask(session: aiohttp.ClientSession, value: object) -> np.ndarray[Any, Any]:
        async with session.post(f"{server.url}{EMBED}", json={"input": value}) as response:
            assert response.status == 200
            data = (await response.json())["data"]
        assert [item["index"] for item in data] == list(range(len(data)))
        return np.array([item["embedding"] for item in data], np.float32)

    async def ask_all() -> list[np.ndarray[Any, Any]]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await asyncio.gather(*(ask(session, value) for value in inputs))

    return asyncio.run(ask_all())


def test_200_clients_at_once_each_get_their_own_answer(server: ServerProcess, minilm_folder: Path) -> None:
    texts = [f"client {number} wants to know what {number * number} is" for number in range(200)]
    vectors = np.concatenate(embed_at_once(server, texts))
    assert oracle.cosines(vectors, oracle.embed(minilm_folder, texts)).min() >= 0.9999


def test_a_request_of_several_steps_is_the_same_every_time(small_steps: ServerProcess) -> None:
    """50 times among others' requests: what its texts give alone."""
    texts = [f"{word} " * 40 for word in ("red", "green", "blue")]
    alone = np.concatenate([embed(small_steps, text) for text in texts])
    assert oracle.cosines(alone, np.roll(alone, 1, axis=0)).max() < 0.95
    others = [f"client {number} " * (1 + number % 9) for number in range(50)]
    answers = embed_at_once(small_steps, [value for other in others for value in (texts, other)])
    assert min(oracle.cosines(vectors, alone).min() for vectors in answers[::2]) >= 0.9999


def test_one_text_a_step_gives_the_same_bits_beside_others(minilm_folder: Path) -> None:
    with ServerProcess("--model", "minilm", "--port", "0", "--max-batch-seqs", "1") as server:
        server.ready()
        alone = np.concatenate([embed(server, text) for text in TEXTS])
        answers = embed_at_once(server, [list(TEXTS), *(f"client {n} " * (1 + n % 9) for n in range(50))] * 3)
    for vectors in answers[::51]:
        np.testing.assert_array_equal(vectors, alone)


@pytest.mark.parametrize("name", [None, *PROMPTS])
def test_prompts_are_put_as_sentence_transformers_puts_them(
    small_steps: ServerProcess, prompted_folder: Path, name: str | None
) -> None:
    from sentence_transformers import SentenceTransformer

    texts = ["hello", "What is deep learning", "风急天高猿啸哀", "سلام. چه طوری؟", " a  b\n"]
    model = SentenceTransformer(str(prompted_folder), device="cpu")
    theirs = model.encode(texts, prompt_name=name, normalize_embeddings=True)
    assert oracle.cosines(embed(small_steps, texts, prompt_name=name), theirs).min() >= 0.9999


def test_only_tokens_count_towards_the_limit(server: ServerProcess) -> None:
    """Of a text of half a million characters, nearly all of them blanks, nothing is cut or refused."""
    status, answer = server.post(EMBED, {"input": "A man is" + " " * 500_000 + "eating food."})
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 8)
    assert oracle.cosines(np.array([answer["data"][0]["embedding"]]), embed(server, TEXTS[0]))[0] > 0.999999


@best_of(3)
def test_the_loop_is_free_while_a_long_forward_runs(server: ServerProcess) -> None:
    busy, probe = server.connect(), server.connect()
    before = sequences_launched(server)
    busy.request("POST", EMBED, json.dumps({"input": LONG}), {"Content-Type": "application/json"})
    while sequences_launched(server) == before:
        pass
    times_ms = []
    for _ in range(200):
        started = time.perf_counter()
        probe.request("GET", "/health")
        response = probe.getresponse()
        response.read()
        times_ms.append((time.perf_counter() - started) * 1e3)
        assert response.status == 200
    in_time(sequences_launched(server) < before + len(LONG), "the work was over before the probes were")
    busy.close()
    in_time(np.percentile(times_ms, 99) < 20, sorted(times_ms)[-5:])


def test_a_client_that_leaves_frees_its_place(server: ServerProcess) -> None:
    before = sequences_launched(server)
    leaving = server.connect()
    leaving.request("POST", EMBED, json.dumps({"input": LONG * 10}), {"Content-Type": "application/json"})
    while sequences_launched(server) == before:
        pass
    leaving.close()
    assert server.post(EMBED, {"input": "next"})[0] == 200
    assert sequences_launched(server) - before < len(LONG)


def test_the_printed_curl_line_works(server: ServerProcess) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    line = server.wait_for("curl -s ")
    answer = json.loads(subprocess.run(shlex.split(line), capture_output=True, timeout=30, check=True).stdout)
    assert len(answer["data"][0]["embedding"]) == 384


WATCHED = """
import sys

def watch(event, args):
    if event.removeprefix("socket.") in ("connect", "sendto", "bind", "getaddrinfo", "gethostbyname"):
        print("network:", event, args[-4:], flush=True)

sys.addaudithook(watch)
import server
sys.exit(server.main())
"""


def test_offline_with_a_folder_no_socket_but_the_listening_one_is_opened(minilm_folder: Path) -> None:
    """And from the first moment it is alive; ready only once it answers."""
    flags, env = ("--model", str(minilm_folder)), {"HF_HUB_OFFLINE": "1"}
    with (
        held_port() as port,
        ServerProcess(*flags, "--port", str(port), program=("-c", WATCHED), env=env) as server,
    ):
        server.wait_for("loading")
        server.url = f"http://127.0.0.1:{port}"
        assert server.get("/health") == (200, {"status": "ok"})
        status, answer = server.get("/ready")
        assert status == 503
        assert "loading" in answer["error"]["message"]
        assert server.post(EMBED, {"input": "too early"})[0] == 503
        server.ready()
        assert server.get("/ready")[0] == 200
        assert embed(server, "now").shape == (1, 384)
        network = [line for line in server.stdout if line.startswith("network:")]
        assert [line.split()[1] for line in network] == ["socket.getaddrinfo", "socket.bind"], network
        deadline = time.monotonic() + 10  # the server's ends of this test's connections close a moment later
        while (sockets := listening_and_connected(server.pid)) != (1, 0):
            assert time.monotonic() < deadline, sockets


def listening_and_connected(pid: int) -> tuple[int, int]:
    """TCP and UDP sockets of a process by the kernel's tables, whoever opened them."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            target = str(entry.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    listening = connected = 0
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                listening += fields[3] == "0A"
                connected += fields[3] != "0A"
    return listening, connected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"architectures": ["MambaForCausalLM"]}', "MambaForCausalLM"),
        ("{", "config.json"),
        ("{}", "architecture"),
    ],
)
def test_a_model_that_is_not_supported_is_named_in_one_line(tmp_path: Path, config: str, words: str) -> None:
    (tmp_path / "config.json").write_text(config)
    fails_with(tmp_path, words)


def fails_with(folder: Path, words: str) -> None:
    with ServerProcess("--model", str(folder), "--port", "0") as process:
        assert process.wait(60) == 1
        assert len(process.stderr) == 1, process.stderr
        assert process.stderr[0].startswith("error: ")
        assert words in process.stderr[0]

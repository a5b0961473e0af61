"""A real server with real weights, in a process and with a Python of its own; clients find it by URL."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
KEY = "the key"
MODEL = "minilm"
# What the model owes; published figures of all-MiniLM-L6-v2 in float32.
EATING, EATING_TOO, MOVIE = "A man is eating food.", "A man is eating a meal.", "The new movie is awesome."
CLOSE, FAR = 0.926, -0.046
FIRST_VALUES = [0.0332416, 0.0044061, -0.0062770, 0.0483787, -0.1387023]
READY = re.compile(r"^ready after [\d.]+ s at (http://\S+): ")


@dataclass(frozen=True)
class Server:
    """url: http://host:port."""

    url: str

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a plain JSON request."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


def start(*flags: str) -> Iterator[Server]:
    """A server until the generator is closed. SERVER_PYTHON: the interpreter that has it installed."""
    command = [os.environ["SERVER_PYTHON"], "server.py", "--model", MODEL, "--port", "0", *flags]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "BOUQUET_API_KEY": KEY}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := READY.match(line):
                break
        else:
            raise AssertionError(f"the server ended with {process.wait()}")
        yield Server(found.group(1))
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    yield from start("--served-model-name", MODEL)


def cosine(one: Any, other: Any) -> float:
    a, b = np.asarray(one, float), np.asarray(other, float)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def check_vectors(vectors: Any, tolerance: float = 2e-3) -> None:
    """Vectors of EATING, EATING_TOO and MOVIE, in this order: of the right length, direction and order."""
    assert len(vectors) == 3
    assert {len(vector) for vector in vectors} == {384}
    assert abs(cosine(vectors[0], vectors[1]) - CLOSE) < tolerance
    assert abs(cosine(vectors[0], vectors[2]) - FAR) < tolerance


def check_exact(vectors: Any) -> None:
    """As check_vectors, and normalised float32."""
    check_vectors(vectors)
    np.testing.assert_allclose(vectors[0][:5], FIRST_VALUES, atol=1e-5)


TEXTS = [EATING, EATING_TOO, MOVIE]

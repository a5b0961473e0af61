"""A server of right vectors, for loadgen's --check: the plain fp32 PyTorch of rose/reference, nothing else.

    python docs/benchmarks/reference.py --model pplx-embed --load-format dummy --device cuda
    python -m loadgen latency --url URL --check THE_URL_IT_PRINTS

Needs no transformers. Takes msgpack of ids, or of texts where there is a tokenizer; one sequence at a time.
Random weights depend on the seed and the kind of device: give it those of the server under test.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from aiohttp import web
from tokenizers import Tokenizer

from rose.batch import Int32
from rose.config import load_config
from rose.model_source import resolve
from rose.reference import reference_vectors
from rose.weights import WeightSource, dummy_weights, open_weights

STARTED_S = time.perf_counter()
MAX_BODY_BYTES = 2**26


class Kept:
    """Every tensor of `weights` read once, and not once a request."""

    def __init__(self, weights: WeightSource, device: str) -> None:
        self._weights = weights
        self._device = device
        self._read: dict[str, torch.Tensor] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See WeightSource.tensor; fp32, on the device."""
        if name not in self._read:
            self._read[name] = self._weights.tensor(name, shape).to(self._device, torch.float32)
        return self._read[name]


class Reference:
    """One model. tokenizer: a tokenizer.json, or None: the model folder's, if it has one."""

    def __init__(self, model: str, *, dummy: bool, seed: int, device: str, tokenizer: Path | None) -> None:
        folder = resolve(model, "dummy" if dummy else "auto").path
        self._config = load_config(folder)
        if self._config.task != "embed" or self._config.dense:
            raise SystemExit(f"{model}: the reference gives pooled vectors, without scores or Dense modules")
        weights = dummy_weights(self._config, seed, device) if dummy else open_weights(folder)
        self._weights = Kept(weights, device)
        self._device = device
        path = tokenizer or folder / "tokenizer.json"
        path = path / "tokenizer.json" if path.is_dir() else path
        self._tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None
        if self._tokenizer is not None:
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer, not normalised, to a body with input_ids and lengths, or with texts as input."""
        sequences = self._sequences(body)
        vectors = reference_vectors(self._config, self._weights, sequences, device=self._device).numpy()
        tokens = sum(map(len, sequences))
        return {
            "embeddings": vectors.astype("<f4").tobytes(),
            "shape": vectors.shape,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _sequences(self, body: dict[str, Any]) -> list[Int32]:
        if "input" in body:
            if self._tokenizer is None:
                raise web.HTTPBadRequest(text="no tokenizer")
            return [np.array(self._tokenizer.encode(text).ids, np.int32) for text in body["input"]]
        # Copies, since torch warns of arrays that it may not write to.
        ids, lengths = (np.frombuffer(body[key], "<i4").copy() for key in ("input_ids", "lengths"))
        return np.split(ids, np.cumsum(lengths)[:-1])


def application(reference: Reference) -> web.Application:
    """POST /v1/embeddings, one request after another."""

    async def embed(request: web.Request) -> web.Response:
        answer = reference.answer(msgspec.msgpack.decode(await request.read()))
        return web.Response(body=msgspec.msgpack.encode(answer), content_type="application/msgpack")

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/v1/embeddings", embed)
    return app


async def serve(reference: Reference, port: int) -> None:
    """Until the process is ended."""
    runner = web.AppRunner(application(reference))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    took_s = time.perf_counter() - STARTED_S
    print(f"ready after {took_s:.2f} s at http://127.0.0.1:{runner.addresses[0][1]}: reference", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Load and serve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="minilm", help="as server.py takes it")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    parser.add_argument("--seed", type=int, default=0, help="of dummy weights")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, or a folder with one")
    parser.add_argument("--port", type=int, default=0)
    flags = parser.parse_args()
    reference = Reference(
        flags.model,
        dummy=flags.load_format == "dummy",
        seed=flags.seed,
        device=flags.device,
        tokenizer=flags.tokenizer,
    )
    asyncio.run(serve(reference, flags.port))


if __name__ == "__main__":
    main()

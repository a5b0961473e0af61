"""Vectors to compare with: those of another server, or of transformers on a folder of weights."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from loadgen.apis import APIS, Vectors, decode_checked
from loadgen.http1 import connect, request_bytes
from loadgen.plan import LoadgenError, Target
from loadgen.workload import Inputs

ASK_S = 120.0


class Reference(Protocol):
    """A source of right vectors. name: for the report."""

    name: str

    def embed(self, inputs: Inputs) -> Vectors:
        """f32[n, dim].

        Raises:
            LoadgenError: it has none.
        """


class ServerReference:
    """Another server."""

    def __init__(self, target: Target) -> None:
        self.name = f"{target.api} at {target.url}"
        self._target = target

    def embed(self, inputs: Inputs) -> Vectors:
        """f32[n, dim] as that server answers."""
        try:
            return asyncio.run(asyncio.wait_for(self._ask(inputs), ASK_S))
        except (OSError, TimeoutError) as error:
            raise LoadgenError(f"--check {self._target.url}: {error or 'no answer'}") from error

    async def _ask(self, inputs: Inputs) -> Vectors:
        target, api = self._target, APIS[self._target.api]
        body = api.encode(inputs, target.model)
        connection = await connect(target.host, target.port)
        try:
            wire = request_bytes(target.netloc, api.path, api.content_type, body, target.api_key)
            response = await connection.send(wire)
        finally:
            connection.abort()
        if response.status != 200:
            raise LoadgenError(f"--check {target.url} answers {response.status}: {response.body[:200]!r}")
        return decode_checked(api, response, len(inputs)).vectors


class TransformersReference:
    """transformers on the CPU in float32, one sequence at a time, pooled as the folder's 1_Pooling says."""

    def __init__(self, folder: Path) -> None:
        self.name = f"transformers on {folder.name}"
        self._pool = _pooling(folder)
        try:
            from transformers import AutoModel, AutoTokenizer
            from transformers.utils import logging
        except ImportError as error:
            raise LoadgenError("--check with a folder needs the packages transformers and torch") from error
        # Its own progress bar would write over ours.
        untyped: Any = logging
        untyped.disable_progress_bar()
        try:
            self._model: Any = AutoModel.from_pretrained(folder, dtype="float32").eval().requires_grad_(False)
            self._tokenizer: Any = None
            if (folder / "tokenizer.json").exists():
                self._tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise LoadgenError(f"--check {folder}: {' '.join(str(error).split())[:300]}") from error

    def embed(self, inputs: Inputs) -> Vectors:
        """f32[n, dim], not normalised."""
        rows = [ids.tolist() for ids in inputs.ids] or [self._ids(text) for text in inputs.texts]
        return np.stack([self._one(row) for row in rows])

    def _ids(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise LoadgenError("--check: the folder has no tokenizer.json for text")
        return list(self._tokenizer(text)["input_ids"])

    def _one(self, ids: list[int]) -> Vectors:
        # dummy_inputs is a tensor of the right kind: new_tensor makes one without importing torch here.
        tensor = self._model.dummy_inputs["input_ids"].new_tensor([ids])
        hidden = self._model(input_ids=tensor).last_hidden_state[0].numpy()
        if self._pool == "mean":
            return np.asarray(hidden.mean(axis=0), np.float32)
        return np.asarray(hidden[0 if self._pool == "cls" else -1], np.float32)


def _pooling(folder: Path) -> str:
    path = folder / "1_Pooling" / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LoadgenError(f"--check: cannot read {path}: {error}") from error
    modes = {
        "mean": "pooling_mode_mean_tokens",
        "cls": "pooling_mode_cls_token",
        "last": "pooling_mode_lasttoken",
    }
    chosen = [name for name, key in modes.items() if config.get(key)]
    if len(chosen) != 1:
        raise LoadgenError(f"--check: {path} names {chosen or 'no'} pooling of mean, cls, last")
    return chosen[0]

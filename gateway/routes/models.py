"""GET /v1/models: the names under which the one model is served."""

from __future__ import annotations

import time

from gateway.exchange import Answer
from gateway.media import Media
from gateway.pipeline import max_tokens
from gateway.schemas import Model, ModelList, encode
from rose.batch import EngineInfo

PATH = "/v1/models"


class Models:
    """The list, made once: nothing in it changes while the server runs."""

    def __init__(self, model_names: tuple[str, ...], info: EngineInfo) -> None:
        created = int(time.time())
        limit = max_tokens(info)
        models = [
            Model(id=name, created=created, owned_by="bouquet", root=info.model, max_model_len=limit)
            for name in model_names
        ]
        self._answer = Answer(encode(ModelList(data=models), Media.JSON), Media.JSON.value)

    def __call__(self) -> Answer:
        """The page."""
        return self._answer

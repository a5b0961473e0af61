"""Three of Qdrant's REST routes on loopback. What is not of its documented schema gets 400, as there.

Source: https://api.qdrant.tech/api-reference (CreateCollection, PointsBatch, UpdateResult).
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec


class VectorParams(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    size: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    distance: Literal["Cosine", "Euclid", "Dot", "Manhattan"]
    datatype: Literal["float32", "uint8", "float16"] | None = None


class CreateCollection(msgspec.Struct, forbid_unknown_fields=True):
    vectors: VectorParams


class Batch(msgspec.Struct, forbid_unknown_fields=True):
    ids: list[Annotated[int, msgspec.Meta(ge=0)] | uuid.UUID]
    vectors: list[list[float]]
    payloads: list[dict[str, Any]] | None = None


class PointsBatch(msgspec.Struct, forbid_unknown_fields=True):
    batch: Batch


class Collection:
    """points: vector and payload by id. upserts: how often each was written."""

    def __init__(self, vectors: dict[str, Any]) -> None:
        self.vectors = vectors
        self.points: dict[Any, tuple[list[float], dict[str, Any]]] = {}
        self.upserts: dict[Any, int] = {}

    def upsert(self, batch: Batch) -> None:
        payloads = batch.payloads or [{}] * len(batch.ids)
        if not len(batch.ids) == len(batch.vectors) == len(payloads):
            raise ValueError("ids, vectors and payloads differ in number")
        for id_, vector, payload in zip(batch.ids, batch.vectors, payloads, strict=True):
            if len(vector) != self.vectors["size"]:
                expected = f"Vector dimension error: expected dim: {self.vectors['size']}, got {len(vector)}"
                raise ValueError(f"Wrong input: {expected}")
            key = id_ if isinstance(id_, int) else str(id_)
            self.points[key] = vector, payload
            self.upserts[key] = self.upserts.get(key, 0) + 1


class QdrantServer:
    """fails: the answer's status and body for a request in place of its own, by its path; called in order."""

    def __init__(self) -> None:
        self.url = ""
        self.collections: dict[str, Collection] = {}
        self.keys: set[str | None] = set()
        self.asked: list[str] = []
        self.fails: Callable[[str], tuple[int, bytes] | None] = lambda _: None

    def answer(self, method: str, target: str, body: bytes) -> tuple[int, object]:
        parts = urlsplit(target)
        match method, parts.path.strip("/").split("/"), parts.query:
            case "GET", ["collections", name], "":
                if name not in self.collections:
                    return 404, f"Not found: Collection `{name}` doesn't exist!"
                return 200, {"config": {"params": {"vectors": self.collections[name].vectors}}}
            case "PUT", ["collections", name], "":
                if name in self.collections:
                    return 409, f"Wrong input: Collection `{name}` already exists!"
                wanted = msgspec.json.decode(body, type=CreateCollection)
                self.collections[name] = Collection(msgspec.to_builtins(wanted.vectors))
                return 200, True
            case "PUT", ["collections", name, "points"], "wait=true":
                self.collections[name].upsert(msgspec.json.decode(body, type=PointsBatch).batch)
                return 200, {"operation_id": 0, "status": "completed"}
        return 404, "no such route"


@contextmanager
def qdrant_server() -> Iterator[QdrantServer]:
    served = QdrantServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            served.keys.add(self.headers.get("api-key"))
            served.asked.append(f"{self.command} {self.path}")
            failed = served.fails(self.path)
            if failed is not None:
                self.give(*failed)
                return
            try:
                if self.command == "PUT" and self.headers.get("content-type") != "application/json":
                    raise ValueError("Content type error")
                status, result = served.answer(self.command, self.path, body)
            except ValueError as error:  # msgspec's are of these
                status, result = 400, f"Format error in JSON body: {error}"
            answer = {"result": result, "status": "ok", "time": 0.001}
            if status != 200:
                answer = {"status": {"error": result}, "time": 0.001}
            self.give(status, msgspec.json.encode(answer))

        do_GET = do_PUT = answer  # noqa: N815

        def give(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        served.url = f"http://127.0.0.1:{server.server_port}"
        yield served
        server.shutdown()

"""moto's S3 on loopback: what it was asked is kept, and it can be told to fail."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyarrow import fs

# All servers of a process have the same buckets.
_BUCKETS = itertools.count(1)
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


class S3Server:
    """url: its endpoint. asked: "METHOD /bucket/key" of every request, in order; fails: which get 500."""

    def __init__(self, url: str, asked: list[str]) -> None:
        self.url = url
        self.asked = asked
        self.fails: Callable[[str], bool] = lambda _: False

    def bucket(self) -> str:
        """The URL of an empty one. Wants `variables` in the environment."""
        url = f"s3://bucket{next(_BUCKETS)}"
        filesystem, path = fs.FileSystem.from_uri(f"{url}?allow_bucket_creation=true")
        filesystem.create_dir(path)
        return url

    @property
    def variables(self) -> dict[str, str]:
        """By which a process finds it."""
        return {"AWS_ENDPOINT_URL": self.url, **KEYS}


@contextmanager
def s3_server() -> Iterator[S3Server]:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: Any) -> None: ...

    asked: list[str] = []
    moto = DomainDispatcherApplication(create_backend_app)

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        line = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
        asked.append(line)
        if found.fails(line):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        return moto(environ, start_response)

    server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=Silent)
    found = S3Server(f"http://127.0.0.1:{server.server_port}", asked)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()


def put(url: str, content: bytes) -> None:
    """Make an object."""
    filesystem, path = fs.FileSystem.from_uri(url)
    with filesystem.open_output_stream(path) as stream:
        stream.write(content)

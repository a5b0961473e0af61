"""GET / and /dashboard: a page for people, its files, and the events that it lives on."""

from __future__ import annotations

from typing import Protocol

from gateway.exchange import Page, Stream
from gateway.web import files
from gateway.web.feed import Feed

PATH, FOLDER, EVENTS_PATH = "/", "/dashboard", "/dashboard/events"


class Routes(Protocol):
    """Where the routes go; see gateway.app."""

    def file(self, path: str, counted: str, page: Page) -> None:
        """A page for everyone that depends on a request's headers."""
        ...

    def stream(self, path: str, begin: Stream) -> None:
        """A page that never ends, with a key."""
        ...


def pages() -> dict[str, Page]:
    """The page and its files, by path. They hold no numbers: a server may show them while it loads."""
    return {PATH: files.file(files.PAGE)} | {f"{FOLDER}/{name}": files.file(name) for name in files.names()}


def add(routes: Routes, feed: Feed) -> None:
    """The page and what it lives on."""
    for path, page in pages().items():
        routes.file(path, FOLDER, page)
    routes.stream(EVENTS_PATH, feed.join)

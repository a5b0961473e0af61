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


def add(routes: Routes, feed: Feed) -> None:
    """The page and what it needs."""
    routes.file(PATH, FOLDER, files.file(files.PAGE))
    for name in files.names():
        routes.file(f"{FOLDER}/{name}", FOLDER, files.file(name))
    routes.stream(EVENTS_PATH, feed.join)

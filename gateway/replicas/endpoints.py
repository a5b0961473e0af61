"""Where replicas are: URLs on the command line, in a file, and the addresses behind their names."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica's place. url: scheme, name and port. address: of that name, as digits.

    uds: a unix socket in their place.
    """

    url: str
    address: str = ""
    uds: Path | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """What logs, metrics and errors call it."""
        if self.label:
            return self.label
        parts = urlsplit(self.url)
        if parts.hostname == self.address:
            return self.url
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.url} at {address}"


def read_url(text: str) -> str:
    """A replica's URL: scheme, host and port, nothing else.

    Raises:
        ValueError: it is none.
    """
    wrong = ValueError(f"{text.strip()!r} is no replica's URL like http://host:8000")
    try:
        parts = urlsplit(text.strip().rstrip("/"))
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # as whoever looks it up does: labels that are empty or too long are none
    except ValueError:
        raise wrong from None
    plain = not (parts.path or parts.query or parts.fragment or parts.username or re.search(r"\s", host))
    if parts.scheme not in ("http", "https") or not host or port == 0 or not plain:
        raise wrong
    return f"{parts.scheme}://{parts.netloc}"


def read_file(path: Path) -> list[str]:
    """URLs, one a line; empty lines and lines that begin with # do not count.

    Raises:
        ValueError: a line is none.
        OSError: the file cannot be read.
    """
    lines = (line.strip() for line in path.read_text("utf-8-sig").splitlines())
    return list(dict.fromkeys(read_url(line) for line in lines if line and not line.startswith("#")))


async def addresses(url: str) -> list[Endpoint]:
    """All replicas behind `url`: one for each address that its name has now. IPv4 alone, if there is any.

    A machine with both kinds is one replica, not two.

    Raises:
        OSError: the name has none, or nobody can be asked.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        return [Endpoint(url, str(ipaddress.ip_address(host)))]
    except ValueError:
        pass
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family: dict[int, list[str]] = {}
    for family, _, _, _, place in found:
        by_family.setdefault(family, []).append(str(place[0]))
    chosen = by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6, [])
    return [Endpoint(url, address) for address in sorted(set(chosen))]


class Listing:
    """The replicas that are listed now: `urls`, and those in `file`. What cannot be read stays as it was.

    nowhere: URLs whose names never had an address since they are listed, and why, as of the last look.
    """

    def __init__(self, urls: Iterable[str], file: Path | None) -> None:
        self._urls = tuple(urls)
        self._file = file
        self._in_file: list[str] = []
        self.nowhere: dict[str, str] = {}
        self._known: dict[str, list[Endpoint]] = {}
        self._complaints: dict[str, str] = {}

    async def read(self) -> set[Endpoint]:
        """Look again."""
        if self._file is not None:
            try:
                self._in_file = await asyncio.to_thread(read_file, self._file)
                self._complaints.pop(str(self._file), None)
            except (OSError, ValueError) as error:
                self._complain(str(self._file), f"the replicas in {self._file} stay as they were: {error}")
        urls = dict.fromkeys((*self._urls, *self._in_file))
        self.nowhere = {url: why for url, why in self.nowhere.items() if url in urls}
        found = await asyncio.gather(*map(self._find, urls))
        self._known = dict(zip(urls, found, strict=True))
        return {endpoint for endpoints in found for endpoint in endpoints}

    async def _find(self, url: str) -> list[Endpoint]:
        try:
            found = await addresses(url)
        except OSError as error:
            known = self._known.get(url, [])
            why = f"its name has no address: {error.strerror or error}"
            if not known:
                self.nowhere[url] = why
            stay = f"; {len(known)} from before stay" if known else "; it is looked up again and again"
            self._complain(url, f"replica {url}: {why}{stay}")
            return known
        self.nowhere.pop(url, None)
        self._complaints.pop(url, None)
        return found

    def _complain(self, about: str, message: str) -> None:
        """Once, as long as nothing changes."""
        if self._complaints.get(about) != message:
            self._complaints[about] = message
            log.warning("%s", message)

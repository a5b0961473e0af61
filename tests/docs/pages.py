"""The documents, read: their code blocks, commands, flags, links and anchors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Without raw reports, which lie deeper.
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("*/*.md")))

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
_COMMAND = re.compile(r"(?:\$ )?((?:[A-Z_]+=\S+ )*(?:python3?|make|pip|curl) .*)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def name(page: Path) -> str:
    """From the checkout."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """What stands in fences of this language; "": of none."""
    return [code for tag, code in _BLOCK.findall(page.read_text()) if tag == language]


def spans(page: Path) -> list[str]:
    """Code within sentences, each in one line."""
    return [" ".join(code.split()) for code in _SPAN.findall(_BLOCK.sub("", page.read_text()))]


def fenced_commands(page: Path) -> Iterator[list[str]]:
    """Programs that can be run as they are printed: words, without variables before them and comments."""
    return _commands(line for code in blocks(page, "") for line in code.splitlines())


def spoken_commands(page: Path) -> Iterator[list[str]]:
    """The same of sentences, where words like FILE may stand for something."""
    return _commands(spans(page))


def _commands(lines: list[str] | Iterator[str]) -> Iterator[list[str]]:
    for line in lines:
        if found := _COMMAND.fullmatch(line):
            words = shlex.split(found[1].removesuffix(" &"), comments=True)
            yield words[next(n for n, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)) :]


def flags(page: Path) -> set[str]:
    """Every --flag in code of this page."""
    return flags_in("\n".join([*spans(page), *blocks(page, "")]))


def flags_in(text: str) -> set[str]:
    """Every --flag in it."""
    return set(_FLAG.findall(text))


def links(page: Path) -> list[str]:
    """Targets within the checkout."""
    text = _SPAN.sub("", _BLOCK.sub("", page.read_text()))
    return [target for target in _LINK.findall(text) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """What may stand behind # of a link to it: headings as GitHub names them, and named anchors."""
    text = _BLOCK.sub("", page.read_text())
    headings = (re.sub(r"<[^>]*>|`|\[|\]\([^)]*\)", "", line) for line in re.findall(r"^#+ (.*)", text, re.M))
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a name="([^"]+)">', text))

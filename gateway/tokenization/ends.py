"""Where a long text can be read from, so that its last ids are those of the whole."""

from __future__ import annotations

import re
from typing import Any

# A word ends before the blank, and another begins with it: ASCII letters join nothing over a blank, and what
# stands before the first letter cannot change that it is its word's last.
SPACE = re.compile("[A-Za-z] (?=[A-Za-z])")
BLANK = re.compile("[A-Za-z][ \n](?=[A-Za-z])")


def parting(tokens: list[dict[str, Any]], pattern: re.Pattern[str]) -> re.Pattern[str] | None:
    """`pattern`, unless an added token of the file may stand across such a place, or take its blank away."""
    for token in tokens:
        content = token["content"]
        if pattern.search(content) or (token["rstrip"] and content[-1:].isalpha()):
            return None
    return pattern


def end_of(text: str, least: int, pattern: re.Pattern[str] | None) -> str:
    """The last characters of `text`, `least` to half as many more; all if it cannot be parted among those."""
    start = len(text) - least
    found = pattern.search(text, max(start - least // 2, 0), start + 2) if pattern and start > 0 else None
    return text[found.start() + 1 :] if found else text

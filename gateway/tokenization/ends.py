"""Where a long text can be read from, so that its last ids are those of the whole."""

from __future__ import annotations

import re
from typing import Any

# Letters by whatever Unicode, of Latin, Cyrillic, Hebrew, Arabic, Devanagari, Thai, kana, Han, Hangul:
# they join nothing over a blank or a full stop, and nothing before them makes them blanks.
_LETTER = "[A-Za-z\u0410-\u044f\u05d0-\u05ea\u0621-\u063a\u0905-\u0939\u0e01-\u0e2e"
_LETTER += "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]"
# A word ends before the blank, and another begins with it; or with the stop, which may be part of the next.
SPACE = re.compile(f"{_LETTER} (?={_LETTER})")
BLANK_OR_STOP = re.compile(f"{_LETTER}(?:[ \n](?={_LETTER})|(?=[\u3001\u3002\uff0c\uff1a\uff1b]{_LETTER}))")


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

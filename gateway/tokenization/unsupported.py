"""What says that a tokenizer.json needs the library itself."""

from __future__ import annotations


class UnsupportedError(Exception):
    """This tokenizer.json says something that no kernel does exactly; the message names it."""

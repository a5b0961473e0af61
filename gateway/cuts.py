"""How a request wants inputs cut that are too long: one rule, in the words of every dialect."""

from __future__ import annotations

from gateway.errors import shown
from gateway.inputs import invalid

_DIRECTIONS = {"right": False, "left": True, "end": False, "start": True}


def read_direction(direction: str | None, param: str = "truncation_direction") -> bool:
    """Whether a text's end is kept: "right" or "end" (the default) cut it, "left" or "start" the beginning.

    Raises:
        ApiError: INVALID_VALUE.
    """
    if direction is None:
        return False
    keep_end = _DIRECTIONS.get(direction.lower())
    if keep_end is None:
        raise invalid(f"{param} is {shown(direction)}; give right or left", param)
    return keep_end


def read_prompt_tokens(count: int | None) -> int | None:
    """vLLM's `truncate_prompt_tokens`: tokens to cut to; None: not given, or -1 for what the model takes.

    Raises:
        ApiError: INVALID_VALUE.
    """
    if count is None or count == -1:
        return None
    if count < 1:
        message = f"truncate_prompt_tokens is {count}; give -1 for what the model takes, or at least 1"
        raise invalid(message, "truncate_prompt_tokens")
    return count

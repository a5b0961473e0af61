"""What Cohere's and vLLM's answers say of themselves: ids, versions and what is billed."""

from __future__ import annotations

import itertools
import os

import msgspec

_PREFIX = os.urandom(8).hex()
_NUMBERS = itertools.count(1)


class ApiVersion(msgspec.Struct, kw_only=True):
    """The version of Cohere's API that an answer follows."""

    version: str = "2"


class BilledUnits(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What Cohere would count."""

    input_tokens: int | None = None
    search_units: int | None = None


class Meta(msgspec.Struct, kw_only=True):
    """Cohere's `meta`."""

    api_version: ApiVersion = msgspec.field(default_factory=ApiVersion)
    billed_units: BilledUnits


def new_id(kind: str) -> str:
    """An id that no other answer of any process has."""
    return f"{kind}-{_PREFIX}-{next(_NUMBERS):x}"

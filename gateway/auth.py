"""API keys: `Authorization: Bearer KEY`, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from gateway.errors import ApiError, ErrorKind

_CHALLENGE = (("WWW-Authenticate", "Bearer"),)


class KeyRing:
    """The keys that open the work routes; an empty ring opens them to everyone.

    Digests are compared, not keys, so that neither content nor length shows in the time taken.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def check(self, authorization: str | None) -> None:
        """Let the request with this Authorization header pass.

        Raises:
            ApiError: INVALID_API_KEY, when keys are set and the header holds none of them.
        """
        if not self._digests:
            return
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise ApiError(
                ErrorKind.INVALID_API_KEY,
                "this server wants an API key: send the header 'Authorization: Bearer KEY'",
                headers=_CHALLENGE,
            )
        given = _digest(key.strip())
        # Every key is compared, also after a match.
        if not sum([hmac.compare_digest(given, digest) for digest in self._digests]):
            raise ApiError(ErrorKind.INVALID_API_KEY, "the API key is not valid", headers=_CHALLENGE)


def _digest(key: str) -> bytes:
    """Header bytes that are no UTF-8 reach us as surrogates; they must not raise."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

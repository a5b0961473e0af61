"""Code points of valid UTF-8."""

from __future__ import annotations

from gateway.tokenization.kernels.arrays import UInt8, signed
from gateway.tokenization.kernels.jit import inner


@inner
def width(lead: int) -> int:
    """Bytes of the code point that begins with `lead`."""
    if lead < 0x80:
        return 1
    if lead < 0xE0:
        return 2
    return 3 if lead < 0xF0 else 4


@inner
def code_point(text: UInt8, at: int) -> int:
    """The code point that begins at `at`."""
    lead = signed(text[at])
    if lead < 0x80:
        return lead
    second = signed(text[at + 1]) & 0x3F
    if lead < 0xE0:
        return (lead & 0x1F) << 6 | second
    third = signed(text[at + 2]) & 0x3F
    if lead < 0xF0:
        return (lead & 0x0F) << 12 | second << 6 | third
    return (lead & 0x07) << 18 | second << 12 | third << 6 | (signed(text[at + 3]) & 0x3F)


@inner
def before(text: UInt8, at: int) -> int:
    """Where the code point begins that ends at `at` > 0."""
    at -= 1
    while text[at] & 0xC0 == 0x80:
        at -= 1
    return at

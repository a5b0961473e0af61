"""No kernel reads or writes past an array, and the pages that say so do kill."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.tokenization.kernels.trie import BASE_AT, build_trie
from tests.tokenization.files import FORMS

ROOT = Path(__file__).resolve().parents[2]
TOUCH = """
import ctypes
import numpy as np
from tests.tokenization.guarded import Guard
guard = Guard(at_end={at_end})
array = guard.array(np.arange(5))
assert array.tolist() == [0, 1, 2, 3, 4] and guard.text(b"abc") + b"d" == b"abcd"
print("touching", flush=True)
ctypes.c_char.from_address(array.ctypes.data + {place}).value
"""


@pytest.mark.parametrize(("at_end", "place"), [(True, 40), (False, -1)])
def test_a_guard_page_kills(at_end: bool, place: int) -> None:
    command = [sys.executable, "-c", TOUCH.format(at_end=at_end, place=place)]
    run = subprocess.run(command, cwd=ROOT, check=False, timeout=60, capture_output=True)
    assert run.stdout == b"touching\n", run.stderr
    assert run.returncode == -signal.SIGSEGV


@pytest.mark.parametrize("keys", [(), (b"<s>",), (b"a", b"ab")])
def test_a_trie_holds_the_places_of_all_bytes(keys: tuple[bytes, ...]) -> None:
    """Also of those that no key has, which a text may have behind what a key begins with."""
    trie = build_trie(dict.fromkeys(keys, 0))
    assert len(trie) > int((trie >> BASE_AT).max()) + 256


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_reaches_past_an_array(form: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.tokenization.guarded", "3000", form]
    run = subprocess.run(command, cwd=ROOT, check=False, timeout=800, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("nothing reaches past") == 2

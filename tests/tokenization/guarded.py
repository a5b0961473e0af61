"""Tokenisers whose arrays lie against pages that nobody may touch: what goes past one is killed.

    python -X faulthandler -m tests.tokenization.guarded COUNT FORM...

Machine code looks at no bounds, and what is past an array is mostly somebody's. Here a kernel's tables, its
buffers and the texts lie with their ends at a guard page, then with their beginnings. Buffers begin with
bytes of no meaning. COUNT: strange strings a form. FORM: see files.py.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import numpy as np

from gateway.tokenization import compiled, loading
from gateway.tokenization.kernels import charsmap, trie
from gateway.tokenization.kernels.arrays import Array, Output
from gateway.tokenization.kernels.kernel import Kernel
from gateway.tokenization.kernels.words import Words
from tests.tokenization.exact import assert_same, vocabulary
from tests.tokenization.files import library_of
from tests.tokenization.strings import every_block, of_few_letters, run_together, strange

_LIBC = ctypes.CDLL(None, use_errno=True)
_OBJECT_BYTES = sys.getsizeof(b"") - 1  # before the bytes of a bytes object
_NO_MEANING = 0xAB


class Guard:
    """Puts things between two guard pages. at_end: right before the second, else right behind the first."""

    def __init__(self, *, at_end: bool) -> None:
        self._at_end = at_end
        self._made: dict[int, tuple[Array, Array]] = {}
        self._texts: memoryview | None = None

    def array(self, array: Array, *, written: bool = True) -> Array:
        """A copy of `array`, the same one each time. written: what is in it counts."""
        if id(array) not in self._made:
            copy = np.ndarray(array.shape, array.dtype, _guarded(array.nbytes, at_end=self._at_end))
            copy.view(np.uint8)[:] = array.view(np.uint8) if written else _NO_MEANING
            self._made[id(array)] = self._made[id(copy)] = array, copy
        return self._made[id(array)][1]

    def any(self, value: Any) -> Any:
        """`value` with the arrays that it is or has replaced by copies of them."""
        if isinstance(value, np.ndarray):
            return self.array(value)
        return type(value)(*map(self.any, value)) if hasattr(value, "_fields") else value

    def kernel(self, kernel: Kernel) -> Kernel:
        """`kernel` on copies of its tables, which its classifier fills in."""
        for name, value in vars(kernel.classifier).items():  # type: ignore[attr-defined]
            setattr(kernel.classifier, name, self.any(value))  # type: ignore[attr-defined]
        changed = {field.name: self.any(getattr(kernel, field.name)) for field in fields(kernel)}  # type: ignore[arg-type]
        return replace(kernel, **changed)  # type: ignore[type-var]

    def text(self, text: bytes) -> bytes:
        """A bytes object like `text`, until the next one; at an end without the 0 behind its bytes."""
        size = _OBJECT_BYTES + len(text)
        self._texts = _guarded(size, at_end=self._at_end)
        at = ctypes.addressof(ctypes.c_char.from_buffer(self._texts))
        ctypes.memmove(at, id(text), size)
        ctypes.c_ssize_t.from_address(at).value = 1 << 20  # references: none is the last
        made: bytes = ctypes.cast(at, ctypes.py_object).value
        return made


def _guarded(size: int, *, at_end: bool) -> memoryview:
    """So many bytes of zeros beside a page that kills."""
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    room = mmap.mmap(-1, pages + 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    for page in (start, start + mmap.PAGESIZE + pages):
        if _LIBC.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    first = mmap.PAGESIZE + (pages - size if at_end else 0)
    return memoryview(room)[first : first + size]


def _workspace(guard: Guard) -> type[compiled._Workspace]:
    class Workspace(compiled._Workspace):
        """One whose arrays are guarded whenever there are new ones."""

        def _addresses(self) -> None:
            run = self._kernel.run
            self.run = lambda text, *others: run(guard.text(text), *others)
            self._output = Output(*map(guard.array, self._output))
            self._scratch = [guard.array(array, written=False) for array in self._scratch]
            self._words = Words(*map(guard.array, self._words))
            self._state = guard.array(self._state)
            super()._addresses()
            self._arrays = guard.array(self._arrays)
            self.memory = self._arrays.ctypes.data

    return Workspace


@contextmanager
def guarded(*, at_end: bool) -> Iterator[None]:
    """Tokenisers that are made in here are guarded."""
    guard, read = Guard(at_end=at_end), loading._kernel

    def arguments(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            copies = list(map(Guard(at_end=at_end).any, given))
            made = function(*copies)
            for array, copy in zip(given, copies, strict=True):
                if isinstance(array, np.ndarray) and array.flags.writeable:
                    array[:] = copy
            return made

        return called

    with ExitStack() as patched:
        for module, name in ((charsmap, "_own_classes"), (trie, "_build")):
            patched.enter_context(mock.patch.object(module, name, arguments(getattr(module, name))))
        patched.enter_context(mock.patch.object(loading, "_kernel", lambda file: guard.kernel(read(file))))
        patched.enter_context(mock.patch.object(compiled, "_Workspace", _workspace(guard)))
        yield


def check(form: str, count: int) -> None:
    """The form's ids beside guard pages are the library's."""
    for at_end in (True, False):
        with guarded(at_end=at_end):
            library = library_of(form)
            ours, words = loading.compiled(library), vocabulary(library)
            texts = [*strange(count, 7, words), *run_together(2, 7, words), *of_few_letters(words, 9_000)]
            texts += [*list(every_block())[:: max(1, 60_000 // (count + 1))], "", "x", "é", "字"]
            for most in (None, 1, 20):
                assert_same(ours, library, texts, most)
            for text in texts:
                assert_same(ours, library, [text])
            ours.encode_ends(texts, 20)
            assert_same(ours.literal(), library.literal(), texts)
        print(f"{form}: nothing reaches past {'an end' if at_end else 'a beginning'}", flush=True)


if __name__ == "__main__":
    for chosen in sys.argv[2:]:
        check(chosen, int(sys.argv[1]))

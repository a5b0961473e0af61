"""What surrounds the kernels: threads, odd input, files that are refused, and where machine code is kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from numba.core.dispatcher import Dispatcher
from tokenizers import Tokenizer as Library
from tokenizers import models

from gateway.tokenization import bench
from gateway.tokenization.base import Tokenizer
from gateway.tokenization.kernels import bpe, jit, kept, unigram, wordpiece
from gateway.tokenization.late import LateTokenizer
from gateway.tokenization.loading import compiled, load_tokenizer
from gateway.tokenization.unsupported import UnsupportedError
from tests.tokenization.exact import vocabulary
from tests.tokenization.files import ONE_EACH, file_of, reference
from tests.tokenization.strings import strange

START = """
import sys
from pathlib import Path
{before}
import gateway.tokenization.loading as loading
assert sys.modules.get("numba") is None
late = loading.load_tokenizer(Path(sys.argv[1]))
assert late.backend == "tokenizers"
late.start()
tokenizer = late.wait()
assert late.backend == tokenizer.backend
print(tokenizer.backend, *tokenizer.encode(["The lazy dog"])[0])
{after}
"""


# As if all functions had fallen on one number: names and types alone must tell them apart.
ONE_NUMBER = """
import itertools
import numba.core.bytecode as bytecode
bytecode.FunctionIdentity._unique_ids = itertools.repeat(10**6)
from tests.tokenization.files import both
for form in {forms}:
    ours, library = both(form)
    texts = ["The lazy dog, and München", "自由 is 2,000"]
    assert [row.tolist() for row in ours.encode(texts)] == [row.tolist() for row in library.encode(texts)]
"""


def start(file: Path, cache: Path, before: str = "", after: str = "") -> str:
    """What a new process prints of a tokenizer.json."""
    run = subprocess.run(
        [sys.executable, "-c", START.format(before=before, after=after), str(file)],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.fixture
def t5(tmp_path: Path) -> Path:
    """A tokenizer.json that is served by a kernel."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(file_of("t5")))
    return path


def ids_of(path: Path) -> str:
    """The library's, as `start` prints them."""
    [row] = reference(path.read_text()).encode(["The lazy dog"])
    return " ".join(map(str, row.tolist()))


def test_without_numba_the_library_serves_and_says_so(t5: Path, tmp_path: Path) -> None:
    printed = start(t5, tmp_path, 'sys.modules["numba"] = None')
    assert printed.startswith("tokenizers (")
    assert "numba" in printed
    assert printed.endswith(ids_of(t5))


@pytest.mark.long
def test_where_no_cache_can_be_written_every_start_compiles(t5: Path, tmp_path: Path) -> None:
    """A file is where the folder would be: not even root can write there."""
    nowhere = tmp_path / "file"
    nowhere.touch()
    assert start(t5, nowhere) == f"unigram {ids_of(t5)}"


def test_a_folder_that_cannot_be_written_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept.cache_folder() is None

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "home", nobody)
        assert kept.cache_folder() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    folder = kept.cache_folder()
    assert folder is not None
    assert folder.is_dir()


def test_code_is_kept_and_made_anew_where_it_is_damaged(tmp_path: Path) -> None:
    path, cache = tmp_path / "tokenizer.json", tmp_path / "cache"
    path.write_text(json.dumps(file_of("uncased")))
    served = f"WordPiece {ids_of(path)}"
    compiled(reference(path.read_text()))
    assert kept.FOLDER is not None
    names = ("wordpiece.*", "trie.*")
    folder = cache / "bouquet" / kept.FOLDER.name
    folder.mkdir(parents=True)
    for file in (file for name in names for file in kept.FOLDER.glob(name)):
        shutil.copy(file, folder)
    codes = {file: file.read_bytes() for file in cache.rglob("*.code")}
    times = {file: file.stat().st_mtime_ns for file in codes}
    [encode] = [file for file in codes if file.name.startswith("wordpiece.encode-")]
    assert start(path, cache) == served
    assert {file: file.stat().st_mtime_ns for file in cache.rglob("*.code")} == times
    whole = codes[encode]
    encode.write_bytes(whole[:20_000] + bytes(len(whole) - 20_000))  # as if the power had failed
    for file in codes.keys() - {encode}:
        file.write_bytes(codes[file][:100])
    assert start(path, cache) == served
    assert all(len(file.read_bytes()) > 1000 for file in codes)
    assert encode.stat().st_mtime_ns > times[encode]


def test_no_two_functions_of_the_kernels_have_one_name() -> None:
    made = {id(value): value for module in (bpe, jit, unigram, wordpiece) for value in vars(module).values()}
    functions = [value.py_func for value in made.values() if isinstance(value, Dispatcher)]
    names = [(function.__module__, function.__qualname__) for function in functions]
    assert len(names) > 30
    assert len(set(names)) == len(names)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_kept_code_and_code_made_beside_it_stay_apart_whatever_numba_numbers_them(tmp_path: Path) -> None:
    for forms in (["uncased"], ["t5", "uncased", "qwen"], ["qwen", "uncased", "t5"]):
        subprocess.run(
            [sys.executable, "-c", ONE_NUMBER.format(forms=forms)],
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            check=True,
            timeout=150,
        )


def test_code_of_other_sources_goes_when_it_is_stale(tmp_path: Path) -> None:
    folders = {name: tmp_path / f"tokenization-{name * 16}" for name in "abc"}
    for folder in folders.values():
        folder.mkdir()
    (tmp_path / "tokenization-notes").mkdir()
    old_s = time.time() - 30 * 24 * 3600
    for name in (*"ab", "notes"):
        os.utime(folders.get(name, tmp_path / "tokenization-notes"), (old_s, old_s))
    kept.remove_stale(folders["a"])
    assert {path.name for path in tmp_path.iterdir()} == {
        folders["a"].name,
        folders["c"].name,
        "tokenization-notes",
    }


@pytest.mark.parametrize("form", ONE_EACH)
def test_threads_share_a_tokenizer(form: str) -> None:
    library = reference(file_of(form))
    ours = compiled(library)
    jobs = [list(strange(40, seed, vocabulary(library))) for seed in range(8)]
    with ThreadPoolExecutor(8) as threads:
        rows = list(threads.map(ours.encode, jobs))
    for job, own in zip(jobs, rows, strict=True):
        assert [row.tolist() for row in own] == [row.tolist() for row in library.encode(job)]


def test_the_library_serves_until_a_kernel_is_made(t5: Path) -> None:
    library, gate = reference(t5.read_text()), threading.Event()

    def make() -> Tokenizer:
        assert gate.wait(60)
        return compiled(library)

    late = LateTokenizer(library, make)
    literal = late.literal()
    late.start()
    texts = ["a <s> b", "The lazy dog"]
    before = [row.tolist() for row in late.encode(texts)]
    assert (late.backend, literal.backend) == ("tokenizers", "tokenizers")
    gate.set()
    assert late.wait().backend == literal.wait().backend == "unigram"
    assert [row.tolist() for row in late.encode(texts)] == before
    assert [row.tolist() for row in literal.encode(texts)] == [
        row.tolist() for row in library.literal().encode(texts)
    ]


def test_what_needs_no_kernel_imports_no_numba(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(Library(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")).to_str())
    assert start(path, tmp_path, after='assert "numba" not in sys.modules').startswith("tokenizers (")


@pytest.mark.parametrize("form", ["t5", "qwen"])
def test_lone_surrogates_fail_as_with_the_library(form: str) -> None:
    library = reference(file_of(form))
    with pytest.raises(Exception) as theirs:
        library.encode(["a\ud800b"])
    with pytest.raises(type(theirs.value)):
        compiled(library).encode(["fine", "a\ud800b"])


def test_nothing_is_compiled_by_a_request() -> None:
    for form, kernel in (
        ("t5", unigram),
        ("mbart", unigram),
        ("qwen", bpe),
        ("gpt-2", bpe),
        ("cased", wordpiece),
    ):
        ours = compiled(reference(file_of(form)))
        ours.encode(["", "é" * 3000, "x" * 100_000, "<s>", "字 " * 900] * 30, 7)
        assert len(kernel.encode.signatures) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("t5", {"normalizer": {"type": "Lowercase"}}),
        ("t5", {"pre_tokenizer": {"type": "Whitespace"}}),
        ("qwen", {"normalizer": {"type": "NFKC"}}),
        ("cased", {"normalizer": {"type": "Lowercase"}}),
        ("cased", {"pre_tokenizer": {"type": "Whitespace"}}),
        ("qwen", {"pre_tokenizer": {"type": "Whitespace"}}),
        (
            "gpt-2",
            {
                "pre_tokenizer": {
                    "type": "ByteLevel",
                    "add_prefix_space": True,
                    "use_regex": True,
                    "trim_offsets": True,
                }
            },
        ),
    ],
)
def test_what_no_kernel_does_is_left_to_the_library(
    form: str, change: dict[str, object], tmp_path: Path
) -> None:
    library = reference(file_of(form) | change)
    with pytest.raises(UnsupportedError):
        compiled(library)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(library.describe()))
    late = load_tokenizer(path)
    late.start()
    assert late.wait().backend.startswith("tokenizers (")


def test_the_benchmark_prints_a_line_a_length(
    t5: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_ROUNDS", 1)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    assert bench.main([str(text), "--tokenizer", str(t5)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("same ids") == 3
    assert "tokenizers" in printed

"""The command `python -m rose.aot.build_loop`: compile the event loop's own code with mypyc.

Needs `pip install .[compiled]` and a C compiler; no GPU. Takes two to three minutes on one core. What it
writes is for the Python that runs it and the sources as they are: after a change it is built again, or not
used.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from rose.aot.compiled_loop import (
    GROUP,
    MODULES,
    RECORD_NAME,
    built_folder,
    digest,
    is_current,
    source_root,
    sources,
)
from rose.aot.folders import default_output
from rose.aot.toolchain import ToolchainError

_IMPORT_ALL = """
import sys
from importlib import import_module
from pathlib import Path
from rose.aot.compiled_loop import MODULES, use_compiled_loop
state = use_compiled_loop([Path(sys.argv[1])])
for name in MODULES:
    import_module(name)
sys.exit(None if state == "compiled" else state)
"""


def for_mypyc(source: str) -> str:
    """`source` without what mypyc does not take and compiled code does not need; lines keep their numbers.

    Slots: a compiled class has no other attributes. Names deleted so that no traceback's frame keeps their
    objects: there are no such frames.
    """
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    edits = list(_edits(ast.parse(source)))
    for node, text in sorted(edits, key=lambda edit: (edit[0].lineno, edit[0].col_offset), reverse=True):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        end = lines[last][node.end_col_offset :]
        lines[first] = lines[first][: node.col_offset] + text.encode() + (b"\n" if last > first else end)
        for between in range(first + 1, last + 1):
            lines[between] = b"\n" if between < last else end
    return b"".join(lines).decode()


def _edits(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """What to put something else in the place of, and what."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id="__slots__")]):
                yield node, "pass"
            case ast.Delete(targets=targets) if all(isinstance(target, ast.Name) for target in targets):
                yield node, "pass"
            case ast.Call(func=ast.Name(id="dataclass"), keywords=keywords):
                yield from ((keyword.value, "False") for keyword in keywords if keyword.arg == "slots")


def build(out: Path) -> Path:
    """Compile MODULES below `out`, in place of what is there; where they are.

    Raises:
        SystemExit: mypyc does not take a module; it has said why.
        ToolchainError: mypyc or a C compiler is missing or failed, or what was built cannot be imported.
    """
    root = source_root()
    with TemporaryDirectory() as work:
        tree = Path(work) / "tree"
        _copy(root, tree)
        record = {"modules": MODULES, "sources": digest(tree)}
        for name in MODULES:
            source = tree / _path(name)
            source.write_text(for_mypyc(source.read_text("utf-8")), "utf-8")
        partial = Path(work) / "out"
        _compile(tree, built_folder(partial))
        (built_folder(partial) / RECORD_NAME).write_text(json.dumps(record, indent=1) + "\n")
        command = [sys.executable, "-c", _IMPORT_ALL, str(partial)]
        if subprocess.run(command, cwd=root, check=False).returncode:
            raise ToolchainError("what was built cannot be imported; nothing was replaced")
        return _replace(built_folder(out), built_folder(partial))


def _replace(built: Path, by: Path) -> Path:
    """Put `by` in the place of `built`, which is whole whenever a server looks at it, or not there."""
    beside = built.with_name(f".{built.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(by, beside)
    shutil.rmtree(built, ignore_errors=True)
    return beside.rename(built)


def _copy(root: Path, tree: Path) -> None:
    """The rooms' sources and how their types are checked."""
    for path in sources(root):
        copy = tree / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    if (root / "pyproject.toml").is_file():
        shutil.copyfile(root / "pyproject.toml", tree / "pyproject.toml")


def _compile(tree: Path, out: Path) -> None:
    try:
        from mypyc.build import mypycify
        from setuptools import Distribution
        from setuptools.command.build_ext import build_ext
        from setuptools.errors import BaseError
    except ImportError as error:
        raise ToolchainError(f"{error}; pip install '.[compiled]'") from error

    with chdir(tree):  # modules are named by their paths from here
        extensions = mypycify(
            [_path(name) for name in MODULES], opt_level="2", debug_level="0", group_name=GROUP
        )
        command = build_ext(Distribution({"name": GROUP, "ext_modules": extensions}))
        command.build_lib, command.build_temp = str(out), str(tree / "objects")
        command.ensure_finalized()
        try:
            command.run()
        except BaseError as error:
            raise ToolchainError(f"the C compiler failed: {error}") from error


def _path(name: str) -> str:
    return name.replace(".", "/") + ".py"


def main(argv: Sequence[str] | None = None) -> int:
    """Build; 0 if it went well."""
    parser = argparse.ArgumentParser(prog="python -m rose.aot.build_loop", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=default_output(), help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--if-needed", action="store_true", help="not if these sources are built already")
    arguments = parser.parse_args(argv)
    if arguments.if_needed and is_current(built_folder(arguments.out)):
        return 0
    started = time.monotonic()
    try:
        built = build(arguments.out)
    except ToolchainError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    size = sum(path.stat().st_size for path in built.rglob("*") if path.is_file())
    seconds = time.monotonic() - started
    sys.stdout.write(f"{built}: {len(MODULES)} modules, {size} bytes, {seconds:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

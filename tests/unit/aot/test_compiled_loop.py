"""The loop's compiled code: what of the sources is changed for mypyc, and when it is used."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rose.aot import build_loop, compiled_loop
from rose.aot.build_loop import for_mypyc
from rose.aot.compiled_loop import (
    GROUP,
    MODULES,
    RECORD_NAME,
    CompiledLoop,
    built_folder,
    digest,
    file_of,
    is_current,
    source_root,
    sources,
    use_compiled_loop,
)
from tests.forbidden import forbid

ASK = """
import sys
from pathlib import Path
from rose.aot.compiled_loop import use_compiled_loop
print(use_compiled_loop([Path(folder) for folder in sys.argv[1:]]))
import scheduler.batcher
print(scheduler.batcher.__file__)
"""


class WithoutSlots(ast.NodeTransformer):
    """What `for_mypyc` is said to do, done to a tree."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return ast.Pass() if ast.unparse(node.targets[0]) == "__slots__" else node

    def visit_Delete(self, node: ast.Delete) -> ast.AST:
        return ast.Pass() if all(isinstance(target, ast.Name) for target in node.targets) else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        for keyword in node.keywords:
            if ast.unparse(node.func) == "dataclass" and keyword.arg == "slots":
                keyword.value = ast.Constant(value=False)
        return node


def path_of(name: str) -> Path:
    return source_root() / (name.replace(".", "/") + ".py")


def write_record(folder: Path, of: str, shared: bytes = b"") -> None:
    """As if built of the sources with the digest `of`."""
    built = built_folder(folder)
    built.mkdir(parents=True)
    (built / RECORD_NAME).write_text(json.dumps({"sources": of}))
    for name in (f"{GROUP}__mypyc", *MODULES):
        file_of(built, name).parent.mkdir(parents=True, exist_ok=True)
        file_of(built, name).write_bytes(shared)


def asked(*folders: Path) -> list[str]:
    """What a new process says of them, and where it then takes the batcher from."""
    command = [sys.executable, "-c", ASK, *map(str, folders)]
    return subprocess.run(
        command, cwd=source_root(), check=True, text=True, stdout=subprocess.PIPE
    ).stdout.splitlines()


@pytest.mark.parametrize("name", MODULES)
def test_what_is_compiled_is_the_source_without_slots_on_the_same_lines(name: str) -> None:
    source = path_of(name).read_text("utf-8")
    changed = for_mypyc(source)
    wanted = ast.fix_missing_locations(WithoutSlots().visit(ast.parse(source)))
    assert ast.dump(ast.parse(changed)) == ast.dump(wanted)
    defined = [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    assert [n.lineno for n in ast.walk(ast.parse(changed)) if isinstance(n, ast.FunctionDef)] == defined


def test_statements_of_several_lines_leave_empty_ones() -> None:
    source = 'class A:\n    __slots__ = (\n        "é", "b",\n    )  # ä\n    x = 1\n\ndel A; y = 2\n'
    assert for_mypyc(source) == "class A:\n    pass\n\n  # ä\n    x = 1\n\npass; y = 2\n"


def compiled_classes() -> set[str]:
    return {
        node.name
        for name in MODULES
        for node in ast.walk(ast.parse(path_of(name).read_text("utf-8")))
        if isinstance(node, ast.ClassDef) and "Protocol" not in "".join(map(ast.unparse, node.bases))
    }


def test_two_on_one_line() -> None:
    assert for_mypyc("a = b = 1\ndel a; del b; c = 2\n") == "a = b = 1\npass; pass; c = 2\n"


def test_no_interpreted_class_inherits_from_a_compiled_one() -> None:
    compiled = compiled_classes()
    assert "RunCounts" in compiled
    for path in {*sources(source_root())} - {path_of(name) for name in MODULES}:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
                assert not bases & compiled, f"{path}: {node.name}"


def test_msgspec_fills_no_compiled_class() -> None:
    """It sets fields without `__init__`, which those do not allow."""
    compiled = compiled_classes()
    filled = re.compile(r"msgspec\.\S+\(.*?(?:, |type=|Decoder\()([A-Z]\w*)")
    found = {name for path in sources(source_root()) for name in filled.findall(path.read_text("utf-8"))}
    assert "EngineInfo" in found and not found & compiled


def test_nothing_built_is_no_error(tmp_path: Path) -> None:
    said, batcher = asked(tmp_path / "none", tmp_path)
    assert said == "interpreted: not built"
    assert batcher.endswith(".py")


def test_a_folder_out_of_reach_leaves_the_loop_interpreted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(tmp_path, digest(source_root()))
    monkeypatch.setattr(compiled_loop, "MODULES", ())  # which this process has imported already
    forbid(monkeypatch, tmp_path)
    why = use_compiled_loop([tmp_path, tmp_path.parent / "nowhere"])
    assert why.startswith("interpreted: ") and "Permission denied" in why and str(tmp_path) in why
    assert not is_current(built_folder(tmp_path))


def test_other_sources_are_never_used(tmp_path: Path) -> None:
    write_record(tmp_path, "0" * 64)
    said, batcher = asked(tmp_path)
    assert said == "interpreted: built from other sources, or damaged"
    assert batcher.endswith(".py")


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"sources": null}'])
def test_a_damaged_record_is_of_other_sources(tmp_path: Path, record: str) -> None:
    write_record(tmp_path, "")
    (built_folder(tmp_path) / RECORD_NAME).write_text(record)
    assert asked(tmp_path)[0] == "interpreted: built from other sources, or damaged"


@pytest.mark.parametrize("gone", ["scheduler.job", "gateway.routes.openai", f"{GROUP}__mypyc"])
def test_a_file_that_is_gone_is_damage(tmp_path: Path, gone: str) -> None:
    write_record(tmp_path, digest(source_root()))
    assert is_current(built_folder(tmp_path))
    file_of(built_folder(tmp_path), gone).unlink()
    assert not is_current(built_folder(tmp_path))


def test_what_cannot_be_loaded_is_interpreted_all_of_it(tmp_path: Path) -> None:
    write_record(tmp_path, digest(source_root()), shared=b"not a library")
    said, batcher = asked(tmp_path)
    assert said.startswith("interpreted: ") and GROUP in said
    assert batcher.endswith(".py")


def test_it_comes_before_everything_or_not_at_all(tmp_path: Path) -> None:
    import scheduler.batcher

    assert scheduler.batcher
    before = list(sys.meta_path)
    assert use_compiled_loop([tmp_path]).startswith("interpreted: imported already")
    assert sys.meta_path == before


def test_without_mypy_the_build_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mypyc.build", None)
    assert build_loop.main(["--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "mypyc" in said and "pip install '.[compiled]'" in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_only_its_modules_are_found(tmp_path: Path) -> None:
    finder = CompiledLoop(tmp_path)
    spec = finder.find_spec("gateway.routes.openai")
    assert spec is not None and spec.origin == str(file_of(tmp_path, "gateway.routes.openai"))
    assert Path(spec.origin).parent == tmp_path / "gateway" / "routes"
    assert finder.find_spec("gateway.routes") is None and finder.find_spec("asyncio") is None


def test_any_change_of_a_source_is_another_digest(tmp_path: Path) -> None:
    (tmp_path / "rose").mkdir()
    (tmp_path / "rose" / "a.py").write_text("A = 1\n")
    seen = {digest(tmp_path)}
    for name, text in (("a.py", "A = 2\n"), ("b.py", ""), ("b.txt", "no source")):
        (tmp_path / "rose" / name).write_text(text)
        seen.add(digest(tmp_path))
    (tmp_path / "rose" / "b.py").rename(tmp_path / "rose" / "c.py")
    assert len(seen | {digest(tmp_path)}) == 4

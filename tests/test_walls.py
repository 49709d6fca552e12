"""The walls of the house: what CONTRIBUTING says of files, functions, kernels and underscores, of every source file."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.native

HOUSE = Path(__file__).parents[1]
ROOT = HOUSE / "src" / "gossamer"
FILES = sorted(ROOT.rglob("*.py"))
BESIDE = [
    file for folder in ("demo", "benchmarks", "benchmarks/engine") for file in sorted((HOUSE / folder).glob("*.py"))
]
"""The demo and the engine of the benchmarks are no part of the package, and keep the same walls."""
BACKENDS = ("_core", "_torch", "_triton", "_gluon")
"""Folders whose modules those above them, and the same backends of other rooms, may import."""
LINES, FUNCTION, PARAMETERS = 600, 80, 24


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in BACKENDS


def borrowed(file: Path) -> Iterator[str]:
    """What a file imports by an underscored name: another file's, or a module of another folder."""
    here = ("gossamer", *file.relative_to(ROOT).parent.parts) if file.is_relative_to(ROOT) else ()
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("gossamer"):
            continue
        module = tuple((node.module or "").split("."))
        folder = ROOT.joinpath(*module[1:])
        for name in (alias.name for alias in node.names):
            is_module = (folder / f"{name}.py").exists() or (folder / name).is_dir()
            for i, part in enumerate((*module, name)):
                # A module belongs to its folder and what is below, any other name to its file alone.
                is_name = i == len(module) and not is_module
                if private(part) and (is_name or here[:i] != (*module, name)[:i]):
                    yield f"line {node.lineno}: {'.'.join((*module, name))}"


def functions(file: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef):
            yield node


def size(function: ast.FunctionDef) -> int:
    """Lines without the docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is None:
        return lines
    first = function.body[0]
    return lines - ((first.end_lineno or 0) - first.lineno + 1)


def breaches(file: Path) -> Iterator[str]:
    """What is wrong with a file, in words."""
    yield from borrowed(file)
    if (lines := len(file.read_text().splitlines())) > LINES:
        yield f"{lines} lines"
    for function in functions(file):
        if (lines := size(function)) > FUNCTION:
            yield f"{function.name} has {lines} lines"
        if function.name.endswith("_kernel") and (count := len(function.args.args)) > PARAMETERS:
            yield f"{function.name} has {count} parameters"


def test_walls() -> None:
    assert [f"{file.relative_to(HOUSE)}: {found}" for file in (*FILES, *BESIDE) for found in breaches(file)] == []


def imported(file: Path) -> Iterator[Path]:
    """The files of the package that a file imports when it is imported itself."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gossamer"):
            folder = ROOT.joinpath(*(node.module or "").split(".")[1:])
            for name in (alias.name for alias in node.names):
                places = folder / f"{name}.py", folder / name / "__init__.py", folder.with_suffix(".py")
                yield next((place for place in places if place.exists()), folder / "__init__.py")


def test_no_circle_of_files() -> None:
    left = {file: {*imported(file)} - {file} for file in FILES}
    while leaves := [file for file, others in left.items() if not others & left.keys()]:
        for file in leaves:
            del left[file]
    # A room's list of names imports its files, and no file imports it back.
    assert sorted(str(file.relative_to(ROOT)) for file in left) == []


def test_every_file_is_imported() -> None:
    """A file that no other names is left over, from a merge say. Users alone import `testing`, and `gossamer` finds
    its commands by name."""
    named: set[str] = set()
    for node in (node for file in FILES for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Import):
            named.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            named.update((str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)))
    modules = {file: ".".join(file.relative_to(ROOT.parent).with_suffix("").parts) for file in FILES}
    left = {name for file, name in modules.items() if not file.stem.startswith("__")} - named
    assert {name for name in left if not name.startswith("gossamer.cli.")} == {"gossamer.testing"}


def test_rowsparse_says_nothing_of_rooms_above() -> None:
    """Its operators serve them all, and a message names what the user called."""
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"_core", "rowsparse"}
    named = re.compile(rf"({'|'.join(rooms)})\.\w+")
    for file in (*ROOT.glob("_core/**/*.py"), *ROOT.glob("rowsparse/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not named.match(node.value), f"{file.name}, line {node.lineno}: {node.value}"


@pytest.mark.parametrize(
    "folder, line, count",
    [
        ("sae", "from gossamer.rowsparse.matmul import _matmul", 1),
        ("sae", "from gossamer.nn._plain import why_called", 1),
        ("sae", "from gossamer.nn import _recipe", 1),
        ("sae/_triton", "from gossamer.sae.encode import _context", 1),
        ("sae", "from gossamer.sae.encode import _context", 1),
        ("sae", "from gossamer.sae._torch import encode", 0),
        ("sae/_triton", "from gossamer.rowsparse._triton import pack", 0),
        ("nn/_parts", "from gossamer.nn._parts.text import Text", 0),
        ("cli", "from gossamer import __version__", 0),
    ],
)
def test_what_counts_as_borrowed(
    folder: str, line: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "gossamer"
    for name in (
        "nn/_recipe.py",
        "nn/_plain.py",
        "sae/_torch/encode.py",
        "rowsparse/_triton/pack.py",
        f"{folder}/a.py",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    (source / folder / "a.py").write_text(line + "\n")
    monkeypatch.setattr(f"{__name__}.ROOT", source)
    assert len(list(borrowed(source / folder / "a.py"))) == count

"""Names that a module is asked for by dot: each exists, in code too that only a GPU runs."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import gossamer

pytestmark = pytest.mark.native

ROOT = Path(gossamer.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def modules(tree: ast.AST) -> Iterator[tuple[str, ModuleType]]:
    """(name, module) of whatever the code of a file imports from gossamer that is a module; at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gossamer":
            folder = ROOT.joinpath(*(node.module or "").split(".")[1:])
            for alias in node.names:
                if (folder / f"{alias.name}.py").exists() or (folder / alias.name / "__init__.py").exists():
                    found = importlib.import_module(f"{node.module}.{alias.name}")
                    # A package may export a function under the name of the module that it comes from.
                    if getattr(importlib.import_module(node.module or ""), alias.name) is found:
                        yield alias.asname or alias.name, found


def missing(source: str) -> list[str]:
    tree = ast.parse(source)
    # A name that a function binds for itself may be anything there.
    own = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    known: dict[str, list[ModuleType]] = {}
    for name, module in modules(tree):
        if name not in own:
            known.setdefault(name, []).append(module)
    return [
        f"line {node.lineno}: {node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known
        if not any(hasattr(module, node.attr) for module in known[node.value.id])
    ]


def test_names_exist() -> None:
    pytest.importorskip("triton")
    assert [f"{file.relative_to(ROOT)}: {found}" for file in FILES for found in missing(file.read_text())] == []


def test_what_is_missing_is_found() -> None:
    source = "from gossamer._core import launch\n\n\ndef run():\n    launch.cdiv(3, 2)\n    launch.transient(3)\n"
    assert missing(source) == ["line 6: launch.transient"]


ROOMS = [m.name for m in pkgutil.iter_modules(gossamer.__path__) if m.ispkg and not m.name.startswith("_")]
NAMED = re.compile(rf"({'|'.join(ROOMS)})((\.[A-Za-z]\w*)+)(: .*)?", re.S)


def test_errors_name_functions_that_exist() -> None:
    """`room.function`, as an operator's name or at the beginning of a message, is a public name."""
    wrong = []
    importlib.import_module("gossamer.nn")  # takes functions of other rooms from their files
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            given = NAMED.fullmatch(node.value) if isinstance(node, ast.Constant) and type(node.value) is str else None
            if given is None or "integrations" in file.parts or given[2].endswith((".md", ".safetensors")):
                continue
            found = importlib.import_module(f"gossamer.{given[1]}")
            for name in given[2][1:].split("."):
                found = getattr(found, name, None)
            if found is None:
                wrong.append(f"{file.relative_to(ROOT)}, line {node.lineno}: {given[0][:60]}")
    assert wrong == []

"""Calls of the package's functions in tests and benchmarks fit their signatures, also where only a GPU runs them."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1]
ROOMS = sorted({path.parent for top in ("tests", "benchmarks") for path in (FOLDER / top).rglob("*.py")})


def found(node: ast.expr, names: dict[str, Any]) -> Any:
    """The object of the package that an expression such as `sae.decode` names, or None."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = found(node.value, names)
    ours = (getattr(owner, "__name__", "") if inspect.ismodule(owner) else getattr(owner, "__module__", "")) or ""
    return getattr(owner, node.attr, None) if ours.startswith("gossamer") else None


def misfits(file: Path) -> Iterator[str]:
    """Calls of a file that do not fit; none of a file that needs a package which is not there."""
    tree = ast.parse(file.read_text())
    try:
        names = dict(vars(importlib.import_module(".".join(file.relative_to(FOLDER).with_suffix("").parts))))
    except (ImportError, pytest.skip.Exception):
        return
    # A name that a function makes is not the module's.
    local = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    local |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node not in tree.body}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or (isinstance(call.func, ast.Name) and call.func.id in local):
            continue
        function = found(call.func, names)
        if not str(getattr(function, "__module__", "")).startswith("gossamer"):
            continue
        starred = any(isinstance(given, ast.Starred) for given in call.args) or any(
            k.arg is None for k in call.keywords
        )
        try:
            bind = inspect.signature(function).bind_partial
        except (TypeError, ValueError):
            continue
        try:
            bind(*([] if starred else call.args), **{k.arg: k for k in call.keywords if k.arg is not None})
        except TypeError as error:
            yield f"{file.relative_to(FOLDER)}:{call.lineno}: {ast.unparse(call.func)}: {error}"


@pytest.mark.native
@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(FOLDER)))
def test_arguments_have_parameters(room: Path) -> None:
    assert [misfit for file in sorted(room.glob("*.py")) for misfit in misfits(file)] == []

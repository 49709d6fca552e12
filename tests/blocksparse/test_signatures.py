"""docs/blocksparse.md shows every public function with the arguments that it has."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gossamer import blocksparse, nn

pytestmark = pytest.mark.native

PAGE = Path(__file__).parents[2] / "docs" / "blocksparse.md"
METHODS = {"layout": blocksparse.Layout, "x": blocksparse.BlockSparseTensor}


def shown() -> Iterator[tuple[str, str]]:
    """(name, arguments) of the calls in the tables' first columns."""
    for line in PAGE.read_text().partition("## Capacity")[0].splitlines():
        if line.startswith("| `"):
            for code in re.findall(r"`([^`]*)`", line.split(" | ")[0]):
                if match := re.fullmatch(r"([A-Za-z_.]+)\((.*)\)", code):
                    yield match[1], match[2]


SHOWN = dict(shown())


def function_of(name: str) -> Any:
    first, _, rest = name.rpartition(".")
    if first in METHODS:
        return getattr(METHODS[first], rest)
    owner = {"": blocksparse, "Layout": blocksparse.Layout, "nn": nn}[first]
    return getattr(owner, rest)


def written(signature: inspect.Signature) -> str:
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    return str(inspect.Signature(plain))[1:-1]


@pytest.mark.parametrize("name", [name for name in SHOWN if name not in ("x.exp", "x.relu")])
def test_arguments(name: str) -> None:
    want = written(inspect.signature(function_of(name)))
    assert ast.dump(ast.parse(f"f = lambda {SHOWN[name]}: 0")) == ast.dump(ast.parse(f"f = lambda {want}: 0")), want


def test_every_function_is_shown() -> None:
    functions = {name for name in blocksparse.__all__ if inspect.isfunction(getattr(blocksparse, name))}
    assert functions <= SHOWN.keys()

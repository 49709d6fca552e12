"""The examples in public docstrings run and print what they say."""

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest
import torch

import gossamer

ROOMS = sorted(module.name for module in pkgutil.iter_modules(gossamer.__path__) if module.name not in ("_core", "cli"))


def public(room: ModuleType) -> list[str]:
    return [name for name in getattr(room, "__all__", []) if callable(getattr(room, name))]


@pytest.mark.parametrize("name", ROOMS)
def test_examples(name: str) -> None:
    names = {"torch": torch, "gossamer": gossamer}
    for other in ("rowsparse", "testing", "sae", name):
        room = importlib.import_module(f"gossamer.{other}")
        names |= {key: getattr(room, key) for key in room.__all__} | {other: room}
    room = names[name]
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    finder = doctest.DocTestFinder(recurse=False)
    tests = finder.find(room, name, globs=dict(names))
    for item in public(room):
        found = finder.find(names[item], f"{name}.{item}", globs=dict(names))
        if name != "nn" and not isinstance(names[item], type):
            assert any(test.examples for test in found), f"{name}.{item} has no example"
        tests += found
    report: list[str] = []
    for test in tests:
        torch.manual_seed(0)
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)

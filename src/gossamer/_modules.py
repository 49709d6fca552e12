"""Modules of a package that are imported when they are first asked for."""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any


def on_demand(package: dict[str, Any], *others: str) -> tuple[Callable[[str], ModuleType], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of the package that has these globals, for all of its modules but private ones and
    `others`."""
    name = package["__name__"]
    found = sorted(m.name for m in iter_modules(package["__path__"]) if not m.name.startswith("_"))
    modules = [module for module in found if module not in others]

    def get(module: str) -> ModuleType:
        if module in modules:
            return import_module(f"{name}.{module}")
        raise AttributeError(f"module {name!r} has no attribute {module!r}")

    return get, lambda: [*package, *modules]

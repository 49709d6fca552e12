"""gossamer: sparse and fused transformer operators for PyTorch."""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

__version__ = "0.1.0"

_ROOMS = tuple(sorted(m.name for m in iter_modules(__path__) if not m.name.startswith("_") and m.name != "cli"))


def __getattr__(name: str) -> ModuleType:
    """A room is imported when it is first asked for."""
    if name in _ROOMS:
        return import_module(f"gossamer.{name}")
    raise AttributeError(f"module 'gossamer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_ROOMS]

"""Other libraries' models with gossamer's operators.

`sae_lens` has `patch(obj)`, undone by `unpatch(obj)`. `transformers` has the same for models of Hugging Face, and gives
the activations of a model that reads text.
"""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

__all__: list[str] = []

_LIBRARIES = tuple(sorted(m.name for m in iter_modules(__path__) if not m.name.startswith("_")))


def __getattr__(name: str) -> ModuleType:
    """A library's module is imported when it is first asked for."""
    if name in _LIBRARIES:
        return import_module(f"gossamer.integrations.{name}")
    raise AttributeError(f"module 'gossamer.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_LIBRARIES]

"""The mode of a module while a function uses it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """A module, and all in it, in evaluation mode; afterwards each is again in the mode that it was in."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    training = [module for module in modules if module.training]
    try:
        if training:
            model.eval()
        yield
    finally:
        for module in training:
            module.training = True

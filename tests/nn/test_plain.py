"""The result that depends on a module's parts: kept from call to call, and found anew after any change of a part."""

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

from gossamer.nn.plain import of_parts, why_called


def make() -> Any:
    return nn.ModuleDict({"up": nn.Linear(2, 3), "down": nn.Linear(3, 2), "act": nn.GELU()})


def looked(module: nn.Module) -> tuple[Any, int]:
    """The result, and how often it is found in two calls."""
    calls: list[None] = []

    def find() -> Any:
        calls.append(None)
        parts: Any = module._modules
        return why_called(up=parts["up"], down=parts["down"]), parts["act"].approximate

    names = ("up", "down", "act", "absent")
    of_parts(module, names, find)
    return of_parts(module, names, find), len(calls)


def _hook(*_: Any) -> None:
    return None


def _parametrized(module: Any) -> None:
    parametrize.register_parametrization(module["up"], "weight", nn.Identity())


def _integers(parameter: nn.Parameter) -> None:
    parameter.requires_grad_(False).data = torch.ones(3, 2, dtype=torch.int8)


class _Odd(torch.Tensor):
    pass


def _subclassed() -> torch.Tensor:
    return nn.Parameter(torch.ones(3, 2).as_subclass(_Odd))


def _rehooked(module: Any) -> None:
    """As a common line that removes all hooks."""
    module["up"]._forward_hooks = OrderedDict()
    looked(module)
    module["up"].register_forward_hook(_hook)


def _forward(module: Any) -> None:
    module["up"].forward = MethodType(nn.Linear.forward, module["up"])


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda module: module["up"].register_forward_hook(_hook),
    "hook before": lambda module: module["down"].register_forward_pre_hook(_hook),
    "hook of gradients": lambda module: module["up"].register_full_backward_hook(_hook),
    "hook of the activation": lambda module: module["act"].register_forward_hook(_hook),
    "layer": lambda module: module.update({"up": nn.Linear(2, 3)}),
    "parameter": lambda module: setattr(module["up"], "weight", nn.Parameter(torch.ones(3, 2))),
    "no bias": lambda module: setattr(module["down"], "bias", None),
    "dtype": lambda module: module.to(torch.bfloat16),
    "integers": lambda module: _integers(module["up"].weight),
    "bias": lambda module: setattr(module["up"], "bias", nn.Parameter(torch.ones(3))),
    "class": _parametrized,
    "class of a parameter": lambda module: torch.utils.swap_tensors(module["up"].weight, _subclassed()),
    "hooks": _rehooked,
    "forward": _forward,
    "argument of the activation": lambda module: setattr(module["act"], "approximate", "tanh"),
}


@pytest.mark.native
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change: Callable[[Any], Any]) -> None:
    module = make()
    before, found = looked(module)
    assert found == 1 and looked(module)[1] == 0 and before == (None, "none")
    change(module)
    parts: Any = module._modules
    assert looked(module)[0] == (why_called(up=parts["up"], down=parts["down"]), parts["act"].approximate)


@pytest.mark.native
def test_a_hook_on_all_modules_is_seen_while_it_is_there() -> None:
    module = make()
    looked(module)
    handle = register_module_forward_hook(_hook)
    assert looked(module)[0][0] == "a hook listens to all modules"
    handle.remove()
    assert looked(module)[0][0] is None


@pytest.mark.native
def test_a_part_that_is_replaced_is_let_go() -> None:
    module = make()
    looked(module)
    old = weakref.ref(module["up"].weight), weakref.ref(module["down"])
    module["up"].weight = nn.Parameter(torch.ones(3, 2))
    module["down"] = nn.Linear(3, 2)
    gc.collect()
    assert old[0]() is None and old[1]() is None


@pytest.mark.native
def test_copies_find_their_own() -> None:
    module = make()
    looked(module)
    for other in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        other["up"] = nn.Bilinear(2, 2, 3)
        assert "Bilinear" in looked(other)[0][0]
        module["up"] = nn.Linear(2, 3)
    assert looked(module)[0][0] is None

"""Calls of every operator of the library with the arguments that the public functions give it, recorded once.

The CPU's implementations run while calls are recorded, and tensors move to a GPU afterwards: a GPU would compile
kernels for all scenarios first. Kernels in the interpreter take minutes, so that a process of its own records there.
"""

import functools
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer._core import ops


class Recorder(TorchDispatchMode):
    """Keeps the arguments of every call of an operator of the library."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple[Any, ...]]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == ops.NAMESPACE:
            # An operator of a backward pass has no gradient of its own.
            record = functools.partial(_copied, with_grad=torch._C._current_graph_task_id() == -1)
            self.calls[func.name()].append(tuple(record(arg) for arg in args))
        return func(*args, **(kwargs or {}))


def _copied(arg: Any, with_grad: bool) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    return arg.detach().clone().requires_grad_(with_grad and arg.requires_grad)


def _moved(arg: Any, device: torch.device) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    return arg.detach().to(device).requires_grad_(arg.requires_grad)


def _kind(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.dim(), arg.dtype, arg.requires_grad
    return tuple(arg) if isinstance(arg, list) else arg


Calls = dict[str, list[tuple[Any, ...]]]
# A room keeps its scenarios in tests/<room>/operator_calls.py.
ROOMS = sorted(file.parent.name for file in Path(__file__).parent.glob("*/operator_calls.py"))


@functools.cache
def recorded(device: torch.device) -> Calls:
    """Operator, as "gossamer::name" -> its calls in all scenarios, one for each kind of arguments."""
    if ops.INTERPRET:
        return _recorded_elsewhere()
    if device.type != "cpu":
        found = recorded(torch.device("cpu"))
        return {name: [tuple(_moved(arg, device) for arg in args) for args in calls] for name, calls in found.items()}
    calls: dict[str, dict[Any, tuple[Any, ...]]] = defaultdict(dict)
    for room in ROOMS:
        torch.manual_seed(0)
        with Recorder() as recorder:
            import_module(f"tests.{room}.operator_calls").calls(device)
        for name, found in recorder.calls.items():
            for args in found:
                kind = tuple(map(_kind, args))
                calls[name].setdefault(kind, args)
    return {name: list(kinds.values()) for name, kinds in calls.items()}


def _recorded_elsewhere() -> Calls:
    switches = ("GOSSAMER_INTERPRET", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in switches}
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "calls.pt")
        subprocess.run([sys.executable, "-m", "tests.recorded", file], check=True, env=environment)
        found: Calls = torch.load(file, weights_only=False)
    return found


def registered() -> list[str]:
    """Every operator of the library, as "gossamer::name"."""
    for room in ROOMS:
        import_module(f"tests.{room}.operator_calls")
    return sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{ops.NAMESPACE}::"))


def operator_of(name: str) -> Any:
    """The overload of an operator by its "gossamer::name"."""
    return getattr(torch.ops.gossamer, name.split("::")[1]).default


if __name__ == "__main__":
    torch.save(recorded(torch.device("cpu")), sys.argv[1])

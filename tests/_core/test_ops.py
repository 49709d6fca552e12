"""Operators as `register` makes them: their gradient, with and without PyTorch's dispatcher, and what it costs."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer import rowsparse

ROWS = rowsparse.pack(torch.eye(3), capacity="exact")


def product(weight: Tensor) -> Tensor:
    """`[3, 4]` by an operator that does not change it."""
    return rowsparse.matmul(ROWS, weight)


class Listens(TorchDispatchMode):
    """A mode that changes nothing, so that calls go through the dispatcher."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def calls_of(function: Callable[[], Any]) -> int:
    """How many functions Python calls, its own and C's."""
    count = 0

    def step(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    function()
    sys.setprofile(step)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_saved_tensors_pass_through_hooks_as_anybody_elses() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        # PyTorch turns gradients off for a hook, which may turn them on again.
        with torch.enable_grad():
            assert (2 * torch.ones(1, requires_grad=True)).requires_grad
        kept.append(tensor)
        return tensor

    for listen in (False, True):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if listen:
                with Listens():
                    out = product(x)
            else:
                out = product(x)
        # The values, indices and spans of the container, and the weight.
        assert len(kept) == 4
        out.sum().backward()


def test_a_backward_pass_is_compiled_behind_an_eager_forward_pass() -> None:
    from torch._dynamo import compiled_autograd

    x = torch.randn(3, 4, requires_grad=True)
    out = product(x).square().sum()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        out.backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
    torch._dynamo.reset()


def test_what_has_outlived_a_transform_has_its_gradient() -> None:
    """It looks like a plain tensor, and belongs to a graph that is gone."""
    x = torch.randn(3, 4, requires_grad=True)
    left = []

    def inner(x: Tensor) -> Tensor:
        left.append(2 * x)
        return left[0].sum()

    torch.func.grad(inner)(x)
    product(left[0]).square().sum().backward()
    torch.testing.assert_close(x.grad, 8 * x.detach())


def test_inference_mode_records_nothing_whatever_is_said_of_gradients() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with torch.inference_mode(), torch.enable_grad():
        out = rowsparse.matmul(rowsparse.pack(torch.randn(2, 3).relu()), x)
        assert not out.requires_grad and not product(torch.randn(3, 4, requires_grad=True)).requires_grad


@pytest.mark.parametrize("capacity", [None, "exact"])
def test_gradients_come_in_batches(capacity: str | None) -> None:
    x = torch.randn(4, 32).relu().requires_grad_()
    values = rowsparse.pack(x, capacity=capacity).packed.values
    many = torch.randn(3, *values.shape)
    batched = torch.autograd.grad(values, x, many, is_grads_batched=True, retain_graph=True)[0]
    alone = [torch.autograd.grad(values, x, one, retain_graph=True)[0] for one in many]
    torch.testing.assert_close(batched, torch.stack(alone))

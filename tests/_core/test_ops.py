"""Operators as `register` makes them: their gradient, with and without PyTorch's dispatcher, and what it costs."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer import rowsparse
from gossamer._core import ops
from gossamer.sae.squared_error import squared_error


class Listens(TorchDispatchMode):
    """A mode that changes nothing, so that calls go through the dispatcher."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`ops.register`, for operators on the CPU that are gone after the test."""
    library = torch.library.Library("gossamer_test", "FRAGMENT")
    monkeypatch.setattr(ops, "_library", library)
    monkeypatch.setattr(ops, "NAMESPACE", "gossamer_test")
    # The CPU's implementation in the interpreter, too.
    monkeypatch.setattr(ops, "INTERPRET", False)
    yield lambda schema, cpu, **options: ops.register(schema, cpu=cpu, fake=cpu, **options)
    library._destroy()


def scaled(register: Callable[..., Any], name: str, numbers: int) -> Any:
    """x and y times 2, with integers behind them that nobody reads."""

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        assert len(inputs) == 2 + numbers
        ctx.count = len(inputs)

    def backward(ctx: Any, grad_x: Tensor, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        assert len(ctx.needs_input_grad) == ctx.count
        grads = (2 * grad if needed else None for grad, needed in zip((grad_x, grad_y), ctx.needs_input_grad))
        return *grads, *(None,) * numbers

    given = "".join(f", int n{i}" for i in range(numbers))
    return register(
        f"{name}(Tensor x, Tensor y{given}) -> (Tensor, Tensor)",
        lambda x, y, *_: (2 * x, 2 * y),
        setup_context=setup,
        backward=backward,
    )


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


@pytest.mark.parametrize("dispatched", [False, True])
def test_calls_of_a_gradient_by_number_of_arguments(register: Callable[..., Any], dispatched: bool) -> None:
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))

    def step(operator: Any, numbers: int) -> None:
        call = operator if dispatched else ops.undispatched(operator, x, y)
        torch.autograd.grad(sum(call(x, y, *range(numbers))).sum(), (x, y))

    few, many = (scaled(register, name, numbers) for name, numbers in (("few", 1), ("many", 41)))
    grown = calls_of(lambda: step(many, 41)) - calls_of(lambda: step(few, 1))
    # `autograd.Function.apply` looks at each argument, and whether it is a tensor.
    assert grown <= (2 * 40 if dispatched else 0)


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_both_ways_give_the_same(register: Callable[..., Any], needed: tuple[bool, bool]) -> None:
    operator = scaled(register, "scaled", 3)
    x, y = (torch.randn(3, requires_grad=need) for need in needed)
    direct = ops.undispatched(operator, x, y)
    with Listens():
        assert ops.undispatched(operator, x, y) is operator
    assert direct is not operator
    leaves = [leaf for leaf in (x, y) if leaf.requires_grad]
    for call in (direct, operator):
        out = call(x, y, 1, 2, 3)
        assert all(torch.equal(got, 2 * given) and got.requires_grad for got, given in zip(out, (x, y)))
        for grad in torch.autograd.grad(sum(out).sum(), leaves):
            assert torch.equal(grad, torch.full((3,), 2.0))


def test_nothing_is_recorded_where_nothing_needs_a_gradient(register: Callable[..., Any]) -> None:
    operator = scaled(register, "scaled", 1)
    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    for call in (ops.undispatched(operator, x, x), operator):
        assert not any(out.requires_grad for out in call(x, x, 1))
    with torch.no_grad():
        for call in (ops.undispatched(operator, w, w), operator):
            assert not any(out.requires_grad for out in call(w, w, 1))


@pytest.mark.parametrize("dispatched", [False, True])
def test_defaults_reach_what_is_kept_for_the_gradient(register: Callable[..., Any], dispatched: bool) -> None:
    """The dispatcher leaves them out."""

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.factor, ctx.shift = inputs

    operator = register(
        "shifted(Tensor x, float factor, float shift=1.5) -> Tensor",
        lambda x, factor, shift=1.5: factor * x + shift,
        setup_context=setup,
        backward=lambda ctx, grad: (grad * (ctx.factor + ctx.shift), None, None),
    )
    x = torch.ones(2, requires_grad=True)
    call = operator if dispatched else ops.undispatched(operator, x)
    (grad,) = torch.autograd.grad(call(x, 2.0, 1.5).sum(), x)
    assert grad.tolist() == [3.5, 3.5]


def test_an_operator_without_a_gradient_leaves_it_to_the_dispatcher(register: Callable[..., Any]) -> None:
    operator = register("doubled(Tensor x) -> Tensor", lambda x: 2 * x)
    x = torch.ones(2)
    assert torch.equal(ops.undispatched(operator, x)(x), 2 * x)
    x.requires_grad_()
    assert ops.undispatched(operator, x)(x).requires_grad == operator(x).requires_grad


def test_saved_tensors_pass_through_hooks_as_anybody_elses() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        # PyTorch turns gradients off for a hook, which may turn them on again.
        with torch.enable_grad():
            assert (2 * tensor.detach().requires_grad_()).requires_grad
        kept.append(tensor)
        return tensor

    for listen in (False, True):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if listen:
                with Listens():
                    out = squared_error(x, x.detach())
            else:
                out = squared_error(x, x.detach())
        assert len(kept) == 2
        out.sum().backward()


def test_a_backward_pass_is_compiled_behind_an_eager_forward_pass() -> None:
    from torch._dynamo import compiled_autograd

    x = torch.randn(3, 4, requires_grad=True)
    out = squared_error(x, torch.zeros(3, 4)).sum()
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
    squared_error(left[0], torch.zeros(3, 4)).sum().backward()
    torch.testing.assert_close(x.grad, 8 * x.detach())


def test_inference_mode_records_nothing_whatever_is_said_of_gradients() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with torch.inference_mode(), torch.enable_grad():
        out = rowsparse.matmul(rowsparse.pack(torch.randn(2, 3).relu()), x)
        assert not out.requires_grad and not squared_error(x, x.detach()).requires_grad


@pytest.mark.parametrize("capacity", [None, "exact"])
def test_gradients_come_in_batches(capacity: str | None) -> None:
    x = torch.randn(4, 32).relu().requires_grad_()
    values = rowsparse.pack(x, capacity=capacity).packed.values
    many = torch.randn(3, *values.shape)
    batched = torch.autograd.grad(values, x, many, is_grads_batched=True, retain_graph=True)[0]
    alone = [torch.autograd.grad(values, x, one, retain_graph=True)[0] for one in many]
    torch.testing.assert_close(batched, torch.stack(alone))


def test_a_launcher_gets_contiguous_tensors_but_for_strided_ones(
    register: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "INTERPRET", True)
    seen: list[tuple[Any, ...]] = []

    def launcher(x: Tensor, y: Tensor, z: Tensor | None, into: Tensor, factor: int, last: Tensor | None) -> Tensor:
        seen.append((x, y, z, into, factor, last))
        return x + y

    operator = register(
        "laid(Tensor x, Tensor y, Tensor? z, Tensor(a!) into, int factor, Tensor? last=None) -> Tensor",
        lambda x, y, *_: x + y,
        gpu=lambda: launcher,
        strided=("y",),
    )
    x, y, z, into = (torch.randn(4, 6).t() for _ in range(4))
    for call in (operator, ops.undispatched(operator, x, y)):
        assert torch.equal(call(x, y, z, into, 2, None), x + y)
        given = seen.pop()
        assert given[0].is_contiguous() and torch.equal(given[0], x)
        assert given[1].stride() == y.stride() and given[1].data_ptr() == y.data_ptr()
        assert given[2].is_contiguous() and torch.equal(given[2], z)
        assert given[3].data_ptr() == into.data_ptr() and given[4:] == (2, None)
        call(x.contiguous(), y, None, into, 2, None)
        assert seen.pop()[2] is None
    with pytest.raises(AssertionError, match="laid_not has no argument w"):
        register("laid_not(Tensor x) -> Tensor", lambda x: 2 * x, strided=("w",))

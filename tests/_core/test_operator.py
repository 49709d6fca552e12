"""Operators that are one record: their schema, their gradient with and without PyTorch's dispatcher, and its cost."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import gossamer
from gossamer import gemm as gemm
from gossamer._core import operator, ops
from gossamer._core.operator import OPERATORS, Operator, Strided, Written, schema_of
from tests._core.test_ops import Listens, calls_of


class Scaled(NamedTuple):
    x: Tensor
    y: Strided | None
    factor: float
    sizes: tuple[int, ...] = ()


def scaled(call: Scaled) -> tuple[Tensor, Tensor]:
    assert type(call) is Scaled
    return call.factor * call.x, call.x.sum() if call.y is None else call.y * call.x.detach()


def slope(call: Scaled, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    assert type(call) is type(needs) is Scaled and call.x is None
    shape, second = kept
    assert tuple(second.shape) == shape
    found: dict[str, Tensor | None] = {}
    if needs.x and grads[0] is not None:
        found["x"] = call.factor * grads[0]
    if needs.y and grads[1] is not None:
        found["y"] = grads[1] * second / call.y
    return found


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Operator[Any]]]:
    """`operator.register`, for operators that are gone after the test; the launcher is the CPU's function."""
    library = torch.library.Library("gossamer_test", "FRAGMENT")
    monkeypatch.setattr(ops, "_library", library)
    monkeypatch.setattr(ops, "NAMESPACE", "gossamer_test")
    monkeypatch.setattr(ops, "INTERPRET", False)
    monkeypatch.setattr(operator, "OPERATORS", {})
    monkeypatch.setattr(operator, "PATHS", {})

    def make(record: Any, cpu: Any, launcher: Any = None, **options: Any) -> Operator[Any]:
        return operator.register(record, **{"cpu": cpu, "fake": cpu, **options})(launcher or (lambda: cpu))

    yield make
    library._destroy()


@pytest.fixture
def op(register: Callable[..., Operator[Any]]) -> Operator[Any]:
    return register(
        Scaled, scaled, backward=slope, saved=("y",), keep=lambda call, results: (tuple(results[1].shape), results[1])
    )


def ways(op: Operator[Any], call: Any) -> tuple[Any, Any]:
    """The results of a call straight and through the dispatcher."""
    straight = op(call)
    with Listens():
        return straight, op(call)


def test_schemas() -> None:
    class SaeTanhL0(NamedTuple):
        x: Tensor
        y: Strided | None
        z: Written
        n: int
        scale: float
        sizes: tuple[int, ...]
        dtype: torch.dtype | None
        rule: str
        causal: bool
        w: Written

    class Found(NamedTuple):
        out: Tensor
        lse: Tensor

    fields = (
        "Tensor x, Tensor? y, Tensor(a!) z, SymInt n, float scale, SymInt[] sizes, ScalarType? dtype, str rule, "
        "bool causal, Tensor(b!) w"
    )
    assert schema_of(SaeTanhL0, Tensor) == f"sae_tanh_l0_({fields}) -> Tensor"
    assert schema_of(SaeTanhL0, type(None)) == f"sae_tanh_l0_({fields}) -> ()"
    for made in (tuple[Tensor, Tensor], Found):
        assert schema_of(SaeTanhL0, made) == f"sae_tanh_l0_({fields}) -> (Tensor, Tensor)"


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_both_ways_give_the_same(op: Operator[Any], needed: tuple[bool, bool]) -> None:
    x, y = (torch.rand(3, requires_grad=need) for need in needed)
    leaves = [leaf for leaf in (x, y) if leaf.requires_grad]
    wanted = {id(x): torch.full((3,), 2.0), id(y): x.detach()}
    for out in ways(op, Scaled(x, y, 2.0, (3, 4))):
        assert torch.equal(out[0], 2 * x) and torch.equal(out[1], x * y)
        for leaf, grad in zip(leaves, torch.autograd.grad(out[0].sum() + out[1].sum(), leaves)):
            torch.testing.assert_close(grad, wanted[id(leaf)])


def test_a_result_that_nothing_used_has_no_gradient(op: Operator[Any]) -> None:
    x, y = (torch.rand(3, requires_grad=True) for _ in range(2))
    for out in ways(op, Scaled(x, y, 2.0)):
        first, second = torch.autograd.grad(out[0].sum(), (x, y), allow_unused=True)
        assert torch.equal(first, torch.full((3,), 2.0)) and second is None


def test_nothing_is_recorded_where_nothing_needs_a_gradient(op: Operator[Any]) -> None:
    x = torch.rand(3, requires_grad=True)
    with torch.no_grad():
        assert not any(out.requires_grad for found in ways(op, Scaled(x, x, 2.0)) for out in found)
    with torch.inference_mode(), torch.enable_grad():
        assert not any(out.requires_grad for out in op(Scaled(x, x, 2.0)))
    assert not any(out.requires_grad for found in ways(op, Scaled(x.detach(), None, 2.0)) for out in found)


def test_results_without_a_gradient(register: Callable[..., Operator[Any]]) -> None:
    op = register(Scaled, scaled, backward=lambda *_: {}, differentiable=1)
    x = torch.rand(3, requires_grad=True)
    assert all([out.requires_grad for out in found] == [True, False] for found in ways(op, Scaled(x, x, 2.0)))


def test_a_gradient_of_no_field_is_an_error(register: Callable[..., Operator[Any]]) -> None:
    op = register(Scaled, scaled, backward=lambda *_: {"z": None})
    with pytest.raises(AssertionError, match=r"Scaled has no field \{'z'\}"):
        op(Scaled(torch.rand(3, requires_grad=True), None, 2.0))[0].sum().backward()


@pytest.mark.parametrize("straight", [True, False])
def test_second_derivatives_are_refused(register: Callable[..., Operator[Any]], straight: bool) -> None:
    backward = lambda call, kept, grads, needs: {"x": grads[0]}  # noqa: E731
    op = register(Scaled, scaled, backward=backward, once_differentiable="room.scaled")
    x = torch.rand(3, requires_grad=True)
    (out, *_) = ways(op, Scaled(x, None, 2.0))[0 if straight else 1]
    with pytest.raises(NotImplementedError, match=r"room\.scaled: second derivatives"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    torch.autograd.grad(out.sum(), x)


def test_a_step_of_a_backward_pass_refuses_a_gradient(register: Callable[..., Operator[Any]]) -> None:
    op = register(Scaled, scaled, once_differentiable="room.scaled")
    x = torch.rand(3, requires_grad=True)
    op(Scaled(x.detach(), None, 2.0))
    with pytest.raises(NotImplementedError, match=r"room\.scaled: second derivatives"):
        op(Scaled(x, None, 2.0))
    with Listens(), pytest.raises(NotImplementedError, match=r"room\.scaled: second derivatives"):
        op(Scaled(x, None, 2.0))


def test_neither_pass_sees_autocast(register: Callable[..., Operator[Any]]) -> None:
    def multiplied(call: Scaled) -> Tensor:
        assert not torch.is_autocast_enabled("cpu")
        return call.x @ call.x

    def backward(call: Scaled, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
        return {"x": grads[0] @ call.x}

    op = register(Scaled, multiplied, backward=backward, saved=("x",))
    x = torch.rand(3, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for out in ways(op, Scaled(x, None, 2.0)):
            assert out.dtype is torch.float32
            (grad,) = torch.autograd.grad(out, x, torch.eye(3))
            assert torch.equal(grad, x.detach())


def test_launchers_get_contiguous_tensors_except_strided_ones(
    register: Callable[..., Operator[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "INTERPRET", True)
    seen: list[Scaled] = []

    def launch(call: Scaled) -> tuple[Tensor, Tensor]:
        seen.append(call)
        return scaled(call)

    op = register(Scaled, scaled, lambda: launch)
    x, y = (torch.rand(4, 6).t() for _ in range(2))
    for out in ways(op, Scaled(x, y, 2.0)):
        assert torch.equal(out[0], 2 * x)
        call = seen.pop()
        assert call.x.is_contiguous() and torch.equal(call.x, x) and call.y is not None
        assert call.y.stride() == y.stride() and call.y.data_ptr() == y.data_ptr()
    op(Scaled(x, None, 2.0))
    assert seen.pop().y is None


@pytest.mark.parametrize("by_path", [False, True])
def test_paths(register: Callable[..., Operator[Any]], monkeypatch: pytest.MonkeyPatch, by_path: bool) -> None:
    monkeypatch.setattr(ops, "INTERPRET", True)
    asked: list[str] = []

    def choose(call: Scaled) -> str:
        asked.append("chosen")
        return "few" if call.x.numel() < 4 else "many"

    def launchers(path: str) -> Any:
        asked.append(path)
        return lambda call: (call.x + 1 if path == "few" else call.x - 1, call.x)

    launch = launchers if by_path else lambda: lambda call: (call.x * 3, call.x)
    op = register(Scaled, scaled, launch, choose_path=choose, paths={"few": "x has 3", "many": "x has more"})
    few, many = Scaled(torch.ones(3), None, 2.0), Scaled(torch.ones(5), None, 2.0)
    for _ in range(2):
        assert op(few)[0].tolist() == [2.0 if by_path else 3.0] * 3
        assert op(many)[0].tolist() == [0.0 if by_path else 3.0] * 5
    # A launcher that chooses by itself is not asked for a name where no profiler shows it.
    assert asked.count("chosen") == (4 if by_path else 0) and asked.count("few") == int(by_path)
    with profile(activities=[ProfilerActivity.CPU]) as shown:
        op(many)
    assert "gossamer::_core.scaled/many" in {event.key for event in shown.key_averages()}


def test_a_graph_gets_plain_tuples(register: Callable[..., Operator[Any]]) -> None:
    """PyTorch before 2.12 puts no `NamedTuple` into a graph."""

    class Size(NamedTuple):
        height: int
        width: int

    op, fields = register(Scaled, scaled), []

    def record(graph: Any, inputs: Any) -> Any:
        fields.extend(node.args[-1] for node in graph.graph.nodes if node.target is op.overload)
        return graph

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        return op(Scaled(x, None, 2.0, Size(3, 4)))

    torch.compile(call, fullgraph=True, backend=record)(torch.ones(3))
    assert fields == [(3, 4)] and type(fields[0]) is tuple


def test_every_path_has_its_condition() -> None:
    assert {"linear_glu", "linear_pack", "gated_mlp_bwd_"} <= OPERATORS.keys()
    for name, found in OPERATORS.items():
        assert found.overload._schema.name == f"gossamer::{name}" and found.name.split(".")[0] in dir(gossamer)
        assert all(sentence and not sentence.endswith(".") for sentence in found.paths.values())
        assert (found.choose_path is None) == (not found.paths), name
        if found.choose_path is not None:
            returned = get_type_hints(found.choose_path)["return"]
            assert set(found.paths) == set(get_args(returned)), name


def test_calls_of_python_by_number_of_arguments(register: Callable[..., Operator[Any]]) -> None:
    """`autograd.Function.apply` looks at each argument; nothing else in a call and its gradient may."""
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))

    def step(numbers: int) -> Callable[[], Any]:
        fields = [("x", Tensor), ("y", Tensor), *[(f"n{i}", int) for i in range(numbers)]]
        record: Any = NamedTuple(f"Of{numbers}", fields)  # type: ignore[misc]
        record.__module__ = "gossamer.room.records"

        def doubled(call: Any) -> tuple[Tensor, Tensor]:
            return 2 * call[0], 2 * call[1]

        def backward(call: Any, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
            return {"x": 2 * grads[0], "y": 2 * grads[1]}

        op = register(record, doubled, backward=backward, saved=("x",))
        return lambda: torch.autograd.grad(sum(op(record(x, y, *range(numbers)))).sum(), (x, y))

    assert calls_of(step(41)) - calls_of(step(1)) <= 0

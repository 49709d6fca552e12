"""(x @ weight.T) at a pattern and its gradients, against dense float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.rowsparse import Rows, pack, sampled_matmul
from gossamer.testing import assert_close, assert_exact, dense64, random_rows
from tests import strategies
from tests.strategies import PACKINGS


@given(data=st.data())
def test_any_shape(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    pattern = data.draw(strategies.containers(dtype, device))
    depth = data.draw(strategies.DEPTHS)
    m, n = pattern.num_rows, pattern.num_columns
    x = data.draw(strategies.matrix(m, depth, dtype, device)).reshape(*pattern.shape[:-1], depth).requires_grad_()
    weight = data.draw(strategies.matrix(n, depth, dtype, device)).requires_grad_()
    out = sampled_matmul(x, weight, pattern)
    assert out.shape == pattern.shape and out.dtype is dtype
    flat, w = x.detach().double().reshape(m, depth), weight.detach().double()
    product = flat @ w.t()
    assert_exact(out.packed.values, strategies.at_entries(product, pattern), name="values")
    over, mask = strategies.over(pattern)[:, None], None
    if pattern.source is not None:
        mask = over & (pattern.source != 0)
        assert_exact(torch.where(over, out.source, 0), product * mask, name="source")
    grad = random_rows(
        out.packed.values.shape, l0=out.packed.values.shape[-1], dtype=dtype, device=device, integers=True
    )
    torch.autograd.backward(out.packed.values, grad, retain_graph=mask is not None)
    # A matrix with the gradient at the entries: in float64, by the definition of the format.
    values, spans = torch.where(pattern.packed.indices < 0, 0, grad), pattern.packed.spans * ~strategies.over(pattern)
    dense = dense64(strategies.changed(pattern, values=values, spans=spans, source=None))
    dense = dense.reshape(m, n)
    if mask is not None:
        grad_source = random_rows((m, n), l0=n, dtype=dtype, device=device, integers=True)
        out.source.backward(grad_source)
        dense = dense + grad_source.double() * mask
    assert_exact(x.grad.reshape(m, depth), dense @ w, name="gradient of x")
    assert_exact(weight.grad, dense.t() @ flat, name="gradient of weight")


@pytest.mark.parametrize("options", PACKINGS, ids=str)
def test_error_budget(
    options: dict[str, int], dtype: torch.dtype, device: torch.device, generator: torch.Generator, scale: int
) -> None:
    m, n, d = 5 * scale + 1, 130 * scale + 3, 70 * scale
    counts = [0, 1, 7, n, 30] + [scale * 3] * (m - 5)
    pattern = strategies.pack_as(
        random_rows((m, n), l0=counts, device=device, dtype=dtype, generator=generator), **options
    )
    mask = dense64(pattern) != 0
    x, weight = (torch.randn(r, d, device=device, generator=generator).to(dtype).requires_grad_() for r in (m, n))
    out = sampled_matmul(x, weight, pattern)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    reference, plain = (exact[0] @ exact[1].t()) * mask, (x @ weight.t()) * mask
    result = dense64(out)
    assert_close(result.to(dtype), reference64=reference, plain=plain)
    grad = torch.randn(m, n, device=device, generator=generator).to(dtype)
    held, grads_at = [out.packed.values], [strategies.at_entries(grad, pattern).to(dtype)]
    if out.source is not None:
        held.append(out.source)
        grads_at.append(grad)
    ours = torch.autograd.grad(held, (x, weight), grads_at)
    usual = torch.autograd.grad(plain, (x, weight), grad)
    wanted = torch.autograd.grad(reference, exact, grad.double())
    for name, a, b, c in zip(("x", "weight"), ours, wanted, usual):
        assert_close(a, reference64=b, plain=c, name=name)


def test_special_values(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    options = {"dtype": dtype, "device": device, "generator": generator, "integers": True}
    x, weight = random_rows((3, 8), l0=8, **options), random_rows((30, 8), l0=8, **options)
    x[0, 3], x[1, 2], weight[7, 1] = math.nan, math.inf, -math.inf
    mask = random_rows((3, 30), l0=5, **options)
    mask[:, 7] = 1
    for chosen in ({"capacity": 8}, {"capacity": 1}, {"capacity": "exact"}):
        out = dense64(sampled_matmul(x, weight, strategies.pack_as(mask, **chosen)))
        assert_exact(out.to(dtype), torch.where(mask != 0, x.double() @ weight.double().t(), 0))


@pytest.mark.parametrize("index", [30, -2, 1 << 30])
def test_bad_indices(index: int, dtype: torch.dtype, device: torch.device, mode: str) -> None:
    """They raise on the CPU and become NaN on the GPU."""
    indices, spans = torch.tensor([3, 4, 5, 6], dtype=torch.int32, device=device), torch.tensor([[0, 2], [2, 2]])
    pattern = Rows(torch.ones(4, dtype=dtype, device=device), indices, spans.to(device), (2, 30))
    indices[3] = index
    x, weight = torch.ones(2, 8, dtype=dtype, device=device), torch.ones(30, 8, dtype=dtype, device=device)
    if mode == "cpu":
        with pytest.raises(ValueError, match=rf"indices must lie in \[0, N\) with N = 30.* {index}"):
            sampled_matmul(x, weight, pattern)
    else:
        assert_exact(sampled_matmul(x, weight, pattern).values, torch.tensor([8, 8, 8, math.nan]).double())


@pytest.mark.native
@pytest.mark.parametrize("options", PACKINGS, ids=str)
def test_gradcheck(options: dict[str, int]) -> None:
    pattern = strategies.pack_as(random_rows((2, 2, 9), l0=[0, 2, 9, 3], dtype=torch.float64), **options)
    x = torch.randn(2, 2, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)

    def results(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        out = sampled_matmul(x, weight, pattern)
        return (out.packed.values,) if out.source is None else (out.packed.values, out.source)

    torch.autograd.gradcheck(results, (x, weight))


@pytest.mark.parametrize("options", PACKINGS, ids=str)
def test_second_derivatives(options: dict[str, int], device: torch.device, generator: torch.Generator) -> None:
    filled = random_rows((4, 30), l0=[0, 2, 9, 3], device=device, generator=generator)
    pattern = strategies.pack_as(filled, **options)
    leaves = [torch.randn(rows, 5, device=device, generator=generator) for rows in (4, 30)]
    towards = [torch.randn(leaf.shape, device=device, generator=generator) for leaf in leaves]

    def twice(dtype: torch.dtype, product) -> list[Tensor]:
        x, weight = (leaf.to(dtype).requires_grad_() for leaf in leaves)
        first = torch.autograd.grad(product(x, weight).pow(3).sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum((g * t.to(dtype)).sum() for g, t in zip(first, towards)), (x, weight))

    def dense(x: Tensor, weight: Tensor) -> Tensor:
        return torch.where(filled != 0, x @ weight.t(), 0)

    ours = twice(torch.float32, lambda x, weight: sampled_matmul(x, weight, pattern).to_dense())
    for a, b, c in zip(ours, twice(torch.float64, dense), twice(torch.float32, dense)):
        assert_close(a, reference64=b, plain=c)


@pytest.mark.native
def test_bitwise_reproducible(device: torch.device, generator: torch.Generator, scale: int) -> None:
    pattern = pack(random_rows((8 * scale, 300), density=0.1, device=device, generator=generator), capacity=32)
    x, weight = (torch.randn(r, 40, device=device, generator=generator).requires_grad_() for r in (8 * scale, 300))
    results = []
    for _ in range(2):
        # The buffers hold whatever was in memory where no entry is.
        out = sampled_matmul(x, weight, pattern).to_dense()
        results.append((out, *torch.autograd.grad(out, (x, weight), out)))
    for first, second in zip(*results):
        assert torch.equal(first, second)


@pytest.mark.native
def test_autocast(device: torch.device, generator: torch.Generator) -> None:
    pattern = pack(random_rows((6, 50), l0=5, device=device, generator=generator))
    x, weight = (torch.randn(r, 16, device=device, generator=generator).requires_grad_() for r in (6, 50))
    with torch.autocast(device.type, torch.bfloat16):
        out = sampled_matmul(x, weight, pattern)
    assert out.dtype is torch.bfloat16
    out.packed.values.sum().backward()
    assert x.grad.dtype is weight.grad.dtype is torch.float32
    mask = (dense64(pattern) != 0).double()
    wanted = mask @ weight.detach().bfloat16().double()
    plain = mask.bfloat16() @ weight.detach().bfloat16()
    assert_close(x.grad.bfloat16(), reference64=wanted, plain=plain)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"pattern": torch.ones(2, 5)}, TypeError, "pattern must be rowsparse.Rows, got Tensor"),
        ({"x": torch.ones(2, 4)}, ValueError, r"x must have shape \[..., D\] = \[2, 3\] like pattern and weight"),
        ({"x": torch.ones(1, 3)}, ValueError, r"x must have shape \[..., D\] = \[2, 3\] .* got \[1, 3\]"),
        ({"x": torch.ones(2, 3).long()}, TypeError, "x must be float32.* got int64"),
        ({"weight": torch.ones(4, 3)}, ValueError, r"weight must have shape \[N, D\] with N = 5 like pattern"),
        ({"weight": torch.ones(5, 3).half()}, TypeError, "x and weight must have one dtype, got float32 and float16"),
        ({"weight": torch.ones(5, 3, device="meta")}, ValueError, "pattern must be on meta like weight, got cpu"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change, error: type[Exception], message: str) -> None:
    arguments = {"x": torch.ones(2, 3), "weight": torch.ones(5, 3), "pattern": pack(torch.ones(2, 5)), **change}
    with pytest.raises(error, match=f"rowsparse.sampled_matmul: {message}"):
        sampled_matmul(**arguments)


def test_spans_in_any_order(device: torch.device) -> None:
    """Rows that a user has laid out by hand, with an empty first and last one."""
    indices = torch.tensor([9, 1, 1, 3], dtype=torch.int32, device=device)
    spans = torch.tensor([[4, 1, 0], [0, 3, 0]], device=device)
    pattern = Rows(torch.zeros(4, device=device), indices, spans, (3, 4))
    x = torch.arange(6.0, device=device).view(3, 2)
    out = sampled_matmul(x, torch.arange(8.0, device=device).view(4, 2), pattern)
    assert out.packed.values.tolist() == [0, 13, 13, 33] and out.source is None


@pytest.mark.native
@pytest.mark.parametrize("l0", [[0, 0, 3, 17, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0], 17])
def test_on_the_cpu_many_entries_are_picked_from_blocks(
    l0: int | list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows at a time; few are gathered. What is not picked may be NaN."""
    from gossamer.rowsparse._torch import sampled_matmul as on_cpu

    monkeypatch.setattr(on_cpu, "CHUNK", 40)
    pattern = random_rows((7, 17), l0=l0, dtype=dtype)
    x, weight = (random_rows(shape, l0=5, dtype=dtype, integers=True) for shape in ((7, 5), (17, 5)))
    weight[(pattern == 0).all(0)] = float("nan")
    wanted = torch.where(pattern != 0, x.double() @ weight.double().t(), 0)
    for rows in (pack(pattern, capacity=17), pack(pattern, capacity="exact")):
        assert_exact(sampled_matmul(x, weight, rows).to_dense(), wanted)

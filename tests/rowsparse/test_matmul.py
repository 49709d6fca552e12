"""rows @ weight and its gradients, against dense float64."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.rowsparse import matmul, pack
from gossamer.testing import assert_close, assert_exact, dense64, random_rows, random_slots
from tests import strategies
from tests.strategies import PACKINGS

NAN, INF = math.nan, math.inf


@given(data=st.data())
def test_any_shape(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    rows = data.draw(strategies.containers(dtype, device))
    depth = data.draw(strategies.DEPTHS)
    weight = data.draw(strategies.matrix(rows.num_columns, depth, dtype, device))
    out = matmul(rows, weight)
    assert out.shape == (*rows.shape[:-1], depth) and out.dtype is dtype
    assert_exact(out, dense64(rows) @ weight.double())


@given(data=st.data())
def test_any_shape_backward(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    """At entries of rows that did not overflow grad @ weight.T goes to the values, else to the source."""
    rows = data.draw(strategies.containers(dtype, device))
    depth = data.draw(strategies.DEPTHS)
    leaf = data.draw(strategies.matrix(rows.num_columns, depth, dtype, device)).requires_grad_()
    grad = data.draw(strategies.matrix(rows.num_rows, depth, dtype, device)).reshape(*rows.shape[:-1], depth)
    values = rows.packed.values.detach().requires_grad_()
    source = None if rows.source is None else rows.source.detach().clone().requires_grad_()
    matmul(strategies.changed(rows, values=values, source=source), leaf).backward(grad)
    flat = grad.double().reshape(rows.num_rows, depth)
    dense = dense64(rows).reshape(rows.num_rows, rows.num_columns)
    assert_exact(leaf.grad, dense.t() @ flat, name="weight")
    wanted = flat @ leaf.detach().double().t()
    if source is not None:
        assert_exact(source.grad, wanted * strategies.over(rows)[:, None], name="source")
    assert_exact(values.grad, strategies.at_entries(wanted, rows), name="values")


@pytest.mark.parametrize("options", PACKINGS, ids=str)
def test_error_budget(
    options: dict[str, int], dtype: torch.dtype, device: torch.device, generator: torch.Generator, scale: int
) -> None:
    m, n, d = 5 * scale + 1, 130 * scale + 3, 33 * scale
    counts = [0, 1, 7, n, 30] + [scale * 3] * (m - 5)
    x = random_rows((m, n), l0=counts, dtype=dtype, device=device, generator=generator)
    x[:, :2] = 0
    weight = torch.randn(n, d, device=device, generator=generator).to(dtype)
    x.requires_grad_(), weight.requires_grad_()
    out = matmul(strategies.pack_as(x, **options), weight)
    plain = x @ weight
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    reference = exact[0] @ exact[1]
    assert_close(out, reference64=reference, plain=plain)
    grad = torch.randn(m, d, device=device, generator=generator).to(dtype)
    inputs = (x, weight)
    grads = torch.autograd.grad(out, inputs, grad)
    plain_grads = torch.autograd.grad(plain, inputs, grad)
    exact_grads = torch.autograd.grad(reference, exact, grad.double())
    for name, ours, usual, wanted in zip(("x", "weight"), grads, plain_grads, exact_grads):
        held = (x != 0) if name == "x" else torch.ones_like(ours, dtype=torch.bool)
        assert_close(ours, reference64=wanted * held, plain=usual * held, name=name)


def test_long_rows(dtype: torch.dtype, device: torch.device, generator: torch.Generator, scale: int) -> None:
    """A sum of thousands of entries, and a weight row that thousands of rows use, are as exact as a dense product's."""
    n = 200 * scale
    x = random_rows((8, n), l0=[n, 5, n, 3, n, 0, 1, n // 2], dtype=dtype, device=device, generator=generator)
    weight = torch.randn(n, 64, device=device, generator=generator).to(dtype).requires_grad_()
    out = matmul(pack(x, capacity=n), weight)
    assert_close(out, reference64=x.double() @ weight.detach().double(), plain=x @ weight)
    x = x.t().contiguous()
    grad = torch.randn(n, 64, device=device, generator=generator).to(dtype)
    ours = torch.autograd.grad(matmul(pack(x, capacity=8), weight[:8]), weight, grad)[0][:8]
    magnitude = (x.double().square().t() @ grad.double().square()).sqrt()
    wanted = x.double().t() @ grad.double()
    assert_close(ours, reference64=wanted, plain=x.t() @ grad, length=n, magnitude=magnitude)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("capacity", [200, 8])
def test_out_dtype(
    out_dtype: torch.dtype, capacity: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Sums are float32 whatever the inputs are, also in rows that overflowed."""
    x = random_rows((4, 200), l0=[3, 8, 40, 200], dtype=dtype, device=device, generator=generator)
    weight = torch.randn(200, 64, device=device, generator=generator).to(dtype)
    out = matmul(pack(x, capacity=capacity), weight, out_dtype=out_dtype)
    assert out.dtype is out_dtype
    reference = x.double() @ weight.double()
    magnitude = (x.double().square() @ weight.double().square()).sqrt()
    for row in range(4):
        plain = (x[row].float() @ weight.float()).to(out_dtype)
        # One row of a dense product may be nearly exact by luck, and is on some CPUs.
        sums = {"length": int(x[row].count_nonzero()), "magnitude": magnitude[row]}
        assert_close(out[row], reference64=reference[row], plain=plain, name=f"row {row}", **sums)


def test_unselected_weights_do_not_show(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """NaN and Inf in the weight show where they are selected, and nowhere else."""
    x = random_rows((3, 40), l0=[4, 0, 6], dtype=dtype, device=device, generator=generator, integers=True)
    x[:, 7], x[2, 7], x[2, 9] = 0, 1, 2
    weight = random_rows((40, 10), l0=10, dtype=dtype, device=device, generator=generator, integers=True)
    weight[7, 3], weight[9, 4], weight[11] = NAN, -INF, NAN
    x[:, 11] = 0
    selected = torch.where(x[..., None] != 0, x[..., None].double() * weight.double(), 0).sum(1)
    for options in ({"capacity": 8}, {"capacity": "exact"}):
        assert_exact(matmul(strategies.pack_as(x, **options), weight), selected)
    overflowed = matmul(pack(x, capacity=5), weight)
    assert_exact(overflowed[:2], selected[:2])
    assert overflowed[2].isnan().all(), "a row that overflowed is a dense product, which spreads NaN"


def test_special_values(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    x = random_rows((5, 40), l0=4, dtype=dtype, device=device, generator=generator, integers=True)
    x[0, 3], x[1, 5], x[2, 3], x[2, 4], x[4, 39] = NAN, INF, INF, -INF, torch.finfo(dtype).max
    weight = random_rows((40, 10), l0=10, dtype=dtype, device=device, generator=generator, integers=True)
    for options in ({"capacity": 8}, {"capacity": 1}, {"capacity": "exact"}, {"room": 5}):
        out = matmul(strategies.pack_as(x, **options), weight)
        reference = x.double() @ weight.double()
        assert_exact(out[:4], reference[:4])
        # float32 sums of one of the largest numbers and small ones: rounded as float32 rounds them.
        assert_close(out[4], reference64=reference[4], plain=(x[4].float() @ weight.float()).to(dtype))


def test_source_may_be_wrong_where_nothing_overflowed(dtype: torch.dtype, device: torch.device) -> None:
    """A container's source is right at least for overflowed rows; elsewhere it is not read."""
    x = random_rows((4, 30), l0=[2, 9, 0, 30], dtype=dtype, device=device, integers=True)
    rows = pack(x, capacity=4)
    source = x.masked_fill((rows.counts <= 4)[:, None], NAN)
    weight = random_rows((30, 8), l0=8, dtype=dtype, device=device, integers=True).requires_grad_()
    out = matmul(strategies.changed(rows, source=source), weight)
    assert_exact(out, x.double() @ weight.double())
    out.backward(torch.ones_like(out))
    assert_exact(weight.grad, x.double().t() @ torch.ones_like(out).double())


@pytest.mark.parametrize("n", [2, 40])
def test_gradients_of_columns_with_many_entries(n: int, dtype: torch.dtype, device: torch.device) -> None:
    """In one all are so long, in the other one is among short ones."""
    x = random_rows((80, n), l0=2, dtype=dtype, device=device, integers=True)
    x[:, 0] = 1
    x.requires_grad_()
    weight = random_rows((n, 5), l0=5, dtype=dtype, device=device, integers=True).requires_grad_()
    grad = random_rows((80, 5), l0=5, dtype=dtype, device=device, integers=True)
    found = torch.autograd.grad(matmul(pack(x, capacity=4), weight), (x, weight), grad)
    held = x.detach() != 0
    assert_exact(found[0], held * (grad.double() @ weight.detach().double().t()))
    assert_exact(found[1], x.detach().double().t() @ grad.double())


@pytest.mark.parametrize("index", [30, -2, 1 << 30])
@pytest.mark.parametrize("apart", [True, False])
def test_bad_indices(index: int, apart: bool, dtype: torch.dtype, device: torch.device, mode: str) -> None:
    """They raise on the CPU, and make their row NaN on the GPU, where raising would take a sync."""
    rows = strategies.with_index(apart, index, dtype, device)
    weight = torch.ones(30, 8, dtype=dtype, device=device)
    if mode == "cpu":
        with pytest.raises(ValueError, match=rf"indices must lie in \[0, N\) with N = 30.* {index}"):
            matmul(rows, weight)
    else:
        assert_exact(matmul(rows, weight), torch.tensor([2.0, NAN, 2.0]).double()[:, None].expand(3, 8))


@pytest.mark.native
@pytest.mark.parametrize("options", PACKINGS, ids=str)
def test_gradcheck(options: dict[str, int]) -> None:
    x = random_rows((2, 2, 9), l0=[0, 2, 9, 3], dtype=torch.float64)
    held = x != 0
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    values = x[held].requires_grad_()
    torch.autograd.gradcheck(
        lambda v, w: matmul(strategies.pack_as(x.masked_scatter(held, v), **options), w),
        (values, weight),
        fast_mode=True,
    )


@pytest.mark.native
@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck_with_repeated_columns(packed: bool) -> None:
    rows = random_slots((3, 5), 7, packed=packed, dtype=torch.float64)
    values = rows.values.nan_to_num(0).requires_grad_()
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda v, w: matmul(replace(rows, values=v), w), (values, weight))


@pytest.mark.parametrize("options", [{"capacity": 20}, {"capacity": "exact"}, {"room": 1300}], ids=str)
def test_weight_rows_that_are_selected_often(
    options: dict[str, int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """More entries in a block of weight rows than one program takes."""
    x = random_rows((80, 40), l0=2, dtype=dtype, device=device, generator=generator, integers=True)
    x[:, 1:16] = 1
    weight = random_rows((40, 9), l0=9, dtype=dtype, device=device, generator=generator, integers=True).requires_grad_()
    grad = random_rows((80, 9), l0=9, dtype=dtype, device=device, generator=generator, integers=True)
    (ours,) = torch.autograd.grad(matmul(strategies.pack_as(x, **options), weight), weight, grad)
    assert_close(ours, reference64=x.double().t() @ grad.double(), plain=x.t() @ grad)


def test_wide_weight_rows_that_are_selected_often(device: torch.device, generator: torch.Generator) -> None:
    """Half gradients of float32 weights: small tiles of runs beside large tiles of steps."""
    x = random_rows((80, 40), l0=2, device=device, generator=generator, integers=True)
    x[:, 1:16] = 1
    weight = torch.randn(40, 140, device=device, generator=generator).requires_grad_()
    grad = random_rows((80, 140), l0=140, dtype=torch.float16, device=device, generator=generator, integers=True)
    out = matmul(pack(x, capacity=20), weight, out_dtype=torch.float16)
    assert_exact(torch.autograd.grad(out, weight, grad)[0], x.double().t() @ grad.double())


def test_second_derivatives_without_a_source(device: torch.device, generator: torch.Generator) -> None:
    """Rows that overflowed, of which the values alone are differentiated, hold nothing for the derivatives."""
    rows = pack(random_rows((6, 30), l0=[1, 2, 0, 9, 3, 4], device=device, generator=generator), capacity=3)
    weight = torch.randn(30, 5, device=device, generator=generator)
    for packed in (rows, strategies.pack_as(random_rows((4, 30), l0=5, device=device), room=12)):
        values = packed.packed.values.detach().requires_grad_()
        grad = torch.randn(packed.num_rows, 5, device=device, generator=generator).requires_grad_()
        out = matmul(strategies.changed(packed, values=values), weight)
        (first,) = torch.autograd.grad(out, values, grad, create_graph=True)
        (second,) = torch.autograd.grad(first.nan_to_num().square().sum(), grad)
        over = strategies.over(packed)
        assert second.isfinite().all() and (second[over] == 0).all() and (second[~over] != 0).any()


@pytest.mark.parametrize("options", PACKINGS, ids=str)
def test_second_derivatives(
    options: dict[str, int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    x = random_rows((4, 30), l0=[0, 2, 9, 3], device=device, generator=generator)
    held = x != 0
    weight = torch.randn(30, 5, device=device, generator=generator)
    towards = [torch.randn(t.shape, device=device, generator=generator) for t in (x, weight)]

    def twice(dtype: torch.dtype, product) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight)]
        first = torch.autograd.grad(product(*leaves).pow(3).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum((g * t.to(dtype)).sum() for g, t in zip(first, towards)), leaves)

    ours = twice(dtype, lambda x, w: matmul(strategies.pack_as(x, **options), w))
    plain = twice(dtype, lambda x, w: torch.where(held, x, 0) @ w)
    wanted = twice(torch.float64, lambda x, w: torch.where(held, x, 0) @ w)
    # Three products one behind the other, added in another order: twice the usual room.
    for a, b, c in zip(ours, wanted, plain):
        assert_close(a, reference64=b, plain=c, factor=4.0)


@pytest.mark.native
def test_float32_gradients_are_bitwise_reproducible(
    device: torch.device, generator: torch.Generator, scale: int
) -> None:
    x = random_rows((8 * scale, 300), density=0.1, device=device, generator=generator)
    weight = torch.randn(300, 40, device=device, generator=generator)
    grad = torch.randn(len(x), 40, device=device, generator=generator)
    results = []
    for _ in range(2):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = matmul(pack(leaves[0], capacity=32), leaves[1])
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    for first, second in zip(*results):
        assert torch.equal(first, second)


@pytest.mark.native
def test_autocast(device: torch.device, generator: torch.Generator) -> None:
    x = random_rows((6, 100), l0=[0, 1, 5, 20, 100, 7], device=device, generator=generator).requires_grad_()
    weight = torch.randn(100, 16, device=device, generator=generator, requires_grad=True)
    half = x.bfloat16(), weight.bfloat16()
    for capacity in (100, 10):
        with torch.autocast(device.type, torch.bfloat16):
            out = matmul(pack(x, capacity=capacity), weight)
        assert out.dtype is torch.bfloat16
        assert_close(out, reference64=half[0].double() @ half[1].double(), plain=half[0] @ half[1])
        grads = torch.autograd.grad(out, (x, weight), torch.ones_like(out))
        plain = torch.autograd.grad(half[0] @ half[1], half, torch.ones_like(out), retain_graph=True)
        ones = torch.ones_like(out).double()
        held = x != 0
        assert_close(grads[0], reference64=(ones @ half[1].double().t()) * held, plain=plain[0] * held)
        assert_close(grads[1], reference64=half[0].double().t() @ ones, plain=plain[1])


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"rows": torch.ones(2, 5)}, TypeError, "rows must be rowsparse.Rows, got Tensor"),
        ({"weight": torch.ones(4, 3)}, ValueError, r"weight must have shape \[N, D\] with N = 5 like rows, got"),
        ({"weight": torch.ones(5)}, ValueError, r"weight must have shape \[N, D\] .* got \[5\]"),
        ({"weight": torch.ones(5, 3).int()}, TypeError, "weight must be float32.* got int32"),
        ({"weight": torch.ones(5, 3).half()}, TypeError, "rows and weight must have one dtype, got float32 and"),
        ({"weight": torch.ones(5, 3, device="meta")}, ValueError, "rows must be on meta like weight, got cpu"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype must be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change, error: type[Exception], message: str) -> None:
    arguments = {"rows": pack(torch.ones(2, 5)), "weight": torch.ones(5, 3), "out_dtype": None, **change}
    with pytest.raises(error, match=f"rowsparse.matmul: {message}"):
        matmul(arguments["rows"], arguments["weight"], out_dtype=arguments["out_dtype"])

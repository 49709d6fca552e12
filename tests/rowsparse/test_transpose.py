"""Row-sparse transposition, against the definition of the formats."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.rowsparse import matmul, pack, sampled_matmul, transpose
from gossamer.testing import assert_close, assert_exact, dense64, random_rows
from tests import strategies


@given(data=st.data())
def test_any_shape(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    rows = data.draw(strategies.containers(dtype, device))
    out = transpose(rows)
    assert out.shape == (rows.num_columns, rows.num_rows) and out.dtype is dtype
    assert bool(out.overflowed) == bool(rows.overflowed)
    wanted = dense64(rows).reshape(rows.num_rows, rows.num_columns).t()
    assert_exact(dense64(out), wanted)
    assert_exact(out.to_dense(), wanted)
    if rows.source is None:
        for first, count in out.spans.t().tolist():
            entries = out.indices[first : first + count]
            assert (entries[1:] >= entries[:-1]).all() and (entries >= 0).all()
        assert (out.indices[int(out.counts.sum()) :] == -1).all()


@pytest.mark.parametrize("m, n, l0", [(280, 5, 5), (100, 7, 5), (3, 700, 60), (70, 100, 1)])
def test_long_and_short_columns(
    m: int, n: int, l0: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Columns of more entries than one block ranks."""
    x = random_rows((m, n), l0=l0, dtype=dtype, device=device, generator=generator)
    out = transpose(pack(x, capacity=n))
    columns, rows = x.t().nonzero(as_tuple=True)
    nnz = m * l0
    assert out.counts.tolist() == (x != 0).sum(0).tolist()
    assert torch.equal(out.indices[:nnz].long(), rows)
    assert torch.equal(out.values[:nnz], x[rows, columns])


def test_columns_that_are_always_filled(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """Among short columns: the last one of them, and a first one that fires in all rows but one."""
    x = random_rows((280, 40), l0=2, dtype=dtype, device=device, generator=generator)
    x[:, 39] = 1
    x[1:, 0] = 2
    out = transpose(pack(x, capacity=8))
    columns, rows = x.t().nonzero(as_tuple=True)
    assert torch.equal(out.indices[: len(rows)].long(), rows)
    assert torch.equal(out.values[: len(rows)], x[rows, columns])


def test_there_and_back(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    x = random_rows((20, 50), density=0.2, dtype=dtype, device=device, generator=generator)
    for options in ({"capacity": 50}, {"capacity": 2}, {"capacity": "exact"}, {"room": 0}):
        assert_exact(transpose(transpose(strategies.pack_as(x, **options))).to_dense(), x.double())


def test_a_source_that_is_right_at_overflowed_rows_alone(dtype: torch.dtype, device: torch.device) -> None:
    """As the containers allow, and as sampled_matmul makes it: the other rows' entries must not vanish."""
    options = {"dtype": dtype, "device": device, "integers": True}
    pattern = pack(random_rows((4, 30), l0=[2, 9, 0, 5], **options), capacity=6)
    x, weight = random_rows((4, 8), l0=8, **options), random_rows((30, 8), l0=8, **options)
    out = sampled_matmul(x, weight, pattern)
    wanted = x.double() @ weight.double().t() * (dense64(pattern) != 0)
    assert_exact(out.to_dense(), wanted)
    assert_exact(transpose(out).to_dense(), wanted.t())
    assert_exact(matmul(transpose(out), x), wanted.t() @ x.double())


@pytest.mark.native
@pytest.mark.parametrize("options", [{"capacity": 9}, {"capacity": 2}, {"capacity": "exact"}, {"room": 3}], ids=str)
def test_gradcheck(options: dict[str, int]) -> None:
    x = random_rows((4, 9), l0=[0, 2, 9, 3], dtype=torch.float64)
    held = x != 0
    values = x[held].requires_grad_()
    torch.autograd.gradcheck(
        lambda v: transpose(strategies.pack_as(x.masked_scatter(held, v), **options)).to_dense(), values
    )


@pytest.mark.parametrize("options", [{"capacity": 9}, {"capacity": 2}, {"room": 3}], ids=str)
def test_second_derivatives(options: dict[str, int], device: torch.device, generator: torch.Generator) -> None:
    """Of pack, transpose and unpack in a row."""
    x = random_rows((4, 9), l0=[0, 2, 9, 3], device=device, generator=generator, integers=True).requires_grad_()
    weight = torch.arange(9, device=device)[:, None] + 1.0
    cubes = (weight * transpose(strategies.pack_as(x, **options)).to_dense()).pow(3).sum()
    (first,) = torch.autograd.grad(cubes, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_exact(first, 3 * weight.t().double() ** 3 * x.double() ** 2)
    assert_exact(second, 6 * weight.t().double() ** 3 * x.double())


@pytest.mark.parametrize("capacity", [50, 3])
def test_gradients_through_a_product(
    capacity: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    x = random_rows((12, 50), l0=5, dtype=dtype, device=device, generator=generator).requires_grad_()
    weight = torch.randn(12, 16, device=device, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(50, 16, device=device, generator=generator).to(dtype)
    ours = torch.autograd.grad(matmul(transpose(pack(x, capacity=capacity)), weight), (x, weight), grad)
    plain = torch.autograd.grad(x.t() @ weight, (x, weight), grad)
    held = x != 0
    wanted = (weight.double() @ grad.double().t()) * held, x.double() @ grad.double()
    assert_close(ours[0], reference64=wanted[0], plain=plain[0] * held)
    assert_close(ours[1], reference64=wanted[1], plain=plain[1])


@pytest.mark.native
@pytest.mark.parametrize("index", [5, -2])
def test_refuses_a_bad_index_on_the_cpu(index: int) -> None:
    rows = pack(torch.eye(2, 5), capacity=1)
    rows.packed.indices[0] = index
    with pytest.raises(ValueError, match=r"indices must lie in \[0, N\) with N = 5"):
        transpose(rows)


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"rowsparse.transpose: rows must be rowsparse.Rows"):
        transpose(torch.ones(2, 3))

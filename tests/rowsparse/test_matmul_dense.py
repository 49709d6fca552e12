"""Products of rows by the dense way, which the kernels' launchers take where it is faster: here it is forced."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gossamer.rowsparse import matmul, pack, sampled_matmul
from gossamer.rowsparse.records import Matmul
from gossamer.testing import assert_close, assert_exact, dense64, random_rows, random_slots
from tests import strategies

pytestmark = pytest.mark.kernels
PACKINGS = [{"capacity": 130}, {"capacity": 8}, {"capacity": "exact"}, {"room": 40}]


@pytest.fixture(autouse=True, params=["at once", "in parts"])
def dense(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The products taken so far: every one of them the dense way."""
    from gossamer.rowsparse._triton import matmul as product
    from gossamer.rowsparse._triton import matmul_dense
    from gossamer.rowsparse._triton import sampled_matmul as sampled

    taken: list[str] = []

    def chosen(name: str) -> str:
        taken.append(name)
        return "dense"

    monkeypatch.setattr(product, "choose_path", lambda *_: chosen("matmul"))
    monkeypatch.setattr(sampled, "choose_path", lambda *_: chosen("sampled_matmul"))
    if request.param == "in parts":
        monkeypatch.setattr(matmul_dense, "rows_at_once", lambda *_: 2)
    return taken


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_shape(data: st.DataObject, dtype: torch.dtype, device: torch.device, dense: list[str]) -> None:
    rows = data.draw(strategies.containers(dtype, device))
    depth = data.draw(strategies.DEPTHS)
    weight = data.draw(strategies.matrix(rows.num_columns, depth, dtype, device))
    x = data.draw(strategies.matrix(rows.num_rows, depth, dtype, device)).reshape(*rows.shape[:-1], depth)
    assert_exact(matmul(rows, weight), dense64(rows) @ weight.double())
    reference = x.double() @ weight.double().t()
    picked, held = sampled_matmul(x, weight, rows), dense64(rows)
    # Of columns that a row has twice both entries have the product, and add up.
    for got, wanted, entry in zip(picked.to_dense().flatten(), reference.flatten(), held.flatten(), strict=True):
        if entry != 0 and wanted != 0:
            times = float(got) / float(wanted)
            # Each product is rounded: bfloat16 holds integers up to 256.
            assert round(times) != 0 and abs(times - round(times)) <= torch.finfo(dtype).eps * abs(times)
    assert dense[:2] == ["matmul", "sampled_matmul"]


@pytest.mark.parametrize("options", PACKINGS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_error_budget(
    options: dict[str, int], bias: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    from gossamer.rowsparse.matmul import matmul_operator

    m, n, d = 9, 130, 33
    x = random_rows((m, n), l0=[0, 1, 7, n, 30, 9, 9, 9, 9], dtype=dtype, device=device, generator=generator)
    weight = torch.randn(n, d, device=device, generator=generator).to(dtype)
    added = torch.randn(d, device=device, generator=generator).to(dtype) if bias else None
    out = matmul_operator(Matmul(*strategies.pack_as(x, **options).packed, weight, added, None))
    plain = x @ weight if added is None else torch.addmm(added, x, weight)
    reference = x.double() @ weight.double() + (0 if added is None else added.double())
    assert out.dtype is dtype and out.is_contiguous()
    assert_close(out, reference64=reference, plain=plain)
    y = torch.randn(m, d, device=device, generator=generator).to(dtype)
    picked = sampled_matmul(y, weight, strategies.pack_as(x, **options)).to_dense()
    held = x != 0
    assert_close(picked, reference64=(y.double() @ weight.double().t()) * held, plain=(y @ weight.t()) * held)


def test_gradients(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of the weight too, from unpacked rows."""
    import sys

    monkeypatch.setattr(sys.modules["gossamer.rowsparse.matmul"], "choose_path", lambda *_: "dense")
    x = random_rows((9, 40), l0=[0, 1, 7, 40, 30, 9, 9, 9, 9], dtype=dtype, device=device, generator=generator)
    weight = torch.randn(40, 9, device=device, generator=generator).to(dtype)
    grad = torch.randn(9, 9, device=device, generator=generator).to(dtype)
    for options in PACKINGS:
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        ours = torch.autograd.grad(matmul(strategies.pack_as(leaves[0], **options), leaves[1]), leaves, grad)
        wanted = (grad.double() @ weight.double().t()) * (x != 0), x.double().t() @ grad.double()
        plain = (grad @ weight.t()) * (x != 0), x.t() @ grad
        for name, a, b, c in zip(("x", "weight"), ours, wanted, plain, strict=True):
            assert_close(a, reference64=b, plain=c, name=name)
        assert all(t.is_contiguous() for t in ours)


def test_second_derivatives_go_the_other_way(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys.modules["gossamer.rowsparse.matmul"], "choose_path", lambda *_: "dense")
    rows = pack(torch.eye(3, device=device), capacity=2)
    weight = torch.ones(3, 2, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(matmul(rows, weight).pow(3).sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    assert_exact(second, torch.full((3, 2), 6.0).double())


@pytest.mark.parametrize("packed", [False, True])
def test_columns_in_any_order_and_repeated(packed: bool, dtype: torch.dtype, device: torch.device) -> None:
    """What does not ascend is added up all the same."""
    rows = random_slots((6, 20), 50, packed=packed, dtype=dtype, device=device, integers=True)
    weight = random_rows((20, 8), l0=8, dtype=dtype, device=device, integers=True)
    assert_exact(matmul(rows, weight), dense64(rows) @ weight.double())


@pytest.mark.parametrize("index", [30, -2, 1 << 30])
@pytest.mark.parametrize("apart", [True, False])
def test_bad_indices(index: int, apart: bool, dtype: torch.dtype, device: torch.device) -> None:
    """They make their row NaN, and a product of theirs."""
    rows = strategies.with_index(apart, index, dtype, device)
    weight = torch.ones(30, 8, dtype=dtype, device=device)
    wanted = torch.tensor([2.0, math.nan, 2.0]).double()[:, None].expand(3, 8)
    assert_exact(matmul(rows, weight), wanted)
    picked = sampled_matmul(torch.ones(3, 8, dtype=dtype, device=device), weight, rows).packed.values.view(3, -1)[:, :2]
    columns = rows.packed.indices.view(3, -1)[:, :2]
    assert picked.isnan().tolist() == ((columns < 0) | (columns >= 30)).tolist()


def test_overflow_without_a_source_is_nan(dtype: torch.dtype, device: torch.device) -> None:
    rows = strategies.lost(device).to(dtype)
    out = matmul(rows, torch.ones(4, 8, dtype=dtype, device=device))
    assert_exact(out, torch.tensor([1.0, math.nan]).double()[:, None].expand(2, 8))


def test_nan_in_the_weight_spreads(dtype: torch.dtype, device: torch.device) -> None:
    """As it does in every dense product; at the entries of a pattern there is nothing for it to spread to."""
    weight = torch.ones(3, 8, dtype=dtype, device=device)
    weight[2, 1] = math.nan
    rows = pack(torch.eye(3, dtype=dtype, device=device)[:2])
    assert matmul(rows, weight).isnan().tolist() == [[at == 1 for at in range(8)]] * 2
    assert_exact(sampled_matmul(torch.ones_like(weight[:2]), weight, rows).packed.values, rows.packed.values * 8.0)


def test_a_wider_result_is_gathered(device: torch.device, dense: list[str]) -> None:
    """Sums are float32, which a product in half precision has rounded."""
    rows = pack(torch.eye(3, dtype=torch.float16, device=device))
    matmul(rows, torch.ones(3, 8, dtype=torch.float16, device=device), out_dtype=torch.float32)
    assert dense == []

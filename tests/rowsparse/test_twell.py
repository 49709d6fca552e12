"""Tile-wise lists: packing, and every operator that reads them, against the definition of the format."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.rowsparse import ELL, LinearSource, TwELL, matmul, pack, sampled_matmul, transpose, unpack
from gossamer.rowsparse.twell import to_ell
from gossamer.testing import assert_close, assert_exact, dense64, random_rows
from tests import strategies

NAN, INF = math.nan, math.inf


@given(data=st.data())
def test_pack_and_unpack(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    x = data.draw(strategies.dense(dtype, device))
    tile, slots = data.draw(st.sampled_from([1, 5, 16, 64, 257])), data.draw(st.one_of(st.none(), st.integers(1, 9)))
    rows = pack(x, format="twell", tile=tile, slots=slots)
    m, n = rows.num_rows, rows.num_columns
    flat = x.reshape(m, n)
    assert isinstance(rows, TwELL) and rows.shape == tuple(x.shape) and rows.tile == tile
    assert rows.slots == (max(1, tile // 16) if slots is None else min(slots, tile))
    assert rows.packed.indices.dtype is (torch.uint8 if tile <= 256 else torch.int16)
    values, indices, counts, _ = rows.packed
    for row in range(m):
        for at in range(-(-n // tile)):
            inside = flat[row, at * tile : (at + 1) * tile]
            columns = inside.nonzero().squeeze(1)
            held = min(len(columns), rows.slots)
            assert int(counts[row, at]) == len(columns)
            assert indices[row, at, :held].tolist() == columns[:held].tolist()
            assert_exact(values[row, at, :held], inside[columns[:held]].double())
    assert bool(rows.overflowed) == bool((counts > rows.slots).any())
    assert (rows.source is None) == (rows.slots == tile)
    assert rows.validate() is rows
    assert_exact(dense64(rows), x.double())
    assert_exact(unpack(rows), x.double())
    assert torch.equal(rows.nnz_per_row.long(), (flat != 0).sum(1)) and rows.source is None
    assert_exact(dense64(rows.validate()), x.double(), name="settled")


@given(data=st.data())
def test_operators(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    rows = data.draw(strategies.tiled(dtype, device))
    depth = data.draw(strategies.DEPTHS)
    m, n = rows.num_rows, rows.num_columns
    weight = data.draw(strategies.matrix(n, depth, dtype, device))
    dense = dense64(rows)
    assert_exact(rows.to_dense(), dense)
    assert_exact(matmul(rows, weight), dense @ weight.double())
    assert_exact(unpack(transpose(rows)), dense.reshape(m, n).t())
    x = data.draw(strategies.matrix(m, depth, dtype, device)).reshape(*rows.shape[:-1], depth)
    sampled = sampled_matmul(x, weight, rows)
    assert isinstance(sampled, ELL)
    assert_exact(unpack(sampled), (x.double() @ weight.double().t()) * (dense != 0))


@pytest.mark.parametrize("capacity", [1, 3, 40])
@pytest.mark.parametrize("tile, slots", [(8, 2), (8, 8), (100, 3), (33, 33)])
def test_as_one_list_a_row(
    tile: int, slots: int, capacity: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Slots without an entry say so, and so does a row of which a tile or the whole overflowed."""
    counts = [0, 1, 3, 7, 30, 100]
    x = random_rows((6, 100), l0=counts, dtype=dtype, device=device, generator=generator)
    rows = strategies.changed(pack(x, format="twell", tile=tile, slots=slots), source=x)
    ell = to_ell(rows, capacity)
    values, indices, nnz, _ = ell.packed
    over = (rows.packed.counts > slots).any(1)
    for row, count in enumerate(counts):
        if over[row] or count > capacity:
            assert nnz[row] == max(count, capacity + 1)
            count = 0
        columns = x[row].nonzero().squeeze(1)[:count]
        assert indices[row].tolist() == [*columns.tolist(), *[-1] * (capacity - count)]
        assert_exact(values[row, :count], x[row, columns].double())
        assert (values[row, count:] == 0).all()
    assert_exact(unpack(ell), x.double())


def test_many_tiles(dtype: torch.dtype, device: torch.device, generator: torch.Generator, mode: str) -> None:
    """More than one block of counts, and few rows, whose tiles go to programs of their own."""
    n = 300 if mode == "interpreter" else 70_000
    x = random_rows((3, n), l0=[n // 50, 0, 5], dtype=dtype, device=device, generator=generator)
    rows = pack(x, format="twell", tile=1, slots=1)
    assert rows.source is None
    assert_exact(unpack(rows), x.double())


def test_special_values_are_kept_and_negative_zero_is_not(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.zeros(2, 90, dtype=dtype, device=device)
    subnormal = torch.finfo(dtype).tiny / 4
    x[0, :8] = torch.tensor([-0.0, NAN, 0.0, INF, -INF, subnormal, -0.0, NAN])
    x[1, 89] = NAN
    for slots in (1, 5, 30):
        rows = pack(x, format="twell", tile=30, slots=slots)
        assert rows.packed.counts.tolist() == [[5, 0, 0], [0, 0, 1]]
        assert_exact(unpack(rows), x.double())


@pytest.mark.parametrize("slots", [1, 4, 16])
def test_gradients(slots: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """They reach x at its entries, whether a row overflowed or not."""
    x = random_rows((2, 3, 60), l0=[0, 1, 5, 17, 40, 60], dtype=dtype, device=device, generator=generator)
    weight, grad = (torch.randn(size, device=device, generator=generator).to(dtype) for size in ((60, 9), (2, 3, 9)))
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = matmul(pack(leaves[0], format="twell", tile=16, slots=slots), leaves[1])
    ours = torch.autograd.grad(out, leaves, grad)
    plain = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    usual = torch.autograd.grad(plain[0] @ plain[1], plain, grad)
    exact = [leaf.double().detach().requires_grad_() for leaf in leaves]
    wanted = torch.autograd.grad(exact[0] @ exact[1], exact, grad.double())
    held = x != 0
    assert_close(ours[0], reference64=wanted[0] * held, plain=usual[0] * held, name="x")
    assert_close(ours[1], reference64=wanted[1], plain=usual[1], name="weight")
    grad = random_rows(x.shape, l0=60, dtype=dtype, device=device, generator=generator)
    leaf = x.clone().requires_grad_()
    unpack(pack(leaf, format="twell", tile=16, slots=slots)).backward(grad)
    assert_exact(leaf.grad, grad.double() * held)


@pytest.mark.native
def test_gradcheck() -> None:
    x = random_rows((4, 9), l0=[0, 2, 9, 3], dtype=torch.float64)
    held = x != 0
    for slots in (1, 2, 4):

        def entries(v: torch.Tensor, slots: int = slots) -> TwELL:
            return pack(x.masked_scatter(held, v), format="twell", tile=4, slots=slots)

        def values(v: torch.Tensor, entries=entries) -> torch.Tensor:
            rows = entries(v)
            stored = torch.arange(rows.settle().slots) < rows.nnz_per_tile[..., None]
            return rows.values[stored]

        torch.autograd.gradcheck(values, x[held].requires_grad_())
        torch.autograd.gradcheck(lambda v, entries=entries: unpack(entries(v)), x[held].requires_grad_())


@pytest.mark.parametrize("slots", [3, 63])
def test_a_linear_source(slots: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """Rows of an overflowed tile, and rows of more entries than an ELL has slots, are computed again."""
    m, k, n = 4, 12, 300
    x, weight = (
        random_rows(shape, l0=k, dtype=dtype, device=device, generator=generator, integers=True)
        for shape in ((m, k), (n, k))
    )
    dense = (x.double() @ weight.double().t()).clamp(min=0)
    packed = pack(dense.to(dtype), format="twell", tile=64, slots=slots)
    rows = strategies.changed(packed, source=LinearSource(x, weight))
    right = random_rows((n, 5), l0=5, dtype=dtype, device=device, generator=generator, integers=True)
    assert_exact(unpack(rows), dense)
    with torch.no_grad():
        assert_close(matmul(rows, right), reference64=dense @ right.double(), plain=dense.to(dtype) @ right)


def test_counts_below_0_hold_nothing(dtype: torch.dtype, device: torch.device) -> None:
    """And move no other entry: a kernel writes where they add up to."""
    rows = pack(torch.eye(4, dtype=dtype, device=device), format="twell", tile=2, slots=2)
    rows.nnz_per_tile[1:, 1] = torch.tensor([-3, 1, 1], dtype=torch.int16, device=device)
    rows.nnz_per_tile[2:, 0] = -5
    assert unpack(rows).tolist() == torch.eye(4).tolist()


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"tile": 0}, ValueError, "rowsparse.pack: tile must be at least 1, got 0"),
        ({"tile": 1 << 15}, ValueError, "tile must be at most 32767, got 32768"),
        ({"tile": 2.0}, TypeError, "tile must be an int, got float"),
        ({"slots": 0}, ValueError, "slots must be at least 1, got 0"),
        ({"capacity": 3}, ValueError, 'capacity belongs to format="ell"'),
        ({"max_nnz": 3}, ValueError, 'max_nnz belongs to format="csr"'),
        ({"format": "ell", "slots": 3}, ValueError, 'tile and slots belong to format="twell"'),
        ({"format": "csr", "tile": 3}, ValueError, 'tile and slots belong to format="twell"'),
    ],
)
def test_errors(options: dict[str, int | str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pack(torch.ones(2, 3), **{"format": "twell", **options})

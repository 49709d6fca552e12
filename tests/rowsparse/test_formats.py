"""The containers: what they promise, what they refuse."""

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from gossamer import rowsparse, sae
from gossamer.rowsparse import CSR, ELL, LinearSource, TwELL, pack
from gossamer.rowsparse.formats import ascending
from gossamer.testing import random_rows

INT = torch.int32


def ell(**changes: Any) -> ELL:
    """Two rows of five columns, two slots each; the second row is full."""
    parts: dict[str, Any] = {
        "values": torch.tensor([[1.0, 0.0], [2.0, 3.0]]),
        "indices": torch.tensor([[4, -1], [0, 2]], dtype=INT),
        "nnz_per_row": torch.tensor([1, 2], dtype=INT),
        "shape": (2, 5),
    }
    return ELL(**{**parts, **changes})


def csr(**changes: Any) -> CSR:
    """The same matrix."""
    parts: dict[str, Any] = {
        "row_offsets": torch.tensor([0, 1, 3]),
        "indices": torch.tensor([4, 0, 2], dtype=INT),
        "values": torch.tensor([1.0, 2.0, 3.0]),
        "shape": (2, 5),
    }
    return CSR(**{**parts, **changes})


def twell(**changes: Any) -> TwELL:
    """The same matrix, in tiles of three columns and two slots."""
    parts: dict[str, Any] = {
        "values": torch.tensor([[[0.0, 0.0], [1.0, 0.0]], [[2.0, 3.0], [0.0, 0.0]]]),
        "indices": torch.tensor([[[0, 0], [1, 0]], [[0, 2], [0, 0]]], dtype=torch.uint8),
        "nnz_per_tile": torch.tensor([[0, 1], [2, 0]], dtype=torch.int16),
        "shape": (2, 5),
        "tile": 3,
    }
    return TwELL(**{**parts, **changes})


def linear(**changes: Any) -> LinearSource:
    """What has the same matrix as its positive part."""
    weight = torch.tensor([[-1.0, 2.0], [-1.0, -1.0], [-1.0, 3.0], [0.0, -1.0], [1.0, -1.0]])
    return LinearSource(**{"x": torch.eye(2), "weight": weight, **changes})


EVERY = pytest.mark.parametrize("make", [ell, csr, twell])


@EVERY
def test_attributes(make: Any) -> None:
    rows = make(shape=(2, 1, 5))
    assert (rows.num_rows, rows.num_columns, rows.dtype, rows.device.type) == (2, 5, torch.float32, "cpu")
    assert rows.nnz_per_row.tolist() == [1, 2] and not rows.overflowed and not rows.requires_grad
    assert rows.to_dense().tolist() == [[[0, 0, 0, 0, 1]], [[2, 0, 3, 0, 0]]]
    assert rows.validate() is rows
    assert "shape=(2, 1, 5)" in repr(rows) and "float32" in repr(rows) and "none possible" in repr(rows)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows.shape = (2, 5)


def test_sizes() -> None:
    assert ell().capacity == 2 and "capacity=2" in repr(ell())
    assert csr().max_nnz == 3 and "max_nnz=3" in repr(csr())
    assert twell().slots == 2 and "tile=3, slots=2" in repr(twell())
    assert linear().shape == (2, 5)


@pytest.mark.parametrize("make", [ell, twell])
def test_a_linear_source(make: Any) -> None:
    """It moves and detaches with its container; its threshold keeps its dtype."""
    source = linear(weight=linear().weight.requires_grad_(), threshold=torch.full((5,), 0.1))
    rows = make(source=source)
    assert rows.requires_grad and "kept exact" in repr(rows) and rows.to_dense().tolist() == make().to_dense().tolist()
    half = rows.to(torch.float16)
    # In another dtype it would keep other entries.
    assert half.dtype is torch.float16 and half.source.dtype is torch.float32
    assert half.to_dense().dtype is torch.float16 and half.to_dense().tolist() == make().to_dense().tolist()
    assert half.source.requires_grad and not half.detach().requires_grad
    leaves, spec = _pytree.tree_flatten(rows)
    assert all(isinstance(leaf, torch.Tensor) or leaf is None for leaf in leaves)
    again = _pytree.tree_unflatten(leaves, spec)
    assert isinstance(again.source, LinearSource) and again.source.weight is source.weight
    moved = rows.to("meta")
    # It was settled first: in other hands the layer would give other roundings.
    assert moved.source is None and rows.source is None and moved.packed.values.device.type == "meta"


@EVERY
def test_to_and_detach(make: Any) -> None:
    rows = make(values=make().values.requires_grad_(), source=torch.ones(2, 5))
    assert rows.requires_grad and "kept exact" in repr(rows)
    half = rows.to(torch.float16)
    assert half.dtype is half.source.dtype is torch.float16
    assert half.packed.indices.dtype is rows.packed.indices.dtype
    assert half.requires_grad and not half.detach().requires_grad and half.shape == rows.shape
    moved = rows.to("meta", torch.float64)
    assert {t.device.type for t in moved.packed[:3]} == {"meta"} and moved.source is None
    assert moved.dtype is torch.float64
    assert rows.to(torch.empty(0, dtype=torch.bfloat16)).dtype is torch.bfloat16


@EVERY
def test_requires_grad_looks_at_the_source(make: Any) -> None:
    assert make(source=torch.ones(2, 5, requires_grad=True)).requires_grad


@EVERY
def test_pytree_and_pickle(make: Any) -> None:
    rows = make()
    leaves, spec = _pytree.tree_flatten([rows, {"a": rows}])
    assert all(isinstance(leaf, torch.Tensor) or leaf is None for leaf in leaves)
    again = _pytree.tree_unflatten(leaves, spec)[1]["a"]
    for other in (again, pickle.loads(pickle.dumps(rows))):
        assert type(other) is type(rows) and other.shape == rows.shape and other.source is None
        assert torch.equal(other.to_dense(), rows.to_dense())


def test_overflowed(device: torch.device) -> None:
    x = random_rows((3, 40), l0=[3, 9, 0], device=device)
    for rows in (pack(x, capacity=8), pack(x, format="csr", max_nnz=11), pack(x, format="twell", tile=40, slots=8)):
        assert rows.overflowed.item() is True and rows.validate() is rows
    for rows in (pack(x, capacity=9), pack(x, format="csr", max_nnz=12), pack(x, format="twell", tile=40, slots=9)):
        assert rows.overflowed.item() is False
    assert pack(x, capacity=40).source is None and pack(x, capacity=8).source is not None
    assert pack(x, format="csr").source is None


@pytest.mark.parametrize(
    "make, changes, error, message",
    [
        (ell, {"values": torch.ones(2)}, ValueError, r"ELL: values must have shape \[M, capacity\] with M = 2"),
        (ell, {"shape": (3, 5)}, ValueError, r"with M = 3 from shape \(3, 5\), got \[2, 2\]"),
        (ell, {"indices": torch.zeros(2, 3, dtype=INT)}, ValueError, r"indices must have shape .* got \[2, 3\]"),
        (ell, {"nnz_per_row": torch.zeros(3, dtype=INT)}, ValueError, r"nnz_per_row must have shape \[M\] = \[2\]"),
        (ell, {"indices": torch.zeros(2, 2, dtype=torch.int64)}, TypeError, "indices must be int32, got int64"),
        (ell, {"nnz_per_row": torch.zeros(2).long()}, TypeError, "nnz_per_row must be int32, got int64"),
        (ell, {"source": torch.ones(2, 4)}, ValueError, r"ELL: source must have shape \[M, N\] = \[2, 5\]"),
        (ell, {"source": torch.ones(2, 5, device="meta")}, ValueError, "source must be on cpu like values, got meta"),
        (csr, {"row_offsets": torch.zeros(2).long()}, ValueError, r"row_offsets must have shape \[M \+ 1\] = \[3\]"),
        (csr, {"row_offsets": torch.zeros(3, dtype=INT)}, TypeError, "row_offsets must be int64, got int32"),
        (csr, {"indices": torch.zeros(3).long()}, TypeError, "indices must be int32, got int64"),
        (csr, {"indices": torch.zeros(4, dtype=INT)}, ValueError, r"CSR: indices must have shape \[nnz\] = \[3\]"),
        (csr, {"values": torch.ones(3, 1)}, ValueError, r"CSR: values must have shape \[nnz\], got \[3, 1\]"),
        (csr, {"source": torch.ones(1, 5)}, ValueError, r"CSR: source must have shape \[M, N\] = \[2, 5\]"),
        (csr, {"values": [1.0, 2.0, 3.0]}, TypeError, "CSR: values must be a torch.Tensor, got list"),
        (ell, {"indices": [[0]]}, TypeError, "ELL: indices must be a torch.Tensor, got list"),
        (ell, {"values": torch.ones(2, 2).int()}, TypeError, "ELL: values must be float32, .* got int32"),
        (ell, {"source": torch.ones(2, 5).half()}, TypeError, "ELL: source must be float32 like values, got float16"),
        (ell, {"shape": 4}, ValueError, r"ELL: shape must be a tuple \(..., N\) of ints, got 4"),
        (csr, {"shape": ()}, ValueError, r"CSR: shape must be a tuple \(..., N\) of ints, got \(\)"),
        (csr, {"source": linear()}, TypeError, "CSR: source must be a torch.Tensor, got LinearSource"),
        (ell, {"source": linear(x=torch.ones(3, 2))}, ValueError, r"ELL: source must have shape \[M, N\] = \[2, 5\]"),
        (twell, {"tile": 2}, ValueError, r"M = 2 and T = 3 from shape \(2, 5\) in tiles of 2, got \[2, 2, 2\]"),
        (twell, {"tile": 0}, ValueError, "TwELL: tile must be at least 1, got 0"),
        (twell, {"tile": 40000}, ValueError, "TwELL: tile must be at most 32767, got 40000"),
        (twell, {"tile": 3.0}, TypeError, "TwELL: tile must be an int, got float"),
        (twell, {"indices": torch.zeros(2, 2, 2, dtype=INT)}, TypeError, "indices must be uint8 for tiles of 3, got"),
        (twell, {"nnz_per_tile": torch.zeros(2, 2, dtype=INT)}, TypeError, "nnz_per_tile must be int16 for"),
        (twell, {"nnz_per_tile": torch.zeros(2, dtype=torch.int16)}, ValueError, "nnz_per_tile must have shape"),
        (linear, {"x": torch.ones(2, 3)}, ValueError, r"\[M, K\] and \[N, K\], got \[2, 3\] and \[5, 2\]"),
        (linear, {"bias": torch.ones(4)}, ValueError, r"LinearSource: bias must have shape \[N\] = \[5\]"),
        (linear, {"threshold": torch.ones(5, device="meta")}, ValueError, "threshold must be on cpu like weight"),
        (linear, {"x": torch.eye(2).half()}, TypeError, "x must be float32 like weight, got float16"),
        (ell, {"shape": (2, 2**31)}, ValueError, "ELL: shape must have at most 2\\^31 - 1 columns"),
    ],
)
def test_refused(make: Any, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**changes)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ell(indices=torch.tensor([[5, -1], [0, 2]], dtype=INT)), r"\[0, N\) with N = 5, .* got 0 to 5"),
        (lambda: ell(indices=torch.tensor([[4, -1], [-2, 2]], dtype=INT)), "got -2 to 4"),
        (lambda: ell(nnz_per_row=torch.tensor([1, 3], dtype=INT)), "at most capacity = 2 without a source, got 3"),
        (lambda: ell(nnz_per_row=torch.tensor([-1, 1], dtype=INT)), "nnz_per_row must be at least 0, got -1"),
        (lambda: csr(indices=torch.tensor([4, 0, 7], dtype=INT)), "got 0 to 7"),
        (lambda: csr(indices=torch.tensor([-3, 0, 2], dtype=INT)), "got -3 to 2"),
        (lambda: csr(row_offsets=torch.tensor([0, 1, 4])), r"at most len\(values\) = 3 without a source, got 4"),
        (lambda: csr(row_offsets=torch.tensor([1, 1, 3])), "must start at 0 and never decrease"),
        (lambda: csr(row_offsets=torch.tensor([0, 3, 2])), "must start at 0 and never decrease"),
        (lambda: twell(nnz_per_tile=torch.tensor([[0, 1], [3, 0]], dtype=torch.int16)), "at most slots = 2 without"),
        (lambda: twell(nnz_per_tile=torch.tensor([[0, 1], [-1, 0]], dtype=torch.int16)), "must be at least 0, got -1"),
        (lambda: twell(indices=torch.full((2, 2, 2), 2, dtype=torch.uint8)), r"below N = 5 in the last tile, got 2"),
        (lambda: twell(indices=torch.full((2, 2, 2), 3, dtype=torch.uint8)), r"\[0, tile\) with tile = 3, .* got 3"),
    ],
)
def test_contents_that_break_a_rule(make: Any, message: str) -> None:
    """The constructor refuses them, or `validate` does."""
    with pytest.raises(ValueError, match=message):
        make().validate()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: csr(row_offsets=torch.tensor([1, 1, 3])), r"rowsparse.CSR: row_offsets must start at 0 and"),
        (lambda: csr(row_offsets=torch.tensor([0, 3, 2])), "must start at 0 and never decrease"),
        (lambda: csr(row_offsets=torch.tensor([0, -1, 2])), "must start at 0 and never decrease"),
        (lambda: csr(indices=torch.tensor([5, 0, 1], dtype=INT)), r"rowsparse.CSR: indices must lie in \[0, N\)"),
        (lambda: ell(indices=torch.tensor([[4, -1], [-2, 2]], dtype=INT)), "rowsparse.ELL: indices .* got -2 to 4"),
        (lambda: ell(nnz_per_row=torch.tensor([-1, 1], dtype=INT)), "rowsparse.ELL: nnz_per_row must be at least 0"),
        (lambda: twell(indices=torch.full((2, 2, 2), 3, dtype=torch.uint8)), "rowsparse.TwELL: indices must lie in"),
    ],
)
def test_the_constructor_looks_on_the_cpu(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_pytree_and_a_transform_do_not_look() -> None:
    """What crosses a compiled region was looked at when it was made, and vmap has no numbers to show."""
    rows = csr()
    leaves, spec = _pytree.tree_flatten(rows)
    moved = [leaf + 9 if leaf is not None and leaf.dtype is INT else leaf for leaf in leaves]
    assert _pytree.tree_unflatten(moved, spec).indices.tolist() == [13, 9, 11]
    offsets = rows.row_offsets[None].repeat(2, 1)
    dense = torch.vmap(lambda values, offsets: CSR(offsets, rows.indices, values, rows.shape).values * 2)
    assert torch.equal(dense(rows.values[None].repeat(2, 1), offsets)[1], 2 * rows.values)


@pytest.mark.parametrize(
    "offsets, kept",
    [
        ([0, 2, 2, 3], [0, 2, 2, 3]),
        ([1, 1, 2, 3], [0, 4, 4, 4]),
        ([0, 3, 2, 3], [0, 3, 4, 4]),
        ([0, 1, -5, 3], [0, 1, 4, 4]),
        ([-1, 1, 2, 3], [0, 4, 4, 4]),
        ([0, 1, 7, 2], [0, 1, 7, 7]),
        ([0], [0]),
        ([3], [0]),
    ],
)
def test_offsets_that_decrease_overflow_on_a_gpu(offsets: list[int], kept: list[int]) -> None:
    """Rows before the first wrong offset stay, later ones end behind the buffer; nothing decreases."""
    assert ascending(torch.tensor(offsets), 3).tolist() == kept


@pytest.mark.gpu
def test_rows_that_break_a_rule_are_nan_on_a_gpu(device: torch.device) -> None:
    indices, values = torch.tensor([0, 1, 2], dtype=INT, device=device), torch.ones(3, device=device)
    weight = torch.randn(4, 8, device=device)

    def nan_rows(out: torch.Tensor) -> list[bool]:
        return out.isnan().flatten(1).any(1).tolist()

    for offsets, wanted in (([1, 1, 2, 3], [True] * 3), ([0, 3, 2, 3], [False, True, True])):
        rows = CSR(torch.tensor(offsets, device=device), indices, values.requires_grad_(), (3, 4))
        assert nan_rows(rowsparse.matmul(rows, weight)) == wanted and nan_rows(rows.to_dense()) == wanted
        rowsparse.matmul(rows, weight.requires_grad_()).sum().backward()
        rowsparse.transpose(rows)
        with pytest.raises(ValueError, match="row_offsets must start at 0"):
            rows.validate()
    slots = torch.tensor([[0, 1], [2, 3]], dtype=INT, device=device)
    for counts, at, wanted in (([-1, 2], 3, [True, False]), ([2, 2], 9, [False, True])):
        here = slots.clone()
        here[1, 1] = at
        rows = ELL(torch.ones(2, 2, device=device), here, torch.tensor(counts, dtype=INT, device=device), (2, 4))
        assert nan_rows(rowsparse.matmul(rows, weight.detach())) == wanted
        assert sae.tanh_l0(rows, torch.ones(4, device=device)).isnan().tolist() == wanted
        torch.cuda.synchronize()


def test_validate_does_not_look_where_nobody_may() -> None:
    assert csr(row_offsets=torch.tensor([0, 1, 2]), indices=torch.tensor([4, 0, 99], dtype=INT)).validate()
    assert csr(values=torch.ones(0), indices=torch.zeros(0, dtype=INT), row_offsets=torch.zeros(3).long()).validate()

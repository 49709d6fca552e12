"""Containers into each other."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer import rowsparse
from gossamer.rowsparse import CSR, ELL, TwELL, convert, pack, unpack
from gossamer.testing import assert_exact, dense64, random_rows
from tests import strategies

pytestmark = pytest.mark.native
KINDS = {"ell": ELL, "csr": CSR, "twell": TwELL}


@given(data=st.data())
def test_every_pair(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    rows = data.draw(st.one_of(strategies.containers(dtype, device), strategies.tiled(dtype, device)))
    dense = dense64(rows)
    for format, kind in KINDS.items():
        options = {"tile": data.draw(st.sampled_from([1, 7, 64, 300]))} if format == "twell" else {}
        out = convert(rows, format, **options)
        assert type(out) is kind and out.source is None and out.shape == rows.shape and out.dtype is dtype
        assert not out.overflowed and out.validate() is out
        assert_exact(dense64(out), dense)
        assert_exact(unpack(out), dense)


@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("options", [{"capacity": 60}, {"capacity": 3}, {"format": "csr"}, {"format": "twell"}])
def test_gradients(format: str, options: dict[str, Any], device: torch.device, generator: torch.Generator) -> None:
    x = random_rows((2, 3, 60), l0=[0, 1, 5, 17, 40, 60], device=device, generator=generator)
    grad = random_rows(x.shape, l0=60, device=device, generator=generator)
    leaf = x.clone().requires_grad_()
    unpack(convert(pack(leaf, **options), format)).backward(grad)
    assert_exact(leaf.grad, grad.double() * (x != 0))


def test_columns_out_of_order() -> None:
    """As a user may have made them; repeated ones stay apart."""
    rows = pack(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]))
    indices = torch.tensor([[4, 0, 3, 0, 2]], dtype=torch.int32)
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
    out = convert(strategies.changed(rows, indices=indices, values=values), "twell", tile=2)
    assert out.nnz_per_tile.tolist() == [[2, 2, 1]]
    assert out.to_dense().tolist() == [[6, 0, 5, 3, 1]]


def test_repeated_columns_all_have_a_slot(device: torch.device) -> None:
    """Also where they are more than columns."""
    indices = torch.tensor([[1] * 6, [0] * 6], dtype=torch.int32, device=device)
    nnz = torch.full((2,), 6, dtype=torch.int32, device=device)
    rows = ELL(torch.ones(2, 6, device=device), indices, nnz, (2, 2))
    for tile in (1, 2):
        out = convert(rows, "twell", tile=tile).validate()
        assert out.to_dense().tolist() == [[0, 6], [6, 0]]
    many = ELL(torch.ones(1, 33000), torch.zeros(1, 33000, dtype=torch.int32), torch.tensor([33000]).int(), (1, 2))
    with pytest.raises(ValueError, match="a row's tile must have at most 32767 entries, got 33000"):
        convert(many, "twell", tile=2)


@pytest.mark.parametrize("column", [300, 5000, -5])
@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("kind", ["ell", "csr"])
def test_an_index_outside_the_row(kind: str, format: str, column: int, device: torch.device) -> None:
    """Is no column of another row."""
    rows: Any = pack(torch.eye(2, 300, device=device), format=kind)
    rows.packed.indices.view(-1)[0] = column
    if format != kind:
        with pytest.raises(ValueError, match=rf"rowsparse\.convert: indices must lie in \[0, N\).* got .*{column}"):
            convert(rows, format)


def test_an_index_outside_its_tile(device: torch.device) -> None:
    """Is no column of another tile."""
    rows = pack(torch.eye(8, device=device), format="twell", tile=4, slots=2)
    rows.packed.indices[0, 0, 0] = 5
    with pytest.raises(ValueError, match=r"indices must lie in \[0, tile\) with tile = 4, .* got 5"):
        convert(rows, "csr")
    if device.type == "cpu":
        with pytest.raises(ValueError, match="got -2"):
            rows.to_dense()
    else:
        assert rows.to_dense()[0].isnan().any()


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"rows": torch.ones(2)}, TypeError, "rowsparse.convert: rows must be an ELL, CSR or TwELL of rowsparse"),
        ({"format": "coo"}, ValueError, 'format must be "ell", "csr" or "twell", got \'coo\''),
        ({"capacity": 1}, ValueError, "capacity must be at least 2, the entries of the fullest, got 1"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1, got 0"),
        ({"format": "twell", "slots": 1}, ValueError, "slots must be at least 2, the entries of the fullest, got 1"),
        ({"format": "twell", "slots": 1.5}, TypeError, "slots must be an int, got float"),
        ({"format": "twell", "tile": 0}, ValueError, "tile must be at least 1, got 0"),
        ({"format": "csr", "capacity": 1}, ValueError, 'capacity belongs to format="ell"'),
        ({"format": "ell", "slots": 1}, ValueError, 'tile and slots belong to format="twell"'),
        ({"format": "csr", "tile": 16}, ValueError, 'tile and slots belong to format="twell"'),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        convert(**{"rows": pack(torch.tensor([[0.0, 2.0], [3.0, 4.0]])), "format": "ell", **change})


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc])
@pytest.mark.parametrize(
    "offsets, indices, message",
    [
        ([1, 1, 2, 3], [0, 1, 2], "must start at 0, never decrease, and end at the number of entries, 3, got"),
        ([0, 3, 2, 3], [0, 1, 2], "must start at 0, never decrease"),
        ([0, 1, 2, 2], [0, 1, 2], "must start at 0, never decrease"),
        ([0, 1, 2, 3], [0, 3, 2], r"indices must lie in \[0, size\) of their dimension, got 3"),
        ([0, 1, 2, 3], [0, -1, 2], r"indices must lie in \[0, size\) of their dimension, got -1"),
    ],
)
def test_a_torch_tensor_that_breaks_the_rules_of_its_layout(
    layout: torch.layout, offsets: list[int], indices: list[int], message: str, device: torch.device
) -> None:
    """PyTorch does not look at them by default."""
    block = layout in (torch.sparse_bsr, torch.sparse_bsc)
    values = torch.ones((3, 2, 2) if block else (3,), device=device)
    parts = torch.tensor(offsets, device=device), torch.tensor(indices, device=device)
    size = (6, 6) if block else (3, 3)
    tensor = torch.sparse_compressed_tensor(*parts, values, size, layout=layout, check_invariants=False)
    with pytest.raises(ValueError, match=f"rowsparse.from_torch_sparse: .*{message}"):
        rowsparse.from_torch_sparse(tensor)


def test_a_coo_tensor_out_of_range(device: torch.device) -> None:
    at = torch.tensor([[0, 1], [0, 7]], device=device)
    tensor = torch.sparse_coo_tensor(at, torch.ones(2, device=device), (2, 4), check_invariants=False)
    with pytest.raises(ValueError, match=r"from_torch_sparse: indices must lie in \[0, size\) .* got 7"):
        rowsparse.from_torch_sparse(tensor)


def test_columns_in_any_order_and_repeated(device: torch.device) -> None:
    """Both are legal in PyTorch, and sums of them are what the matrix is."""
    offsets, indices = torch.tensor([0, 3, 4], device=device), torch.tensor([3, 0, 3, 1], device=device)
    values = torch.tensor([1.0, 2.0, 4.0, 8.0], device=device)
    tensor = torch.sparse_csr_tensor(offsets, indices, values, (2, 4), check_invariants=False)
    assert rowsparse.from_torch_sparse(tensor).to_dense().tolist() == [[2, 0, 0, 5], [0, 8, 0, 0]]

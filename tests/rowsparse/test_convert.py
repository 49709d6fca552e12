"""To and from PyTorch's sparse tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer import rowsparse
from gossamer.testing import assert_exact, dense64, random_rows
from tests import strategies

pytestmark = pytest.mark.native


@given(data=st.data())
def test_there_and_back(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    rows = data.draw(strategies.containers(dtype, device))
    for layout in (torch.sparse_csr, torch.sparse_coo):
        out = rowsparse.from_torch_sparse(rows.to_torch_sparse(layout))
        wanted = dense64(rows).reshape(out.shape)
        assert out.source is None and out.dtype is dtype and out.validate() is out
        assert_exact(dense64(out), wanted)


@pytest.mark.parametrize("options", [{"capacity": 60}, {"capacity": 3}, {"capacity": "exact"}, {"room": 9}], ids=str)
def test_gradients(options: dict, device: torch.device, generator: torch.Generator) -> None:
    x = random_rows((2, 3, 60), l0=[0, 1, 5, 17, 40, 60], device=device, generator=generator)
    grad = random_rows(x.shape, l0=60, device=device, generator=generator)
    leaf = x.clone().requires_grad_()
    sparse = strategies.pack_as(leaf, **options).to_torch_sparse(torch.sparse_coo)
    rowsparse.from_torch_sparse(sparse).to_dense().backward(grad)
    assert_exact(leaf.grad, grad.double() * (x != 0))


def test_another_layout() -> None:
    with pytest.raises(ValueError, match=r"layout must be torch\.sparse_csr or torch\.sparse_coo, got torch\.strided"):
        rowsparse.pack(torch.eye(2)).to_torch_sparse(torch.strided)


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

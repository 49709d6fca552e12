"""The one lister: entries in slots of each row, or each row's behind those of the row before."""

import pytest
import torch
from torch import Tensor

from gossamer.testing import random_rows

pytestmark = pytest.mark.kernels
SIZES = [(1, 1), (300, 24), (3, 9000), (2, 17001), (7, 640)]


def drawn(m: int, n: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """Rows of some 30 entries, an empty row, and a last row with a third of all columns."""
    x = random_rows((m, n), l0=min(n, 30), dtype=dtype, device=device, generator=generator)
    x[m // 2] = 0
    x[-1, : n // 3] = 1
    return x


@pytest.mark.parametrize("m, n", SIZES)
def test_all(m: int, n: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """As many slots as entries, also where these are more than room is first made for."""
    from gossamer.rowsparse._triton.list_entries import list_all

    x = drawn(m, n, dtype, device, generator)
    for given in (x, torch.ones_like(x)):
        row, column = given.nonzero(as_tuple=True)
        true = torch.bincount(row, minlength=m)
        values, indices, spans = list_all(given)
        assert torch.equal(indices.long(), column) and torch.equal(values, given[row, column])
        assert torch.equal(spans, torch.stack([true.cumsum(0) - true, true]))


@pytest.mark.parametrize("m, n", SIZES)
@pytest.mark.parametrize("capacity", [1, 30, 400])
def test_slots(
    m: int, n: int, capacity: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """A row of more entries than slots has its true count, and a span beyond the buffers."""
    from gossamer.rowsparse._triton.list_entries import list_slots

    x = drawn(m, n, dtype, device, generator)
    values, indices, spans = list_slots(x, capacity)
    assert torch.equal(spans[1], (x != 0).sum(1))
    for row, (start, count) in enumerate(spans.T.tolist()):
        if count > capacity:
            assert start + count > m * capacity
            continue
        assert start == row * capacity
        columns = x[row].nonzero().squeeze(1)
        assert indices[start : start + capacity].tolist() == [*columns.tolist(), *[-1] * (capacity - count)]
        assert torch.equal(values[start : start + count], x[row, columns])
        assert not values[start + count : start + capacity].any()


@pytest.mark.gpu
def test_many_programs_agree(device: torch.device, generator: torch.Generator) -> None:
    """Thousands of programs that wait for each other give the same entries each time."""
    from gossamer.rowsparse._triton.list_entries import list_all

    x = random_rows((20000, 704), density=0.02, dtype=torch.bfloat16, device=device, generator=generator)
    column = x.nonzero()[:, 1]
    for _ in range(20):
        values, indices, _ = list_all(x)
        assert torch.equal(indices.long(), column) and torch.equal(values, x[x != 0])

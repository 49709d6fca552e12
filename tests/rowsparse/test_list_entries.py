"""One list of entries a row, each behind that of the row before, whatever the room."""

import pytest
import torch

from gossamer.rowsparse.pack import list_entries_operator
from gossamer.testing import random_rows


@pytest.mark.parametrize("m, n", [(1, 1), (300, 24), (3, 9000), (2, 17001), (7, 640)])
@pytest.mark.parametrize("share", [1.0, 0.4, 0.0])
def test_counts_are_true_and_a_prefix_of_entries_is_stored(
    m: int, n: int, share: float, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    x = random_rows((m, n), l0=min(n, 30), dtype=dtype, device=device, generator=generator)
    x[m // 2] = 0
    x[-1, : n // 3] = 1
    row, column = x.nonzero(as_tuple=True)
    true = torch.bincount(row, minlength=m)
    room = int(share * row.numel())
    values, indices, starts, counts = list_entries_operator(x, room)
    assert torch.equal(counts.long(), true)
    assert torch.equal(starts, torch.nn.functional.pad(true.cumsum(0), (1, 0)))
    assert torch.equal(indices.long(), column[:room]) and torch.equal(values, x[row, column][:room])


@pytest.mark.gpu
def test_many_programs_agree(device: torch.device, generator: torch.Generator) -> None:
    """Thousands of programs that wait for each other give the same bits again, in a captured graph as well."""
    x = random_rows((20000, 704), density=0.02, dtype=torch.bfloat16, device=device, generator=generator)
    column = x.nonzero()[:, 1]
    room = column.numel()
    for _ in range(20):
        values, indices, starts, _ = list_entries_operator(x, room)
        assert int(starts[-1]) == room and torch.equal(indices.long(), column) and torch.equal(values, x[x != 0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, again, _, _ = list_entries_operator(x, room)
    for _ in range(3):
        again.zero_()
        graph.replay()
        assert torch.equal(again, indices)

"""Groups of neighbours that read the weights of all their entries once."""

import pytest
import torch

from gossamer.ffn import costs
from gossamer.ffn.records import SparseFfn
from gossamer.ffn.sparse_ffn import sparse_ffn
from tests.ffn.dense import check, operands


@pytest.mark.kernels
@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_unions_of_neighbours(shared: float, device: torch.device, generator: torch.Generator) -> None:
    """What the operator says of itself: entries of rows, columns of groups."""
    a = operands((36, 24, 600, 20), torch.float32, device, generator, shared=shared)
    z = a["x"] @ a["gate"].t() + a["gate_bias"]
    kept = z > 0
    parts = (a["x"], a["gate"], a["gate_bias"], None, a["up"], a["up_bias"], a["down"], a["down_bias"])
    out, nnz, sizes = sparse_ffn(SparseFfn(*parts, False, True, 1))
    check(a, out)
    assert nnz.tolist() == kept.sum(1).tolist()
    limit = costs.costs_of(600, 24, 20, True, a["x"]).limit
    light = kept & (kept.sum(1) <= limit)[:, None]
    assert sizes.tolist() == [int(light[i : i + costs.GROUP].any(0).sum()) for i in range(0, 36, costs.GROUP)]
    # Sharing pays, and strangers' unions do not.
    assert bool(sizes[0] * costs.PRICE <= light[: costs.GROUP].sum()) == (shared > 0)


@pytest.mark.kernels
def test_lists_of_columns(device: torch.device, generator: torch.Generator) -> None:
    """Ascending, each once, with the values that the rows have there; one of every so many groups can be counted."""
    from gossamer.ffn._triton import union
    from gossamer.ffn._triton.sparse_ffn import pack

    a = operands((70, 24, 600, 20), torch.float32, device, generator, shared=0.9)
    z = torch.relu(a["x"] @ a["gate"].t() + a["gate_bias"])
    packed = pack(a["x"], a["gate"], a["gate_bias"], None)[0]
    assert (packed.counts <= 16).all()
    unions = union.unite(packed, 600, 600, True, None)
    groups = [slice(first, min(first + costs.GROUP, 70)) for first in range(0, 70, costs.GROUP)]
    taken = 0
    for number, group in enumerate(groups):
        columns = (z[group] > 0).any(0).nonzero().flatten()
        size = int(unions.sizes[number])
        assert size in (0, len(columns))
        if size:
            taken += 1
            assert unions.columns[number, :size].tolist() == columns.tolist()
            torch.testing.assert_close(unions.values[group, :size], z[group][:, columns].square())
    assert taken
    sizes = torch.empty(2, dtype=torch.int32, device=device)
    union.count(packed, 600, 2, 600, sizes)
    assert sizes.tolist() == [int((z[groups[number]] > 0).any(0).sum()) for number in (0, 2)]

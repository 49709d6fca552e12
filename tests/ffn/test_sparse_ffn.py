"""The operator: what it packs, what it says of rows and groups, and rows in several parts."""

import pytest
import torch

from gossamer.ffn.records import SparseFfn
from gossamer.ffn.sparse_ffn import sparse_ffn
from tests.ffn.dense import check, operands


@pytest.mark.kernels
@pytest.mark.parametrize("kept", ["relu", "jumprelu"])
def test_what_is_packed(kept: str, device: torch.device, generator: torch.Generator) -> None:
    """Tile by tile the columns and values of what is active, ascending, up to the slots; and how many there are."""
    from gossamer.ffn._triton.gather import SLOTS, TILE
    from gossamer.ffn._triton.sparse_ffn import pack

    tile, slots = TILE.value, SLOTS.value
    a = operands((5, 24, 600, 20), torch.float32, device, generator)
    a["x"][3] *= 64
    a["x"][4] = 0
    threshold = torch.full((600,), 0.6, device=device) if kept == "jumprelu" else None
    z = a["x"] @ a["gate"].t() + a["gate_bias"]
    z = torch.where(z > (0 if threshold is None else threshold), z, 0)
    values, indices, counts = pack(a["x"], a["gate"], a["gate_bias"], threshold)[0]
    assert values.shape == (5, 3, slots) and indices.shape == values.shape
    for row in range(5):
        for number, part in enumerate(z[row].split(tile)):
            columns = part.nonzero().flatten()
            assert int(counts[row, number]) == len(columns)
            if len(columns) <= slots:
                assert indices[row, number, : len(columns)].tolist() == columns.tolist()
                torch.testing.assert_close(values[row, number, : len(columns)], part[columns])
    assert (counts[3] > slots).any() and not counts[4].any()


@pytest.mark.kernels
def test_rows_in_several_parts(
    device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gossamer.ffn._triton import sparse_ffn as kernels

    monkeypatch.setattr(kernels, "BLOCK", 32)
    a = operands((40, 16, 260, 20), torch.float32, device, generator, shared=0.8)
    kept = a["x"] @ a["gate"].t() + a["gate_bias"] > 0
    parts = (a["x"], a["gate"], a["gate_bias"], None, a["up"], a["up_bias"], a["down"], a["down_bias"])
    out, nnz = sparse_ffn(SparseFfn(*parts, False, True))
    check(a, out)
    assert nnz.tolist() == kept.sum(1).tolist()


@pytest.mark.native
@pytest.mark.parametrize("counted", [False, True])
def test_entries_are_counted_where_asked(counted: bool, device: torch.device, generator: torch.Generator) -> None:
    a = operands((21, 24, 300, 40), torch.float32, device, generator)
    kept = a["x"] @ a["gate"].t() + a["gate_bias"] > 0
    parts = (a["x"], a["gate"], a["gate_bias"], None, a["up"], a["up_bias"], a["down"])
    out, nnz = sparse_ffn(SparseFfn(*parts, a["down_bias"], False, counted))
    check(a, out)
    assert nnz.tolist() == (kept.sum(1).tolist() if counted else [])

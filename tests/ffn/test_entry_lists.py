"""The lists of entries by rows and by columns, against dense matrices."""

import pytest
import torch

from gossamer.rowsparse.formats import empty_twell

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("hot", [[], [3, 20, 44]])
def test_both_lists(hot: list[int], squared: bool, device: torch.device, generator: torch.Generator) -> None:
    """Of 70 rows: three groups of 32, some rows empty, some too full for their tile, for the limit, or for the room."""
    from gossamer.ffn._triton.entry_lists import Hot, column_lists, row_lists
    from gossamer.rowsparse._triton.twell import launch_pack_twell

    m, n, tile, slots, limit, room = 70, 45, 16, 8, 14, 480
    share = torch.rand(m, 1, device=device, generator=generator) * 0.45
    z = torch.randn(m, n, device=device, generator=generator)
    z = torch.where(torch.rand(m, n, device=device, generator=generator) < share, z.abs() + 0.1, 0)
    z[[2, 40]], z[5] = 0, 1
    packed = empty_twell(z, m, n, tile, slots)
    launch_pack_twell(z, None, tile, packed)
    listed = torch.tensor([len(hot), len(hot), *hot, *[0] * (16 - len(hot))], dtype=torch.int32, device=device)
    slots_of = torch.full((n,), -1, dtype=torch.int32, device=device)
    slots_of[hot] = torch.arange(len(hot), dtype=torch.int32, device=device)
    dense = torch.zeros(2, m, 16, device=device)
    fired = torch.zeros(n, dtype=torch.int32, device=device)
    lists = row_lists(packed, Hot(listed, slots_of, dense, fired), tile, n, limit, room)
    crowded = torch.stack([part.sum(1) > slots for part in (z != 0).split(tile, 1)]).any(0)
    whole = z.clone()
    z[:, hot] = 0
    counts = (z != 0).sum(1)
    kept, heavy, end = [], [], 0
    for row, count in enumerate(counts.tolist()):
        fits = not crowded[row] and count <= limit and end + count <= room
        end += count * fits
        kept.append(count * fits)
        if not fits and (count or crowded[row]):
            heavy.append(row)
    assert 0 < len(heavy) < m // 2 and end > 200
    # Of a tile too full for its slots, not all entries are known.
    assert torch.equal(lists.nnz[~crowded], counts[~crowded].int())
    assert (lists.nnz >= counts).all() and lists.offsets.diff().tolist() == kept
    assert lists.rows[1, 1 : 1 + int(lists.rows[1, 0])].tolist() == heavy
    gathered = torch.ones(m, 1, dtype=torch.bool, device=device)
    gathered[heavy] = False
    light, whole = torch.where(gathered, z, 0), torch.where(gathered, whole, 0)
    assert torch.equal(dense[0, :, : len(hot)], whole[:, hot]) and not dense[0, :, len(hot) :].any()
    rows, columns = light.nonzero(as_tuple=True)
    assert lists.columns[:end].tolist() == columns.tolist()
    assert torch.equal(lists.values[0, :end], light[rows, columns])
    assert lists.fired.tolist() == (whole != 0).sum(0).tolist()
    up = torch.randn(room, device=device, generator=generator)
    turned = column_lists(lists.values[0], up, lists.columns, lists.offsets, n, squared)
    across, down = light.t().nonzero(as_tuple=True)
    assert turned.rows[:end].tolist() == down.tolist()
    assert turned.offsets.tolist() == [0, *(light != 0).sum(0).cumsum(0).tolist()]
    places = turned.places[:end].long()
    assert lists.columns[places].tolist() == across.tolist()
    gate = light.t()[across, down]
    torch.testing.assert_close(turned.hidden[:end], (gate * gate if squared else gate) * up[places])

"""Rows with too many entries for lists, and neurons that most rows have, under gradients."""

import pytest
import torch

from gossamer import nn
from gossamer._core.ops import INTERPRET
from gossamer.ffn.records import SparseTraining
from gossamer.ffn.sparse_training import sparse_training
from tests.ffn.trained import (
    check,
    drawn,
    gradients,
    leaves,
    operator_arguments,
    reference,
    taken,
)


@pytest.mark.parametrize("limit, room, slots", [(6, 1600, 256), (300, 160, 256), (300, 1600, 1), (0, 16, 16)])
@pytest.mark.parametrize("gated", [True, False])
def test_rows_in_no_list(
    gated: bool, limit: int, room: int, slots: int, device: torch.device, generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Too many entries for a row, for the buffer and for a tile: such rows are computed all the same, in turns."""
    if device.type == "cuda" or INTERPRET:
        from gossamer.ffn._triton import heavy as kernels
        from gossamer.ffn._triton import train_heavy

        for module in (kernels, train_heavy):
            monkeypatch.setattr(module, "reserved", lambda *_: 16)
    a, grad = drawn((41, 24, 70, 20), torch.float32, device, generator, 1.0)
    a = taken(a, gated)
    counts = (a["x"] @ a["gate"].t() + a["gate_bias"] > 0).sum(1)
    ours, wide = leaves(a), leaves(a, torch.float64)
    out, _, nnz, fired, _, _, (offsets, heavy), *_ = sparse_training(
        SparseTraining(*operator_arguments(ours, limit, room, slots))
    )
    offsets = offsets[:42]
    listed = heavy[1 : 1 + int(heavy[0])]
    assert nnz.tolist() == counts.tolist() and int(fired.sum()) == int(counts.sum())
    # On the CPU a tile has slots for all.
    assert (listed.numel() > 0 or slots == 1) and listed.tolist() == sorted(listed.tolist())
    held = offsets.diff()
    assert (held[listed] == 0).all()
    others = torch.ones_like(counts, dtype=torch.bool)
    others[listed] = False
    assert (held == counts)[others].all() and int(offsets[-1]) <= room
    if limit < 300:
        assert others.tolist() == (counts <= limit).tolist()
    got = gradients(ours, out, grad)
    want = gradients(wide, reference(wide), grad)
    for name, result in got.items():
        torch.testing.assert_close(result.double(), want[name], rtol=2e-5, atol=2e-5)


def test_dense_rows_and_dense_neurons(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    m, n = (40, 80) if INTERPRET else (140, 300)
    a, grad = drawn((m, 24, n, 40), dtype, device, generator, 3.0)
    a["x"][:, 0], a["gate"][:, 0] = 0, 1
    a["x"][[3, 17, 18, m - 1], 0] = 8
    a["gate_bias"][[5, n - 50]] = 9.0
    a["x"][20] = 0
    check(a, grad)


def test_bursts_in_the_middle_of_training(device: torch.device, generator: torch.Generator) -> None:
    """Steps in which all rows, one in three, or one neuron of all rows are active, between others: the weights stay
    those of dense training, and lists go on with the size that they had."""
    m, n = (40, 80) if INTERPRET else (140, 300)
    wide = nn.GatedMLP(24, n, "relu", bias=True, dtype=torch.float64, device=device)
    with torch.no_grad():
        wide.gate_proj.bias.fill_(-1.5)
        wide.gate_proj.weight[:, 0] = 1
    ours = nn.GatedMLP(24, n, "relu", bias=True, method="auto", l1=True, device=device)
    ours.load_state_dict(wide.state_dict())
    ours.density.rows.pinned = "gather"
    unlisted: dict[int, int] = {}
    optimizers = [torch.optim.SGD(block.parameters(), lr=1e-3) for block in (ours, wide)]
    for step in (2, 4, 5) if INTERPRET else range(7):
        x = torch.randn(m, 24, device=device, generator=generator)
        x[:, 0] = 8.0 if step == 2 else 0.0
        x[:: 1 if step == 2 else 3, 0] = 8.0 * (step in (2, 4))
        for block in (ours, wide):
            with torch.no_grad():
                block.gate_proj.bias[7] = 9.0 if step == 5 else -1.5
        out, activity = ours(x)
        (out.square().mean() + 1e-3 * activity.l1).backward()
        gate = torch.relu(wide.gate_proj(x.double()))
        hidden = gate * wide.up_proj(x.double())
        (wide.down_proj(hidden).square().mean() + 1e-3 * hidden.abs().sum() / m).backward()
        unlisted[step] = int(activity.unlisted)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, a), b in zip(ours.named_parameters(), wide.parameters()):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4, msg=f"{name}, step {step}")
        # The rounding of one step is not carried into the next.
        ours.load_state_dict(wide.state_dict())
    assert unlisted[2] > 0.8 * m and unlisted[4] > 0.3 * m
    if not INTERPRET:
        assert unlisted[0] == unlisted[6] == 0

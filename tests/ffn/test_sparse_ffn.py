"""The operator: what it packs, what it says of rows and groups, and rows in several parts."""

import pytest
import torch

from gossamer._core.ops import INTERPRET
from gossamer.ffn.costs import costs_of
from gossamer.ffn.records import SparseFfn
from gossamer.ffn.sparse_ffn import sparse_ffn
from tests.ffn.dense import SPARSE, call, check, operands


@pytest.mark.kernels
@pytest.mark.parametrize("kept", ["relu", "jumprelu"])
def test_what_is_packed(kept: str, device: torch.device, generator: torch.Generator) -> None:
    """Tile by tile the columns and values of what is active, ascending, up to the slots; and how many there are."""
    from gossamer.ffn._triton._packed import SLOTS, TILE
    from gossamer.ffn._triton.sparse_ffn import pack

    tile, slots = TILE.value, SLOTS.value
    a = operands((5, 24, 600, 20), torch.float32, device, generator)
    a["x"][3] *= 64
    a["x"][4] = 0
    threshold = torch.full((600,), 0.6, device=device) if kept == "jumprelu" else None
    z = a["x"] @ a["gate"].t() + a["gate_bias"]
    z = torch.where(z > (0 if threshold is None else threshold), z, 0)
    packed = pack(a["x"], a["gate"], a["gate_bias"], threshold)[0]
    assert packed.values.shape == (5, 3, slots) and packed.indices.shape == packed.values.shape
    for row in range(5):
        for number, part in enumerate(z[row].split(tile)):
            columns = part.nonzero().flatten()
            assert int(packed.counts[row, number]) == len(columns)
            if len(columns) <= slots:
                assert packed.indices[row, number, : len(columns)].tolist() == columns.tolist()
                torch.testing.assert_close(packed.values[row, number, : len(columns)], part[columns])
    assert (packed.counts[3] > slots).any() and not packed.counts[4].any()


@pytest.mark.kernels
@pytest.mark.parametrize("united", [False, True])
def test_rows_in_several_parts(
    united: bool, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gossamer.ffn._triton import sparse_ffn as kernels

    monkeypatch.setattr(kernels, "BLOCK", 32)
    a = operands((40, 16, 260, 20), torch.float32, device, generator, shared=0.8)
    kept = a["x"] @ a["gate"].t() + a["gate_bias"] > 0
    parts = (a["x"], a["gate"], a["gate_bias"], None, a["up"], a["up_bias"], a["down"], a["down_bias"])
    out, nnz, sizes = sparse_ffn(SparseFfn(*parts, False, united, 1))
    check(a, out)
    assert nnz.tolist() == kept.sum(1).tolist()
    limit = costs_of(260, 16, 20, True, a["x"]).limit
    light = kept & (kept.sum(1) <= limit)[:, None]
    assert sizes.tolist() == [int(light[:32].any(0).sum()), int(light[32:].any(0).sum())]


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [0.0, 2.0, 9.0])
def test_a_plan_repeats_the_launches(
    shift: float, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few rows, and of many whose operands are read as they lie; with other operands, at other addresses."""
    from gossamer._core import launch, tuning
    from gossamer.ffn._triton import replay

    for m in (7, 40, 2000):
        monkeypatch.setattr(replay, "_plans", launch.Plans())
        for _ in range(3):
            a = operands((m, 256, 520, 64), torch.bfloat16, device, generator, shift=shift, shared=0.8)
            for activation in ("relu", "relu2"):
                out = call(a, method="gather", activation=activation)
                check(a, out, activation)
                assert out.equal(call(a, method="gather", activation=activation))
        by_columns = {**a, "down": a["down"].t().contiguous().t()}
        for method in SPARSE[:1] if m == 7 else SPARSE:
            for _ in range(2):
                want = call(by_columns, method=method)
                assert all(want.equal(call(by_columns, method=method)) for _ in range(3))
                check(by_columns, want)
                by_columns["x"] = by_columns["x"].flip(0)
        assert m == 7 or bool(replay._plans._kept) == tuning.hopper(device)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [7, 40])
def test_one_tensor_for_two_operands_and_then_two(m: int, device: torch.device, generator: torch.Generator) -> None:
    """A repetition reads each operand of its own call."""
    a = operands((m, 256, 520, 64), torch.bfloat16, device, generator)
    for _ in range(2):
        one = {**a, "up": a["gate"], "up_bias": a["gate_bias"]}
        check(one, call(one, method="gather"))
        check(a, call(a, method="gather"))


@pytest.mark.native
@pytest.mark.parametrize("step", [0, 1])
def test_entries_are_counted_where_asked(step: int, device: torch.device, generator: torch.Generator) -> None:
    a = operands((21, 24, 300, 40), torch.float32, device, generator)
    kept = a["x"] @ a["gate"].t() + a["gate_bias"] > 0
    parts = (a["x"], a["gate"], a["gate_bias"], None, a["up"], a["up_bias"], a["down"])
    out, nnz, sizes = sparse_ffn(SparseFfn(*parts, a["down_bias"], False, False, step))
    check(a, out)
    assert nnz.tolist() == (kept.sum(1).tolist() if step else [])
    assert len(sizes) == (step if device.type == "cuda" or INTERPRET else 1)

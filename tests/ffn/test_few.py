"""Up to 16 rows, which have kernels of their own."""

import pytest
import torch

from gossamer.ffn.sparse_ffn import sparse_ffn
from tests.ffn.dense import SPARSE, call, check, operands


@pytest.mark.parametrize("m", [0, 1, 16, 17])
@pytest.mark.parametrize("n", [0, 5, 300])
def test_few_rows(m: int, n: int, device: torch.device, generator: torch.Generator) -> None:
    a = operands((m, 24, n, 33), torch.float32, device, generator, shift=1.0)
    for method in SPARSE if m > 16 else SPARSE[:1]:
        check(a, call(a, method=method))


@pytest.mark.kernels
@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_any_tiles(
    shared: float, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that are more than there is to do, and sums over columns in several parts, the last one not full. Those
    who count who has finished leave their words at 0."""
    from gossamer._core import launch
    from gossamer.ffn._triton import few

    words = torch.zeros(64, dtype=torch.int32, device=device)
    monkeypatch.setattr(launch.counters, "get", lambda size, device: words)
    a = operands((7, 24, 300, 40), torch.float32, device, generator, shared=shared)
    kept = a["x"] @ a["gate"].t() + a["gate_bias"] > 0
    for tile in (few.Tile((16, 64), down=(64, 16), splits=3), few.Tile((64, 32), down=(1024, 64), splits=5)):
        out, nnz = torch.empty(7, 40, device=device), torch.empty(7, dtype=torch.int32, device=device)
        gate, up = (a["gate"], a["gate_bias"], None), (a["up"], a["up_bias"])
        few.project(a["x"], gate, up, a["down"], a["down_bias"], out, nnz, False, tile)
        check(a, out)
        assert nnz.tolist() == kept.sum(1).tolist() and not words.any()


def test_entries_are_counted(device: torch.device, generator: torch.Generator) -> None:
    for m in (1, 16):
        a = operands((m, 24, 300, 40), torch.float32, device, generator, shift=1.0)
        kept = a["x"] @ a["gate"].t() + a["gate_bias"] > 0
        parts = (a["x"], a["gate"], a["gate_bias"], None, None, None, a["down"], None, None)
        for step in (0, 1):
            _, nnz, sizes = sparse_ffn(*parts, True, False, step, False)
            assert nnz.tolist() == (kept.sum(1).tolist() if step else []) and sizes.tolist() == [0] * step

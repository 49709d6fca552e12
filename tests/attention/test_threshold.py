"""The key down to which rows of integers take their largest, and the column at which ties end."""

from typing import Any

import pytest
import torch

from gossamer._core.ops import INTERPRET

kernels = pytest.importorskip("gossamer.attention._triton.threshold")
pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("registers", [32768, 64], ids=["in registers", "beyond them"])
@pytest.mark.parametrize("levels", [31000, 5, 1])
@pytest.mark.parametrize("k, each", [(1, False), (40, False), (40, True), (300, False)])
def test_a_stable_sort_takes_the_same(
    k: int, each: bool, levels: int, registers: int, device: torch.device, generator: torch.Generator, monkeypatch: Any
) -> None:
    monkeypatch.setattr(kernels, "MAX_REGISTERS", registers)
    rows, columns = 3, 256
    keys = torch.randint(1, levels + 1, (rows, columns), device=device, generator=generator, dtype=torch.int16)
    # The kernel reads 16 bytes at a time, and scores are 0 where a query sees no key.
    for row in range(rows):
        keys[row, columns - rows + 1 + row :] = 0
    found = [torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2)]
    wanted = torch.tensor([k, max(k // 2, 1), 1], dtype=torch.int32, device=device) if each else None
    # Queries that see 254, 255 and 256 keys.
    sizes = (0, rows, rows, columns, columns, 1)
    packed = not (INTERPRET or torch.version.hip)
    kernels.find_thresholds(keys, None, wanted, *found, rows, sizes, (k, 0, 0), packed)
    for row in range(rows):
        seen, take = columns - rows + 1 + row, k if wanted is None else int(wanted[row])
        best = keys[row, :seen].sort(descending=True, stable=True).indices[:take]
        column = torch.arange(seen, device=device)
        threshold, last = (int(x[row]) for x in found)
        taken = (keys[row, :seen] > threshold) | ((keys[row, :seen] == threshold) & (column <= last))
        assert torch.equal(taken.nonzero().squeeze(1), best.sort().values)


@pytest.mark.parametrize("low, high", [(20000, 20000), (10, 25000), (25000, 10)])
def test_a_sample_that_misleads(
    low: int, high: int, device: torch.device, generator: torch.Generator, monkeypatch: Any
) -> None:
    """Of 16 neighbours the sample sees the first eight, whose keys lie elsewhere than those of the others."""
    monkeypatch.setattr(kernels, "MAX_REGISTERS", 64)
    columns, k = 16384, 500
    keys = torch.randint(0, 6000, (1, columns), device=device, generator=generator, dtype=torch.int16)
    sampled = torch.arange(columns, device=device) % 16 < 8
    keys += torch.where(sampled, low, high).to(torch.int16)
    threshold, last = (torch.empty(1, dtype=torch.int32, device=device) for _ in range(2))
    packed = not (INTERPRET or torch.version.hip)
    kernels.find_thresholds(keys, None, None, threshold, last, 1, (0, 1, 64, columns, columns, 1), (k, 0, 0), packed)
    best = keys[0].sort(descending=True, stable=True).indices[:k]
    taken = (keys[0] > threshold) | ((keys[0] == threshold) & (torch.arange(columns, device=device) <= last))
    assert torch.equal(taken.nonzero().squeeze(1), best.sort().values)

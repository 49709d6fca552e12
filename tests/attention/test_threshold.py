"""The key down to which rows of integers take their largest, and the column at which ties end."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from gossamer._core.ops import INTERPRET

kernels = pytest.importorskip("gossamer.attention._triton.threshold")
few_rows = pytest.importorskip("gossamer.attention._triton.few_rows")
pytestmark = pytest.mark.kernels
KEPT = 31744


def check(
    find: Callable[..., Any], keys: torch.Tensor, k: int, wanted: torch.Tensor | None = None, window: int = 0,
    sinks: int = 0,
) -> None:  # fmt: skip
    """Rows of a causal block: the last sees all columns, the one before it all but one."""
    rows, columns = keys.shape
    # The kernel reads 16 bytes at a time, and scores are 0 where a query sees no key.
    for row in range(rows):
        keys[row, columns - rows + 1 + row :] = 0
    found = [torch.empty(rows, dtype=torch.int32, device=keys.device) for _ in range(2)]
    packed = not (INTERPRET or torch.version.hip)
    sizes = (0, rows, rows, columns, columns, 1)
    assert find((keys, None, wanted), found, rows, sizes, (k, window, sinks), packed, 1) is not False
    for row in range(rows):
        seen, take = columns - rows + 1 + row, k if wanted is None else int(wanted[row])
        column = torch.arange(seen, device=keys.device)
        scores = torch.where((column < sinks) | (column >= seen - window), KEPT, keys[row, :seen].int())
        best = scores.sort(descending=True, stable=True).indices[:take]
        threshold, last = (int(x[row]) for x in found)
        taken = (scores > threshold) | ((scores == threshold) & (column <= last))
        assert torch.equal(taken.nonzero().squeeze(1), best.sort().values)


@pytest.fixture(params=["in registers", "beyond them", "in segments"])
def find(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Rows that fit registers, rows that do not, and few of these, whose segments have a program each."""
    if request.param != "in registers":
        monkeypatch.setattr(kernels, "MAX_REGISTERS", 64)
    monkeypatch.setattr(few_rows, "FEW", 1)
    return few_rows.find_in_segments if request.param == "in segments" else kernels.find_thresholds


@pytest.mark.parametrize("levels", [31000, 5, 1])
@pytest.mark.parametrize("k, each", [(1, False), (40, False), (40, True), (300, False)])
def test_a_stable_sort_takes_the_same(
    find: Callable[..., Any], k: int, each: bool, levels: int, device: torch.device, generator: torch.Generator
) -> None:
    keys = torch.randint(1, levels + 1, (3, 256), device=device, generator=generator, dtype=torch.int16)
    wanted = torch.tensor([k, max(k // 2, 1), 1], dtype=torch.int32, device=device) if each else None
    check(find, keys, k, wanted)


@pytest.mark.parametrize("find", ["beyond them", "in segments"], indirect=True)
@pytest.mark.parametrize("levels", [31000, 300])
@pytest.mark.parametrize("window, sinks", [(0, 0), (300, 0), (30, 7)])
def test_long_rows(
    find: Callable[..., Any], window: int, sinks: int, levels: int, device: torch.device, generator: torch.Generator
) -> None:
    """With few levels many keys equal the threshold."""
    keys = torch.randint(1, levels + 1, (3, 8192), device=device, generator=generator, dtype=torch.int16)
    check(find, keys, 500, window=window, sinks=sinks)


@pytest.mark.parametrize("workspace", [None, 1 << 26, 0], ids=["default", "64 MiB", "the least"])
@pytest.mark.parametrize("b, tq, tk", [(1, 131072, 131072), (1, 65536, 131072), (3, 100, 40000), (2, 4096, 4096)])
def test_slabs_stay_within_the_workspace(b: int, tq: int, tk: int, workspace: int | None) -> None:
    """And each row has its slab."""
    from gossamer.attention._triton import select_topk as gpu
    from gossamer.attention.select_topk import workspace_of

    if workspace == 0:
        with pytest.raises(ValueError, match="workspace must be at least") as error:
            workspace_of("select", 1, tk)
        workspace = int(str(error.value).split("at least ")[1].split(" ")[0])
    workspace = workspace_of("select", workspace, tk)
    padded = -(-tq // 64) * 64
    plan = gpu.slab_plan(b, padded, tq, tk, True, 64, 2048, workspace, 1)
    assert plan[0].first == 0 and plan[-1].first + plan[-1].rows == b * padded
    for slab, after in pairwise(plan):
        assert slab.first + slab.rows == after.first
    assert all(2 * slab.rows * slab.columns <= workspace for slab in plan)

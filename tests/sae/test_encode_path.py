"""Which way a call of sae.encode goes: by the rules, by the table of docs/sae.md, and by what runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gossamer import gemm, rowsparse, sae
from gossamer._core import tuning
from gossamer.rowsparse.density import Density
from gossamer.sae import encode_path
from gossamer.sae.encode_path import choose_path
from tests.sae.dense import valued

PAGE = (Path(__file__).parents[2] / "docs" / "sae.md").read_text()
SECTION = PAGE.partition("## The path of encode")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line.startswith("|")]
CALLS = [row for row in ROWS if len(row) == 7 and row[1].replace(",", "").isdigit()]


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def weight_of(d_sae: int, dtype: torch.dtype, device: str) -> Any:
    """What is asked of a weight [2,304, d_sae]."""
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    return SimpleNamespace(
        shape=(2304, d_sae), device=where, is_cuda=device == "cuda", element_size=lambda: dtype.itemsize
    )


@pytest.mark.native
@pytest.mark.parametrize("row", CALLS, ids=" ".join)
def test_the_table_of_the_docs(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    activation, rows, d_sae, slots, device, gradient, path = row
    name, _, k = activation.strip("`").partition(", k ")
    monkeypatch.setattr(tuning, "hopper", lambda device: device.type == "cuda" and "Hopper" in row[4])
    monkeypatch.setattr(encode_path, "INTERPRET", False)
    weight = weight_of(
        number(d_sae), torch.float32 if "float32" in device else torch.bfloat16, device.partition(",")[0].lower()
    )
    capacity = number(slots) if slots.replace(",", "").isdigit() else None
    chosen = choose_path(name, number(rows), int(k or 0), capacity, weight, gradient == "yes")
    assert f"`{chosen}`" == path


@pytest.mark.native
def test_the_docs_name_every_path() -> None:
    named = [row[0].strip("`") for row in ROWS if len(row) == 2 and row[0].startswith("`")]
    assert sorted(named) == sorted(get_args(encode_path.Path))
    assert {row[6].strip("`") for row in CALLS} == set(named)


@pytest.mark.native
def test_rows_that_overflow_leave_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "hopper", lambda device: True)
    weight = weight_of(65536, torch.bfloat16, "cuda")
    for over, path in ((0, "tiles"), (256, "tiles"), (257, "list")):
        known = Density(rows=4096, mean=64.0, largest=5000, over=over, light=9999)
        assert choose_path("relu", 4096, 0, 1024, weight, False, known) == path


def test_what_runs_is_named(device: torch.device, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a profiler's range, wherever kernels run."""
    x, W = torch.randn(3, 8, device=device), torch.randn(8, 300, device=device)
    threshold = torch.ones(300, device=device)
    calls: dict[str, dict[str, Any]] = {
        "list": valued("jumprelu", threshold=threshold),
        "topk": valued("topk", k=4),
        "batch": valued("batchtopk", k=4),
    }
    ranges = {} if mode == "cpu" else calls
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for options in ranges.values():
            sae.encode(x, W, **options)
        monkeypatch.setattr(encode_path, "packs_in_product", lambda m, weight: True)
        sae.encode(x, torch.randn(8, 304, device=device), capacity=19)
    prefix = "gossamer::sae.encode/"
    names = {event.key.removeprefix(prefix) for event in seen.key_averages() if event.key.startswith(prefix)}
    assert names == {*ranges, "tiles"}


def test_density_follows(device: torch.device, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the path, counts what rows hold, and turns away from tiles that overflow."""
    monkeypatch.setattr(encode_path, "packs_in_product", lambda m, weight: True)
    tracker = rowsparse.DensityTracker(lag=1)
    x, W = torch.randn(2, 1, 8, device=device), torch.randn(8, 2304, device=device)
    x.requires_grad_()
    plain = "torch" if mode == "cpu" else "list"

    def call(**options: Any) -> Tensor:
        rows = sae.encode(x, W, density=tracker, **options)
        assert rows.shape == (2, 1, 2304)
        return rows.to_dense()

    want = torch.relu(x @ W)
    with torch.no_grad():
        for path in ("tiles", plain, plain):
            torch.testing.assert_close(call(capacity=40), want)
            assert tracker.last_path == path
        known = tracker.known(training=False)
        assert known is not None and known.rows == 2 and known.over == 2
        assert known.mean == pytest.approx((want > 0).sum(-1).float().mean().item(), abs=2)
    call(activation=gemm.BatchTopK(3)).sum().backward()
    assert tracker.last_path == ("torch" if mode == "cpu" else "batch")
    call(activation=gemm.TopK(3)).sum().backward()
    seen = tracker.known(training=True)
    assert seen is not None and seen.mean == 3 and x.grad is not None
    with pytest.raises(TypeError, match=r"sae.encode: density must be a rowsparse.DensityTracker or None, got int"):
        sae.encode(x, W, density=3)  # type: ignore[arg-type]


def test_rows_lie_as_kernels_load_them() -> None:
    """Numbers from one row to the next on a GPU, and whether that takes a copy of the weight."""
    half, single = (SimpleNamespace(is_cuda=True, element_size=lambda s=s: s) for s in (2, 4))
    for m, n, weight, activation, stride, copies in (
        (1087, 52567, half, "batchtopk", 52576, True),
        (1087, 52568, half, "topk", 52576, False),
        (22, 48353, half, "batchtopk", 48368, False),
        (5, 31574, single, "batchtopk", 31584, False),
        (4096, 65536, half, "topk", 65536, False),
        (1087, 52567, half, "relu", 52576, True),
        (1087, 52568, half, "relu", 52568, False),
        (827, 1364, half, "jumprelu", 1376, False),
        (21, 56647, single, "jumprelu", 56656, False),
        (21, 56648, single, "jumprelu", 56648, False),
        # Too short for a dozen launches, or for two.
        (126, 1241, half, "relu", 1241, False),
        (2, 1001, half, "topk", 1001, False),
    ):
        assert encode_path.row_stride(m, n, weight, activation) == stride  # type: ignore[arg-type]
        assert encode_path.copies_weight(m, n, weight) == copies  # type: ignore[arg-type]

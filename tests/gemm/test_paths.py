"""The paths of calls of gemm: by the table of docs/gemm.md, and by the ranges of a profiler."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gossamer import gemm
from gossamer._core import tuning
from gossamer.gemm import linear_glu_path, linear_pack_path
from gossamer.gemm.records import LinearGlu, LinearPack

PAGE = (Path(__file__).parents[2] / "docs" / "gemm.md").read_text()
SECTION = PAGE.partition("## The path of a call")[2].partition("\n## ")[0]
ROWS = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if "`" in line]
CALLS = [row for row in ROWS if len(row) == 6]
PATHS = {"linear_glu": linear_glu_path, "linear_pack": linear_pack_path}


def matrix(rows: int, columns: int, row: list[str]) -> Any:
    """What is asked of a matrix that lies row by row."""
    kind, dtype = row[4].partition(",")[0].lower(), torch.float32 if "float32" in row[4] else torch.bfloat16
    strides = (columns, 1)
    return SimpleNamespace(
        shape=(rows, columns),
        dtype=dtype,
        device=torch.device(kind, 99) if kind == "cuda" else torch.device(kind),
        is_cuda=kind == "cuda",
        element_size=lambda: dtype.itemsize,
        stride=lambda dim=None: strides if dim is None else strides[dim],
        data_ptr=lambda: 0,
        numel=lambda: rows * columns,
        t=lambda: None,
    )


@pytest.mark.native
@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("row", CALLS, ids=" ".join)
def test_the_table_of_the_docs(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    operator, (m, k, n), path = row[0], (int(cell.replace(",", "")) for cell in row[1:4]), row[5]
    monkeypatch.setattr(tuning, "hopper", lambda device: "Hopper" in row[4])
    monkeypatch.setattr(PATHS[operator], "INTERPRET", False)
    x, weight = matrix(m, k, row), matrix(n, k, row)
    chosen = {
        "linear_glu": lambda: linear_glu_path.choose_path(LinearGlu(x, weight, weight, None, None, "silu", False)),
        "linear_pack": lambda: linear_pack_path.choose_path(LinearPack(x, weight, None, None, 128, False)),
    }
    assert chosen[operator]() == path


@pytest.mark.native
def test_the_docs_name_every_path() -> None:
    named = {(operator, path) for operator, module in PATHS.items() for path in module.PATHS}
    assert named == {(row[0], row[5]) for row in CALLS}


def test_what_runs_is_named(device: torch.device, mode: str) -> None:
    """In a profiler's range, wherever kernels run."""
    x, weight = (torch.randn(*size, device=device) for size in ((3, 16), (16, 16)))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        gemm.linear_glu(x, weight)
        gemm.linear_glu(x[:1], weight, weight)
        gemm.linear_pack(x, weight)
    names = {event.key.removeprefix("gossamer::gemm.") for event in seen.key_averages() if "::gemm." in event.key}
    several = "tiles" if mode == "interpreter" else "products"
    wanted = {f"linear_glu/{several}", "linear_glu/row", "linear_pack/blocks"}
    assert names == (set() if mode == "cpu" else wanted)

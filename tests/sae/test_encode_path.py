"""The path of a call of sae.encode: by the rules, by the table of docs/sae.md, and by what runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gossamer import sae
from gossamer._core import tuning
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
    capacity = number(slots) if gradient == "no" and slots != "exact" else None
    chosen = choose_path(name, number(rows), int(k or 0), weight, capacity)
    assert f"`{chosen}`" == path


@pytest.mark.native
def test_the_docs_name_every_path() -> None:
    assert {row[6].strip("`") for row in CALLS} == set(get_args(encode_path.Path))


def test_what_runs_is_named(device: torch.device, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a profiler's range, wherever kernels run."""
    x, W = torch.randn(3, 8, device=device), torch.randn(8, 300, device=device)
    threshold = torch.ones(300, device=device)
    calls: dict[str, dict[str, Any]] = {
        "list": valued("jumprelu", threshold=threshold),
        "topk": valued("topk", k=4),
        "batch": valued("batchtopk", k=4),
        "groups": valued("groupmax", k=4),
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


def test_rows_lie_as_kernels_load_them() -> None:
    """Numbers from one row to the next, on a GPU and on a CPU."""
    gpu, cpu = (SimpleNamespace(is_cuda=where) for where in (True, False))
    sizes = ((1087, 52567, 52576), (4096, 65536, 65536), (1, 32767, 32767), (1, 32769, 32784), (3, 0, 0))
    for m, n, stride in sizes:
        assert encode_path.row_stride(m, n, gpu) == stride  # type: ignore[arg-type]
        assert encode_path.row_stride(m, n, cpu) == (stride if encode_path.INTERPRET else n)  # type: ignore[arg-type]

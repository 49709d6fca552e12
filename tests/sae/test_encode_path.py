"""The path of a call of sae.encode: by the rules, by the table of docs/sae.md, and by what runs."""

from typing import Any, get_args

import pytest
import torch

from gossamer import sae
from gossamer._core import tuning
from gossamer.sae import encode_path
from gossamer.sae.encode_path import choose_path
from tests.paths import calls_of, matrix, matrix_on, number, ranges_of
from tests.sae.dense import valued

CALLS = calls_of("sae.md", "## The path of encode", 7)


@pytest.mark.native
@pytest.mark.parametrize("row", CALLS, ids=" ".join)
def test_the_table_of_the_docs(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    activation, rows, d_sae, slots, device, gradient, path = row
    name, _, k = activation.partition(", k ")
    monkeypatch.setattr(tuning, "hopper", lambda device: device.type == "cuda" and "Hopper" in row[4])
    monkeypatch.setattr(encode_path, "INTERPRET", False)
    capacity = number(slots) if gradient == "no" and slots != "exact" else None
    weight = matrix_on(device, 2304, number(d_sae))
    assert choose_path(name, number(rows), int(k or 0), weight, capacity) == path


@pytest.mark.native
def test_the_docs_name_every_path() -> None:
    assert {row[-1] for row in CALLS} == set(get_args(encode_path.Path))


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
    prefix = "gossamer::sae.encode/"
    assert ranges_of(prefix, lambda: [sae.encode(x, W, **options) for options in ranges.values()]) == {*ranges}
    monkeypatch.setattr(encode_path, "packs_in_product", lambda m, weight: True)
    wide = torch.randn(8, 304, device=device)
    assert ranges_of(prefix, lambda: sae.encode(x, wide, capacity=19)) == {"tiles"}


def test_rows_lie_as_kernels_load_them() -> None:
    """Numbers from one row to the next, on a GPU and on a CPU."""
    gpu, cpu = (matrix(1, 1, kind=kind) for kind in ("cuda", "cpu"))
    sizes = ((1087, 52567, 52576), (4096, 65536, 65536), (1, 32767, 32767), (1, 32769, 32784), (3, 0, 0))
    for m, n, stride in sizes:
        assert encode_path.row_stride(m, n, gpu) == stride
        assert encode_path.row_stride(m, n, cpu) == (stride if encode_path.INTERPRET else n)

"""sae.decode: what the host chooses by."""

from typing import Any, get_args

import pytest
import torch

from gossamer import sae
from gossamer.sae import decode_path
from tests.paths import calls_of, matrix, matrix_on, number, ranges_of

CALLS = calls_of("sae.md", "### The path of decode", 5)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("row", CALLS, ids=" ".join)
def test_the_table_of_the_docs(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, d_sae, device, gradient, path = row
    monkeypatch.setattr(decode_path, "INTERPRET", False)
    m, n = number(rows), number(d_sae)
    assert decode_path.choose_path(m, n, 768, matrix_on(device, n, 768), keep=gradient == "yes") == path


def test_the_docs_name_every_path() -> None:
    assert {row[-1] for row in CALLS} == set(get_args(decode_path.Path))


def test_what_runs_is_named(device: torch.device, mode: str) -> None:
    """In a profiler's range, wherever kernels run; every call, not the first alone."""
    acts, weight = torch.randn(2, 3, 4100, device=device), torch.randn(4100, 8, device=device)
    calls: dict[str, dict[str, Any]] = {
        "one_launch": {"capacity": 9},
        "dense": {},
    }
    with torch.no_grad():
        for options in calls.values():
            sae.decode(acts, weight, **options)
        names = ranges_of(
            "gossamer::sae.decode/", lambda: [sae.decode(acts, weight, **options) for options in calls.values()]
        )
    assert names == (set(calls) if mode != "cpu" else {"dense"})


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    "m, n, d, dtype, dense",
    [
        # Microseconds of an H200 with 64 entries a row, packed and dense: 7.4 and 17.5.
        (64, 24576, 768, torch.bfloat16, False),
        # 36 and 201 with 46 entries a row, 8.4 and 78 with 14.
        (208, 30669, 1666, torch.float16, False),
        (1, 53230, 1406, torch.float32, False),
        # 93 and 25 with 94 entries a row, 306 and 28 with 67; a product that takes hardly longer than a launch.
        (165, 6444, 1208, torch.float16, True),
        (696, 22572, 66, torch.float16, True),
        (62, 3135, 485, torch.float16, True),
        # 68 and 109 with 27 entries a row, 160 and 110 with 173; 116 and 341 with 21, 309 and 345 with 108.
        (2287, 23296, 896, torch.bfloat16, True),
        (4096, 16384, 2304, torch.bfloat16, False),
        # The published shapes.
        (32, 65536, 768, torch.float32, False),
        (4096, 65536, 2304, torch.bfloat16, False),
    ],
)
def test_dense_where_looking_takes_as_long(m: int, n: int, d: int, dtype: torch.dtype, dense: bool) -> None:
    assert (decode_path.choose_path(m, n, d, matrix(n, d, dtype=dtype)) == "dense") == dense


@pytest.mark.usefixtures("h200")
def test_slots_hold_rows_that_gather_faster_than_dense_tiles() -> None:
    """Rows of 108 entries took an H200 309 us in slots that hold them, 774 by dense tiles, and 345 by PyTorch."""
    for keep in (False, True):
        slots = decode_path.slots_of(4096, 16384, 2304, matrix(16384, 2304), keep)
        assert 2.5 * 108 < slots < decode_path.MOST


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [16384, 65536])
def test_slots_of_a_backward_pass_are_small_beside_the_latents(n: int, dtype: torch.dtype) -> None:
    """Values, columns, and the keys and columns of the transposition: less than a fifth of the bytes of the latents."""
    weight, size = matrix(n, 2304, dtype=dtype), dtype.itemsize
    slots = decode_path.slots_of(4096, n, 2304, weight, True)
    assert slots > 300 and slots * (size + 4 + 8 + 4) < n * size / 5
    # Where slots are few in all, memory limits none.
    assert decode_path.slots_of(16, n, 2304, weight, True) == decode_path.slots_of(16, n, 2304, weight, False) > 1024

"""sae.count_fired, against counting in the dense tensor."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.rowsparse import pack
from gossamer.sae import count_fired
from gossamer.testing import dense64, random_rows, random_slots
from tests import strategies
from tests.sae.dense import PACKINGS


@given(data=st.data())
def test_count_fired(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    acts = data.draw(strategies.dense(dtype, device))
    n = acts.shape[-1]
    counts = count_fired(pack(acts, capacity=data.draw(st.one_of(st.none(), st.integers(1, 70)))))
    assert counts.dtype is torch.int64 and counts.shape == (n,)
    assert counts.tolist() == (acts != 0).reshape(math.prod(acts.shape[:-1]), n).sum(0).tolist()


@pytest.mark.parametrize("options", PACKINGS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 40), (5, 17), (0, 9), (3, 0)])
def test_any_container(
    options: dict[str, Any], shape: tuple[int, ...], device: torch.device, generator: torch.Generator
) -> None:
    acts = torch.randn(shape, device=device, generator=generator).relu()
    assert count_fired(strategies.pack_as(acts, **options)).tolist() == (acts != 0).flatten(0, -2).sum(0).tolist()


def test_slots_without_an_entry(device: torch.device, generator: torch.Generator) -> None:
    rows = random_slots((2, 3, 40), 9, device=device, generator=generator, distinct=True)
    assert count_fired(rows).tolist() == (dense64(rows) != 0).flatten(0, 1).sum(0).tolist()


def test_what_is_not_a_number_fires_and_zero_does_not(device: torch.device) -> None:
    acts = random_rows((3, 20), l0=8, device=device)
    rows = pack(acts, capacity=8)
    rows.values[0], rows.values[10] = math.nan, 0.0
    assert count_fired(rows).sum().item() == 23
    assert count_fired(rows)[rows.indices[10]].item() == (acts[:, rows.indices[10]] != 0).sum().item() - 1


@pytest.mark.native
@pytest.mark.parametrize("index", [4, -2])
def test_refuses_a_bad_index_on_the_cpu(index: int) -> None:
    rows = pack(torch.eye(2, 4), capacity=1)
    rows.packed.indices[0] = index
    with pytest.raises(ValueError, match=r"indices must lie in \[0, N\) with N = 4"):
        count_fired(rows)


def test_error(device: torch.device) -> None:
    with pytest.raises(TypeError, match=r"sae.count_fired: rows must be rowsparse.Rows, got Tensor"):
        count_fired(torch.ones(2, 3, device=device))  # type: ignore[arg-type]

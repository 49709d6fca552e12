"""Rows.to_dense, against the definition of the container; the way there and back is in test_pack."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.rowsparse import Rows, pack
from gossamer.rowsparse.formats import equal_spans
from gossamer.testing import assert_exact, dense64, random_rows
from tests import strategies


@given(data=st.data())
def test_repeated_indices_add_up(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    rows = data.draw(strategies.built(dtype, device))
    out = rows.to_dense()
    assert out.dtype is dtype
    assert_exact(out, dense64(rows))


@pytest.mark.kernels
@pytest.mark.parametrize("m", [1, 3])
def test_shares_of_few_rows(m: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program of a row fills its columns, whatever order the entries are in, and one says what is lost."""
    from gossamer.rowsparse._triton import unpack as kernels

    monkeypatch.setattr(kernels, "FILL", 16)
    values = torch.arange(1, 6, device=device).to(dtype).repeat(m)
    spans = equal_spans(torch.full((m,), 5, device=device), 5)
    for columns in ([3, 17, 18, 40, 69], [69, 3, 17, 17, -1], [0, 15, 16, 31, 32]):
        indices = torch.tensor(columns, dtype=torch.int32, device=device).repeat(m)
        rows = Rows(values, indices, spans, (m, 70))
        assert_exact(kernels.spread(values, indices, spans, None, 70, 80)[:, :70], dense64(rows))
        assert not kernels.spread(values, indices, spans, None, 70, 80)[:, 70:].any()
    source = torch.arange(70 * m, device=device).to(dtype).view(m, 70)
    assert_exact(kernels.spread(values, indices, spans + 5 * m, source, 70, 80)[:, :70], source.double())
    lost = kernels.spread(values, indices.clamp(min=-2) - 2, spans, None, 70, 80)
    assert lost[:, 0].isnan().all() and not lost[:, 1:].isnan().any()


@given(data=st.data())
def test_gradient(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    """At an entry, the gradient of its column; nothing at slots that no entry stands in."""
    rows = data.draw(strategies.built(dtype, device))
    values = rows.values.nan_to_num(0).requires_grad_()
    replaced = replace(rows, values=values)
    weight = random_rows(rows.shape, l0=rows.num_columns, dtype=dtype, device=device, integers=True)
    (replaced.to_dense() * weight).sum().backward()
    flat = weight.double().reshape(rows.num_rows, rows.num_columns)
    assert_exact(values.grad, strategies.at_entries(flat, rows))


@pytest.mark.native
@pytest.mark.parametrize("index", [5, -2, 1 << 30])
@pytest.mark.parametrize("capacity", [2, "exact"])
def test_refuses_a_bad_index_on_the_cpu(index: int, capacity: int | str) -> None:
    """One that is put there later, for the constructor refuses it; it must not land in the next row."""
    rows: Any = pack(torch.eye(2, 5), capacity=capacity)
    rows.packed.indices[0] = index
    with pytest.raises(ValueError, match=r"indices must lie in \[0, N\) with N = 5"):
        rows.to_dense()

"""unpack, against the definition of the formats; the way there and back is in test_pack."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.rowsparse import ELL, pack, unpack
from gossamer.testing import assert_exact, dense64, random_rows
from tests import strategies


@given(data=st.data())
def test_repeated_indices_add_up(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    rows = data.draw(strategies.built(dtype, device))
    out = unpack(rows)
    assert out.dtype is dtype
    assert_exact(out, dense64(rows))


@pytest.mark.kernels
@pytest.mark.parametrize("m", [1, 3])
def test_shares_of_few_rows(m: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program of a row fills its columns, whatever order the entries are in, and one says what is lost."""
    from gossamer.rowsparse._triton import unpack as kernels

    monkeypatch.setattr(kernels, "FILL", 16)
    values = torch.arange(1, 6, device=device).to(dtype).expand(m, 5).contiguous()
    counts = torch.full((m,), 5, dtype=torch.int32, device=device)
    for columns in ([3, 17, 18, 40, 69], [69, 3, 17, 17, -1], [0, 15, 16, 31, 32]):
        indices = torch.tensor(columns, dtype=torch.int32, device=device).expand(m, 5).contiguous()
        rows = ELL(values, indices, counts, (m, 70))
        assert_exact(kernels.unpack(values, indices, counts, None, 70, 80)[:, :70], dense64(rows))
        assert not kernels.unpack(values, indices, counts, None, 70, 80)[:, 70:].any()
    source = torch.arange(70 * m, device=device).to(dtype).view(m, 70)
    assert_exact(kernels.unpack(values, indices, counts + 1, source, 70, 80)[:, :70], source.double())
    lost = kernels.unpack(values, indices.clamp(min=-2) - 2, counts, None, 70, 80)
    assert lost[:, 0].isnan().all() and not lost[:, 1:].isnan().any()


@given(data=st.data())
def test_gradient(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    """At an entry, the gradient of its column; nothing at slots that no entry stands in."""
    rows = data.draw(strategies.built(dtype, device))
    values = rows.values.nan_to_num(0).requires_grad_()
    replaced = replace(rows, values=values)
    weight = random_rows(rows.shape, l0=rows.num_columns, dtype=dtype, device=device, integers=True)
    (unpack(replaced) * weight).sum().backward()
    flat, expected = weight.reshape(rows.num_rows, rows.num_columns), torch.zeros_like(values)
    for row, count in enumerate(rows.nnz_per_row.tolist()):
        first = row if isinstance(rows, ELL) else int(rows.row_offsets[row])
        at = rows.indices[first, :count] if isinstance(rows, ELL) else rows.indices[first : first + count]
        grads = torch.where(at >= 0, flat[row, at.clamp(min=0).long()], 0) if rows.num_columns else at * 0.0
        if isinstance(rows, ELL):
            expected[row, :count] = grads
        else:
            expected[first : first + count] = grads
    assert_exact(values.grad, expected.double())


def test_error() -> None:
    with pytest.raises(TypeError, match=r"rowsparse.unpack: rows must be an ELL, CSR or TwELL of rowsparse, got"):
        unpack(torch.ones(3))  # type: ignore[arg-type]


@pytest.mark.native
@pytest.mark.parametrize("index", [5, -2, 1 << 30])
@pytest.mark.parametrize("format", ["ell", "csr"])
def test_refuses_a_bad_index_on_the_cpu(index: int, format: str) -> None:
    """One that is put there later, for the constructor refuses it; it must not land in the next row."""
    rows: Any = pack(torch.eye(2, 5), format=format)
    rows.packed.indices.view(-1)[0] = index
    with pytest.raises(ValueError, match=r"indices must lie in \[0, N\) with N = 5"):
        unpack(rows)

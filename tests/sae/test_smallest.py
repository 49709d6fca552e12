"""The smallest value kept, against the dense tensor."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer import nn
from gossamer.rowsparse import pack
from gossamer.sae.smallest import smallest
from tests import strategies
from tests.sae.dense import PACKINGS


@given(data=st.data())
def test_smallest(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    acts = data.draw(strategies.dense(dtype, device))
    rows = pack(acts, capacity=data.draw(st.one_of(st.none(), st.integers(1, 70))))
    wide = torch.promote_types(dtype, torch.float32)
    for scale in (None, torch.linspace(0.5, 2, acts.shape[-1], device=device).to(dtype)):
        scaled = acts.to(wide) if scale is None else acts.to(wide) * scale.to(wide)
        positive = scaled[scaled > 0]
        found = smallest(rows, scale)
        assert found.dtype is wide and found.shape == ()
        assert found.item() == (positive.min().item() if positive.numel() else math.inf)


@pytest.mark.parametrize("options", PACKINGS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 40), (5, 17), (0, 9)])
def test_any_container(
    options: dict[str, Any], shape: tuple[int, ...], device: torch.device, generator: torch.Generator
) -> None:
    acts = torch.randn(shape, device=device, generator=generator).relu()
    for scale in (None, torch.linspace(0.5, 2, shape[-1], device=device)):
        scaled = acts if scale is None else acts * scale
        want = torch.where(scaled > 0, scaled, torch.inf).amin().item() if acts.numel() else math.inf
        assert smallest(strategies.pack_as(acts, **options), scale).item() == want


def test_error(device: torch.device) -> None:
    with pytest.raises(TypeError, match=r"sae.smallest: rows must be rowsparse.Rows, got Tensor"):
        smallest(torch.ones(2, 3, device=device))  # type: ignore[arg-type]


@pytest.mark.native
@pytest.mark.parametrize("k", [3, 200])
def test_the_threshold_of_batchtopk(k: int, device: torch.device) -> None:
    """Also where every row has more entries than slots."""
    torch.manual_seed(0)
    model = nn.BatchTopKSAE(64, 1024, k, device=device)
    x = torch.nn.functional.normalize(torch.randn(40, 64), dim=1).to(device)
    model(x)
    with torch.no_grad():
        z = ((x - model.b_dec) @ model.W_enc + model.b_enc).relu().flatten()
        kept = z.topk(min(40 * k, int((z > 0).sum()))).values
        torch.testing.assert_close(model.threshold, kept.min(), rtol=1e-5, atol=0)
        fired = (model.eval().encode(x).to_dense() > 0).sum() / 40
    assert abs(fired.item() - k) <= 0.05 * k

"""The way of whole products: its slabs, beside those of `test_sparse_attention`, which go through it as a path."""

import math
from typing import Any

import pytest
import torch

from gossamer.attention import Selection, sparse_attention
from tests.attention.test_sparse_attention import check, inputs, random_mask

kernels = pytest.importorskip("gossamer.attention._triton.dense_attention")
pytestmark = pytest.mark.kernels


@pytest.mark.parametrize(
    "scopes, options",
    [
        (1, {}),
        (4, {"lengths": (150, 40)}),
        pytest.param(2, {"causal": False}, marks=pytest.mark.full),
        pytest.param(1, {"lengths": (0, 160), "causal": False}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_slabs(
    scopes: int, options: dict[str, Any], device: torch.device, generator: torch.Generator, monkeypatch: Any
) -> None:
    """Three slabs, of which the first sees fewer keys."""
    monkeypatch.setattr(kernels, "SLAB_QUERIES", 50)
    monkeypatch.setattr(kernels, "SLAB_PRODUCTS", 1)
    q, k, v = inputs(2, 4, 2, 150, 160, 16, torch.float32, device, generator)
    mask = random_mask((2, scopes, 150, 160), 0.4, generator)
    if "lengths" in options:
        options = {**options, "lengths": torch.tensor(options["lengths"], device=device)}
    check(q, k, v, Selection.from_mask(mask), mask, generator, path="dense", **options)


def test_plan(device: torch.device) -> None:
    """Slabs cover all queries, within their bytes where these hold 64 queries, and end where none sees more keys."""
    words = torch.zeros(1, 1, 32, 2048, dtype=torch.int64, device=device)
    q = torch.empty(1, 4, 2048, 128, device=device)
    assert list(kernels.slabs(q, words, None, True))[::-1] == [(256 * i, 256, 256 * i + 256) for i in range(8)]
    assert {columns for *_, columns in kernels.slabs(q, words, None, False)} == {2048}
    assert [rows for _, rows, _ in kernels.slabs(q[:, :1, :, :8], words, None, True)] == [2048], "one is little enough"
    wide = torch.empty(1, 256, 2048, 8, device=device)
    assert [rows for _, rows, _ in kernels.slabs(wide, words, None, True)] == [128] * 16
    wider = torch.empty(1, 2048, 2048, 8, device=device)
    assert [rows for _, rows, _ in kernels.slabs(wider, words, None, True)] == [64] * 32


def test_values_of_keys_that_nobody_takes(device: torch.device, generator: torch.Generator) -> None:
    """They take no part, whatever they hold, nor do those behind a sequence's end; others reach the whole slab."""
    q, k, v = (x.detach() for x in inputs(1, 2, 1, 40, 50, 16, torch.float32, device, generator))
    mask = random_mask((1, 1, 40, 50), 0.5, generator)
    mask[..., 9] = False
    k[0, 0, 9], v[0, 0, 9], v[0, 0, 45:] = math.nan, math.inf, math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    lengths = torch.tensor([45], device=device)
    out = sparse_attention(*leaves, Selection.from_mask(mask), lengths=lengths, path="dense")
    assert bool(out.isfinite().all())
    for x in torch.autograd.grad(out.sum(), leaves):
        assert bool(x.isfinite().all())
    with torch.no_grad():
        v[0, 0, 3] = math.nan
        assert bool(sparse_attention(q, k, v, Selection.from_mask(mask), path="dense").isnan().all())

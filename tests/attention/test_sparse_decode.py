"""Attention of a few queries over a cache, in one piece and in pages, against dense float64."""

import math

import pytest
import torch
from torch import Tensor

from gossamer.attention import Selection, sparse_decode
from gossamer.testing import assert_close
from tests.attention.test_sparse_attention import dense, inputs, random_mask


def paged(x: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """x [B, G, Tk, D] as (pool of pages [P, size, G, D] in any order, table [B, n]); what no page needs is NaN."""
    b, g, tk, d = x.shape
    n = -(-tk // size)
    table = torch.randperm(b * n + 3, device=x.device, generator=generator)[: b * n].view(b, n)
    pool = torch.full((b * n + 3, size, g, d), math.nan, dtype=x.dtype, device=x.device)
    whole = torch.full((b, n * size, g, d), math.nan, dtype=x.dtype, device=x.device)
    whole[:, :tk] = x.transpose(1, 2)
    pool[table] = whole.view(b, n, size, g, d)
    return pool, table


@pytest.mark.parametrize("scopes", ["one", "groups", "heads"])
@pytest.mark.parametrize(
    "b, h, g, tq, tk, d",
    [(1, 1, 1, 1, 64, 16), (2, 4, 2, 1, 200, 24), (1, 6, 2, 3, 333, 64), (1, 2, 2, 16, 90, 32), (3, 8, 1, 1, 130, 16)],
)
@pytest.mark.parametrize("capacity", [None, 20])
def test_against_dense(
    b: int, h: int, g: int, tq: int, tk: int, d: int, scopes: str, capacity: int | None, dtype: torch.dtype,
    device: torch.device, generator: torch.Generator,
) -> None:  # fmt: skip
    q, k, v = (x.detach() for x in inputs(b, h, g, tq, tk, d, dtype, device, generator))
    mask = random_mask((b, {"one": 1, "groups": g, "heads": h}[scopes], tq, tk), 0.3, generator)
    selection = Selection.from_mask(mask, capacity)
    lengths = torch.randint(1, tk + 1, (b,), device=device, generator=generator)
    pages, table = paged(torch.cat([k, v], 3), 16, generator)
    for options in ({}, {"causal": False, "lengths": lengths}, {"scale": 0.3, "lengths": lengths.int()}):
        exact, plain = (dense(*(x.to(t) for x in (q, k, v)), mask, **options) for t in (torch.float64, dtype))
        results = [sparse_decode(q, k, v, selection, return_lse=True, **options)]
        for each in (table, table.int()):
            args = (q, pages[..., :d], pages[..., d:], selection)
            results.append(sparse_decode(*args, page_table=each, return_lse=True, **options))
        for out, lse in results:
            assert_close(out, reference64=exact[0], plain=plain[0], name="out")
            assert_close(lse.to(dtype), reference64=exact[1], plain=plain[1], name="lse")

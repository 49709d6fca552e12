"""Attention of a few queries over a cache, in one piece and in pages, against dense float64."""

import math
from typing import Any

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


@pytest.mark.parametrize(
    "b, h, g, tq, tk, d, s, capacity",
    [
        (1, 1, 1, 1, 64, 16, 1, None),
        (2, 4, 2, 1, 200, 24, 1, 20),
        (1, 6, 2, 3, 333, 64, 2, None),
        (1, 2, 2, 16, 90, 32, 2, 20),
        (2, 4, 1, 1, 130, 16, 4, None),
    ],
)
def test_against_dense(
    b: int, h: int, g: int, tq: int, tk: int, d: int, s: int, capacity: int | None, dtype: torch.dtype,
    device: torch.device, generator: torch.Generator,
) -> None:  # fmt: skip
    q, k, v = (x.detach() for x in inputs(b, h, g, tq, tk, d, dtype, device, generator))
    mask = random_mask((b, s, tq, tk), 0.3, generator)
    selection = Selection.from_mask(mask, capacity)
    lengths = torch.randint(1, tk + 1, (b,), device=device, generator=generator)
    pages, table = paged(torch.cat([k, v], 3), 16, generator)
    for options in ({}, {"causal": False, "lengths": lengths}, {"scale": 0.3, "lengths": lengths.int()}):
        exact, plain = (dense(*(x.to(t) for x in (q, k, v)), mask, **options) for t in (torch.float64, dtype))
        # At least the root of the sum of the squares of weight times value.
        magnitude = dense(q.double(), k.double(), v.double().square(), mask, **options)[0].sqrt()
        of_pages = (q, pages[..., :d], pages[..., d:], selection)
        for out, lse in (
            sparse_decode(q, k, v, selection, return_lse=True, **options),
            sparse_decode(*of_pages, page_table=table.int() if options else table, return_lse=True, **options),
        ):
            assert_close(out, reference64=exact[0], plain=plain[0], length=tk, magnitude=magnitude, name="out")
            assert_close(lse.to(dtype), reference64=exact[1], plain=plain[1], name="lse")


@pytest.mark.parametrize("page", [-1, 9, 2**31 - 1])
def test_a_page_outside_of_the_pool(page: int, device: torch.device, generator: torch.Generator, mode: str) -> None:
    """The CPU names the rule. A kernel reads no other memory: queries that take such a key are NaN, others right."""
    q = torch.randn(1, 2, 3, 16, device=device, generator=generator)
    pool = torch.randn(6, 16, 1, 32, device=device, generator=generator)
    mask = torch.zeros(1, 1, 3, 40, dtype=torch.bool, device=device)
    mask[..., 0, 2:9], mask[..., 1, 17:20], mask[..., 2, 20:36:5] = True, True, True
    table = torch.tensor([[0, page, -7]], device=device)
    args = (q, pool[..., :16], pool[..., 16:])
    for dtype in (torch.int32, torch.int64):
        kwargs = {"page_table": table.to(dtype), "return_lse": True, "causal": False}
        if mode == "cpu":
            says = rf"sparse_decode: page_table must hold pages in \[0, P\) with P = 6 .* got {page} for key 17"
            with pytest.raises(ValueError, match=says):
                sparse_decode(*args, Selection.from_mask(mask), **kwargs)
        else:
            out, lse = sparse_decode(*args, Selection.from_mask(mask), **kwargs)
            assert out.isnan().all(-1).any(1).tolist() == [[False, True, True]]
            assert lse.isnan().any(1).tolist() == [[False, True, True]]
        # A page of keys that nobody takes may be anything.
        only = mask.clone()
        only[..., 1:, :] = False
        out, _ = sparse_decode(*args, Selection.from_mask(only), **kwargs)
        whole = pool[:1].double().expand(1, 16, 1, 32).transpose(1, 2)
        parts = q[:, :, :1].double(), whole[..., :16], whole[..., 16:]
        want, _ = dense(*parts, only[..., :1, :16], causal=False)
        plain, _ = dense(*(part.float() for part in parts), only[..., :1, :16], causal=False)
        assert_close(out[:, :, :1], reference64=want, plain=plain)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"tq": 17}, ValueError, "q must have at most 16 queries, got 17. Use attention.sparse_attention"),
        ({"page_table": torch.zeros(1, 2)}, TypeError, "page_table must be int32 or int64, got float32"),
        ({"page_table": torch.zeros(1, 2).long()}, ValueError, r"page_table must have shape \[B, n\] .* the Tk = 40 "),
        ({"page_table": torch.zeros(1, 3).long(), "size": 12}, ValueError, "page_size being a power of two, got"),
        ({"grad": True}, NotImplementedError, "gradients are not implemented. Use attention.sparse_attention"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    tq, table = change.get("tq", 1), change.get("page_table")
    q = torch.ones(1, 2, tq, 8, requires_grad=change.get("grad", False))
    cache = torch.ones(1, 2, 40, 8) if table is None else torch.ones(4, change.get("size", 16), 2, 8)
    selection = Selection.from_mask(torch.ones(1, tq, 40, dtype=torch.bool))
    with pytest.raises(error, match=f"attention.sparse_decode: .*{message}"):
        sparse_decode(q, cache, cache, selection, page_table=table)

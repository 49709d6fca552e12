"""Attention of a few queries over a cache, in one piece and in pages, against dense float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.attention import Selection, sparse_attention
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


@pytest.mark.parametrize("share", [4096, 16], ids=["lists of programs", "a list for all heads"])
@pytest.mark.parametrize(
    "b, h, g, tq, tk, d, s, dv",
    [
        (1, 1, 1, 1, 64, 16, 1, 16),
        (2, 4, 2, 1, 200, 24, 1, 24),
        (1, 6, 2, 3, 333, 64, 2, 40),
        (1, 2, 2, 16, 90, 32, 2, 32),
        (2, 4, 1, 1, 130, 16, 4, 24),
        (1, 8, 1, 3, 150, 300, 1, 530),
    ],
)
def test_against_dense(
    b: int, h: int, g: int, tq: int, tk: int, d: int, s: int, dv: int, share: int, dtype: torch.dtype,
    device: torch.device, generator: torch.Generator, mode: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if mode != "cpu":
        monkeypatch.setattr("gossamer.attention._triton.sparse_decode.SHARE", share)
    q, k, v = (x.detach() for x in inputs(b, h, g, tq, tk, d, dtype, device, generator, dv))
    mask = random_mask((b, s, tq, tk), 0.3, generator)
    selection = Selection.from_mask(mask)
    lengths = torch.randint(1, tk + 1, (b,), device=device, generator=generator)
    pages, table = paged(torch.cat([k, v], 3), 16, generator)
    scaled = {"causal": True, "scale": 0.3, "lengths": lengths.int()}
    for options in ({"causal": True}, {"causal": False, "lengths": lengths}, scaled):
        exact, plain = (dense(*(x.to(t) for x in (q, k, v)), mask, **options) for t in (torch.float64, dtype))
        # At least the root of the sum of the squares of weight times value.
        magnitude = dense(q.double(), k.double(), v.double().square(), mask, **options)[0].sqrt()
        # Of a score: the root of the sum of the squares of its products, of the largest key.
        keys = k.double().square().repeat_interleave(h // g, 1).transpose(2, 3)
        products = (q.double().square() @ keys).sqrt().amax(-1) * options.get("scale", d**-0.5)
        of_pages = (q, pages[..., :d], pages[..., d:], selection)
        for out, lse in (
            sparse_attention(q, k, v, selection, return_lse=True, **options),
            sparse_attention(
                *of_pages, page_table=table.int() if "lengths" in options else table, return_lse=True, **options
            ),
        ):
            assert_close(out, reference64=exact[0], plain=plain[0], length=tk, magnitude=magnitude, name="out")
            assert_close(lse.to(dtype), reference64=exact[1], plain=plain[1], length=d, magnitude=products, name="lse")


@pytest.mark.parametrize("share", [4096, 16], ids=["lists of programs", "a list for all heads"])
def test_many_chunks(
    share: int, device: torch.device, generator: torch.Generator, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More chunks of keys than programs, of which some lists are empty and some long."""
    if mode != "cpu":
        monkeypatch.setattr("gossamer.attention._triton.sparse_decode.SHARE", share)
    tk = 9000
    q, k, v = (x.detach() for x in inputs(1, 4, 1, 2, tk, 16, torch.float32, device, generator))
    mask = torch.zeros(1, 1, 2, tk, dtype=torch.bool, device=device)
    mask[..., 0, 100:1500] = mask[..., 1, 3000:3010] = mask[..., 8990:] = True
    out = sparse_attention(q, k, v, Selection.from_mask(mask), causal=True)
    exact, plain = (dense(*(x.to(t) for x in (q, k, v)), mask)[0] for t in (torch.float64, torch.float32))
    assert_close(out, reference64=exact, plain=plain)


@pytest.mark.parametrize("page", [-1, 9])
def test_a_page_outside_of_the_pool(page: int, device: torch.device, mode: str) -> None:
    """One in use raises on the CPU, and gives NaN where the host does not look; one that is not in use is not read."""
    q, pool = torch.ones(1, 2, 2, 16, device=device), torch.ones(9, 16, 2, 16, device=device)
    mask = torch.zeros(1, 1, 2, 48, dtype=torch.bool, device=device)
    mask[..., :20] = True
    mask[..., 1, 40] = True
    given = (q, pool, pool, Selection.from_mask(mask))
    options = {"causal": False, "lengths": torch.tensor([45], device=device)}
    unused = torch.tensor([[3, 8, page]], device=device)
    assert (
        sparse_attention(*given, page_table=unused, causal=False, lengths=torch.tensor([40], device=device))
        .isfinite()
        .all()
    )
    if mode == "cpu":
        with pytest.raises(
            ValueError, match=rf"page_table must name pages in \[0, P\) with P = 9 .* got {min(page, 3)}"
        ):
            sparse_attention(*given, page_table=unused, **options)
    else:
        out = sparse_attention(*given, page_table=unused, **options)
        assert out[:, :, 0].isfinite().all() and out[:, :, 1].isnan().all()


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            {"tq": 17},
            ValueError,
            "q have at most 16 queries, got None and 17. Leave path",
        ),
        ({"page_table": torch.zeros(1, 2)}, TypeError, "page_table must be int32 or int64, got float32"),
        ({"page_table": torch.zeros(1, 2).long()}, ValueError, r"page_table must have shape \[B, n\] .* the Tk = 40 "),
        ({"page_table": torch.zeros(1, 3).long(), "size": 12}, ValueError, "page_size being a power of two, got"),
        (
            {"grad": True},
            NotImplementedError,
            "gradients and dropout are not implemented with page_table. Give k and v in one",
        ),
        ({"indexer": ()}, NotImplementedError, "gradients and dropout are not implemented with page_table"),
        (
            {"path": "lists"},
            ValueError,
            "with page_table, path must be decode and .* got 'lists' and 1. Leave path None, or give k and",
        ),
        ({"path": "any"}, ValueError, "with page_table, path must be decode and .* got 'any'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    tq, table = change.get("tq", 1), change.get("page_table", torch.zeros(1, 3).long())
    q = torch.ones(1, 2, tq, 8, requires_grad=change.get("grad", False))
    pool = torch.ones(4, change.get("size", 16), 2, 8)
    selection = Selection.from_mask(torch.ones(1, tq, 40, dtype=torch.bool))
    with pytest.raises(error, match=f"attention.sparse_attention: .*{message}"):
        asked = {"indexer": change.get("indexer"), "path": change.get("path")}
        sparse_attention(q, pool, pool, selection, page_table=table, **asked)

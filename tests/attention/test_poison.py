"""Memory that takes no part holds NaN: behind lengths, in pages that nobody wrote, and at keys that no query takes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.attention import (
    AdaptiveK,
    Selection,
    indexer_loss,
    indexer_scores,
    select_topk,
    sparse_attention,
)
from tests.attention.test_sparse_attention import PATHS

B, H, G, T, D = 2, 4, 2, 70, 16
NAN = float("nan")


def poisoned(x: Tensor, where: Tensor) -> Tensor:
    """x with NaN in the rows, second to last, where `where` `[B, T]` is True."""
    where = where.view(where.shape[0], *[1] * (x.dim() - 3), where.shape[1], 1)
    return x.detach().masked_fill(where, NAN).requires_grad_(x.requires_grad)


def same(run: Any, leaves: tuple[Tensor, ...], where: tuple[Tensor | None, ...]) -> None:
    """Results and gradients of `run` with NaN at rows of the leaves are those without."""
    results = []
    for poison in (False, True):
        given = [x if at is None or not poison else poisoned(x, at) for x, at in zip(leaves, where)]
        given = [x.detach().requires_grad_(x.requires_grad) for x in given]
        out = run(*given)
        if out.requires_grad:
            out.masked_fill(~out.isfinite(), 0).sum().backward()
        results.append([out.detach(), *(x.grad for x in given if x.grad is not None)])
    for one, other in zip(*results, strict=True):
        assert one.isfinite().all() or one.isneginf().any()
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def leaves(device: torch.device, generator: torch.Generator, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(s, device=device, generator=generator).requires_grad_() for s in shapes)


@PATHS
@pytest.mark.parametrize("lengths", [None, [50, 64]])
def test_sparse_attention(
    path: str, lengths: list[int] | None, device: torch.device, generator: torch.Generator
) -> None:
    """The one query that names key 9 stands before it; key 20 is named by none; queries 30 and 31 take no key."""
    mask = torch.rand(B, G, T, T, device=device, generator=generator) < 0.5
    mask[..., 9] = mask[..., 20] = False
    mask[..., 5, 9] = True
    mask[..., 30:32, :] = False
    nobody = torch.zeros(B, T, dtype=torch.bool, device=device)
    nobody[:, [9, 20]] = True
    idle = torch.zeros(B, T, dtype=torch.bool, device=device)
    idle[:, 30:32] = True
    ends = None if lengths is None else torch.tensor(lengths, device=device)
    if ends is not None:
        nobody |= torch.arange(T, device=device) >= ends[:, None]
        # A query behind the last token stands beside no key that is masked for it.
        mask &= torch.arange(T, device=device)[:, None] < ends[:, None, None, None]
    selection = Selection.from_mask(mask)
    given = leaves(device, generator, (B, H, T, D), (B, G, T, D), (B, G, T, D))
    weights = torch.randn(B, H, T, D, device=device, generator=generator)
    weights[:, :, 30:32] = NAN
    same(
        lambda q, k, v: (
            sparse_attention(q, k, v, selection, lengths=ends, path=path, causal=True).where(~idle[:, None, :, None], 0)
            * weights.nan_to_num()
        ),
        given,
        (idle, nobody, nobody),
    )
    q, k, v = given
    out = sparse_attention(q, poisoned(k, nobody), poisoned(v, nobody), selection, lengths=ends, path=path, causal=True)
    grads = torch.autograd.grad(out, (q,), torch.where(idle[:, None, :, None], NAN, weights.nan_to_num()))
    assert out.isfinite().all() and grads[0].isfinite().all()


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("d", [1, 16, 80])
@pytest.mark.parametrize("lengths", [None, [0, 37]])
def test_sparse_decode(
    paged: bool, d: int, lengths: list[int] | None, device: torch.device, generator: torch.Generator
) -> None:
    tq, tk, page = 3, 64, 16
    q, k, v = (
        torch.randn(s, device=device, generator=generator) for s in ((B, H, tq, d), (B, G, tk, d), (B, G, tk, d))
    )
    mask = torch.rand(B, 1, tq, tk, device=device, generator=generator) < 0.4
    mask[..., 16:32] = False
    # The first query names the last key, which it does not see.
    mask[..., -1] = False
    mask[..., 0, -1] = True
    ends = None if lengths is None else torch.tensor(lengths, device=device)
    nobody = torch.zeros(B, tk, dtype=torch.bool, device=device)
    nobody[:, 16:32] = nobody[:, -1] = True
    if ends is not None:
        nobody |= torch.arange(tk, device=device) >= ends[:, None]
    selection = Selection.from_mask(mask)
    wanted = sparse_attention(q, k, v, selection, lengths=ends, causal=True)
    k, v = (x.masked_fill(nobody[:, None, :, None], NAN) for x in (k, v))
    if not paged:
        found = sparse_attention(q, k, v, selection, lengths=ends, causal=True)
    else:
        table = torch.randperm(2 * B * tk // page, device=device, generator=generator)[: B * tk // page].view(B, -1)
        pools = torch.full((2, 2 * B * tk // page, page, G, d), NAN, device=device)
        for pool, x in zip(pools, (k, v)):
            pool[table] = x.transpose(1, 2).unflatten(1, (-1, page))
        found = sparse_attention(q, *pools, selection, page_table=table, lengths=ends, causal=True)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[40, 66], [0, 70]])
def test_indexer_scores(causal: bool, lengths: list[int], device: torch.device, generator: torch.Generator) -> None:
    ends = torch.tensor(lengths, device=device)
    behind = torch.arange(T, device=device) >= ends[:, None]
    empty = (ends == 0)[:, None].expand(B, T)
    given = leaves(device, generator, (B, 3, T, 8), (B, T, 8), (B, T, 3), (3,))
    same(
        lambda q, k, w, bias: indexer_scores(q, k, w, bias, lengths=ends, causal=causal),
        given,
        (empty, behind, None, None),
    )


@pytest.mark.parametrize("adaptive", [None, "entropy"])
@pytest.mark.parametrize("granularity", [1, 4])
def test_select_topk(adaptive: str | None, granularity: int, device: torch.device, generator: torch.Generator) -> None:
    ends = torch.tensor([40, 66], device=device)
    behind = torch.arange(T, device=device) >= ends[:, None]
    q, k, w, bias = (x.detach() for x in leaves(device, generator, (B, 3, T, 8), (B, T, 8), (B, T, 3), (3,)))
    rule: dict[str, Any] = {"k": 12} if adaptive is None else {"k": AdaptiveK(adaptive, 4, 8, 16)}
    rule |= {"lengths": ends, "granularity": granularity}
    wanted = select_topk(q, k, w, bias, causal=True, **rule)
    assert torch.equal(select_topk(q, poisoned(k, behind), w, bias, causal=True, **rule).words, wanted.words)


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("lengths", [None, [40, 66]])
def test_gradients_of_an_indexer(
    through: bool, lengths: list[int] | None, device: torch.device, generator: torch.Generator
) -> None:
    ends = None if lengths is None else torch.tensor(lengths, device=device)
    idle = torch.zeros(B, T, dtype=torch.bool, device=device)
    idle[:, 30:32] = True
    nobody = torch.zeros(B, T, dtype=torch.bool, device=device)
    nobody[:, [9, 20]] = True
    behind = nobody.clone() if ends is None else nobody | (torch.arange(T, device=device) >= ends[:, None])
    mask = torch.rand(B, 1, T, T, device=device, generator=generator) < 0.5
    mask[..., [9, 20]] = False
    mask[..., 5, 9] = True
    mask[..., 30:32, :] = False
    if ends is not None:
        idle |= torch.arange(T, device=device) >= ends[:, None]
        if through:
            mask &= ~idle[:, None, :, None]
    selection = Selection.from_mask(mask)
    q, k, v = (x.detach() for x in leaves(device, generator, (B, H, T, D), (B, G, T, D), (B, G, T, D)))
    indexer = leaves(device, generator, (B, 3, T, 8), (B, T, 8), (B, T, 3), (3,))

    def run(q: Tensor, k: Tensor, v: Tensor, *indexer: Tensor) -> Tensor:
        if not through:
            return indexer_loss(q, k, *indexer, selection=selection, lengths=ends, causal=True)
        return sparse_attention(q, k, v, selection, lengths=ends, indexer=indexer, causal=True)

    same(run, (q, k, v, *indexer), (idle, behind, behind, idle, behind, idle, None))

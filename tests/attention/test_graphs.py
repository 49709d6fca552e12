"""What a CUDA graph captures: attention over a selection, decoding, scores, losses and rotary gates, with gradients."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gossamer.attention import (
    Selection,
    indexer_loss,
    indexer_scores,
    sparse_attention,
)
from gossamer.attention.rotary_gates import rotary_gates
from gossamer.blocksparse import Layout, attention
from tests.graphs import captured, follows

pytestmark = pytest.mark.gpu

T = 300


def leaves(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


def some_keys(device: torch.device, scopes: int = 1, queries: int = T) -> Selection:
    mask = torch.rand(2, scopes, queries, T, device=device) < 0.2
    return Selection.from_mask(mask)


@pytest.mark.parametrize("path", ["tiles", "lists"])
def test_sparse_attention(path: str, device: torch.device) -> None:
    q, k, v, grad = leaves(device, (2, 4, T, 32), (2, 2, T, 32), (2, 2, T, 32), (2, 4, T, 32))
    selection = some_keys(device)

    def call() -> Sequence[Tensor]:
        out, lse = sparse_attention(q, k, v, selection, return_lse=True, path=path, causal=True)
        return (out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), grad.detach()))

    follows(call, q, k, v, grad, rtol=1e-4, atol=1e-4)


def test_straight_through(device: torch.device) -> None:
    q, k, v = leaves(device, (2, 4, T, 32), (2, 2, T, 32), (2, 2, T, 32))
    index = leaves(device, (2, 3, T, 16), (2, T, 16), (2, T, 3), (3,))
    selection = some_keys(device)

    def call() -> Sequence[Tensor]:
        out = sparse_attention(q, k, v, selection, indexer=(index[0], index[1], index[2], index[3]), causal=True)
        return torch.autograd.grad(out.square().sum(), (q, k, v, *index))

    follows(call, q, k, v, *index, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pages", [False, True])
@torch.no_grad()
def test_sparse_decode(pages: bool, device: torch.device) -> None:
    q, selection = torch.randn(2, 4, 1, 32, device=device), some_keys(device, queries=1)
    shape = (64, 16, 2, 32) if pages else (2, 2, T, 32)
    k, v = (torch.randn(shape, device=device) for _ in range(2))
    table = torch.randperm(64, device=device)[:38].view(2, 19) if pages else None
    lengths = torch.tensor([T, 170], device=device)
    options = {"page_table": table, "lengths": lengths, "causal": True}
    follows(lambda: [sparse_attention(q, k, v, selection, **options)], q, k, v, rtol=1e-4, atol=1e-4)


def test_indexer_scores(device: torch.device) -> None:
    index = leaves(device, (2, 3, T, 16), (2, T, 16), (2, T, 3), (3,))

    def call() -> Sequence[Tensor]:
        scores = indexer_scores(*index, causal=True)
        total = scores.where(scores.isfinite(), 0).square().sum()
        return (scores.detach(), *torch.autograd.grad(total, index))

    follows(call, *index, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("selected", [False, True])
def test_indexer_loss(selected: bool, device: torch.device) -> None:
    q, k = leaves(device, (2, 4, T, 32), (2, 2, T, 32))
    index = leaves(device, (2, 3, T, 16), (2, T, 16), (2, T, 3), (3,))
    selection = some_keys(device) if selected else None

    def call() -> Sequence[Tensor]:
        loss = indexer_loss(q, k, *index, selection=selection, causal=True)
        return (loss.detach(), *torch.autograd.grad(loss, index))

    follows(call, q, k, *index, rtol=1e-4, atol=1e-4)


def test_rotary_gates(device: torch.device) -> None:
    (y,) = leaves(device, (2, T, 12 * 16))
    angles = torch.randn(T, 8, device=device).repeat(1, 2)

    def call() -> Sequence[Tensor]:
        made = [x for x in rotary_gates(y, angles.cos(), angles.sin(), 3, 2) if x is not None]
        return (*(x.detach() for x in made), *torch.autograd.grad(sum(x.square().sum() for x in made), y))

    follows(call, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operator", ["sparse_attention", "blocksparse.attention"])
@torch.no_grad()
def test_dropout(operator: str, device: torch.device) -> None:
    """Without a seed each replay drops other probabilities, and with an int the same ones."""
    q, k, v = (torch.randn(2, 2, 128, 32, device=device) for _ in range(3))
    layout = Layout.from_mask(torch.ones(2, 2, dtype=torch.bool, device=device), 64)
    selection = Selection.from_mask(torch.ones(2, 128, 128, dtype=torch.bool, device=device))

    def run(seed: int | None) -> Tensor:
        if operator == "sparse_attention":
            return sparse_attention(q, k, v, selection, dropout=0.5, seed=seed)
        return attention(q, k, v, layout, dropout=0.5, seed=seed)

    for seed in (None, 7):
        eager, replays = run(seed), []
        graph, out = captured(lambda seed=seed: run(seed))
        for _ in range(2):
            graph.replay()
            replays.append(out.clone())
        assert torch.equal(*replays) == (seed is not None)
        assert torch.equal(replays[0], eager) == (seed is not None)

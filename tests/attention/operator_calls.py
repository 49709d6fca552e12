"""A call of each operator of the room, as the public functions make it."""

import torch

from gossamer.attention import (
    AdaptiveK,
    Selection,
    indexer_loss,
    indexer_scores,
    select_topk,
    sparse_attention,
)
from gossamer.attention.rotary_gates import rotary_gates


def calls(device: torch.device) -> None:
    selection_calls(device)
    sparse_calls(device)


def selection_calls(device: torch.device) -> None:
    """What scores and selects."""
    shapes = ((2, 3, 70, 8), (2, 90, 8), (2, 70, 3), (3,))
    q, k, w, bias = (torch.randn(shape, device=device).requires_grad_() for shape in shapes)
    lengths = torch.tensor([90, 40], device=device)
    for options in ({}, {"causal": False, "lengths": lengths}):
        out = indexer_scores(q, k, w, bias, **{"causal": True, **options})
        out.where(out.isfinite(), 0).sum().backward()
    for activation in ("sigmoid", "relu"):
        indexer_scores(q, k, w, causal=False, activation=activation).sum().backward()
    select_topk(q, k, w, None, k=9, causal=True, activation="relu")
    select_topk(q[:, :, :1], k, w[:, :1], None, k=9, causal=True)
    select_topk(q, k, w, bias, k=12, window=2, sinks=1, granularity=4, causal=True)
    found = select_topk(q, k, w, bias, k=9, window=2, sinks=1, causal=True)
    select_topk(q, k, w, lengths=lengths, k=AdaptiveK("entropy", 2, 8, 16), bias=None, causal=True)
    Selection.from_mask(found.to_mask())


def sparse_calls(device: torch.device) -> None:
    """What attends to a selection, and what trains an indexer."""

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, requires_grad=True)

    lengths = torch.tensor([20, 33], device=device)
    for scopes in (1, 2):
        selection = Selection.from_mask(torch.rand(2, scopes, 33, 33, device=device) < 0.3)
        for options in ({}, {"lengths": lengths, "causal": False}):
            q, k, v = leaf(2, 4, 33, 16), leaf(2, 2, 33, 16), leaf(2, 2, 33, 16)
            out, lse = sparse_attention(q, k, v, selection, return_lse=True, **{"causal": True, **options})
            (out.sum() + torch.where(lse.isfinite(), lse, 0).sum()).backward()
            for path in ("tiles", "lists"):
                sparse_attention(q, k, v, selection, path=path, **{"causal": True, **options}).sum().backward()
    selection = Selection.from_mask(torch.rand(2, 33, 33, device=device) < 0.3)
    for given in (None, lengths):
        operands = (leaf(2, 3, 33, 8), leaf(2, 33, 8), leaf(2, 33, 3), leaf(3))
        indexer_loss(q, k, *operands, selection=selection, lengths=given, causal=True).backward()
        indexer_loss(q, k, *operands, lengths=given, causal=True, activation="relu").backward()
        sparse_attention(q, k, v, selection, indexer=operands, lengths=given, causal=True).sum().backward()
    for gates in (True, False):
        y, angles = leaf(2, 5, 8 * (12 if gates else 7)), torch.randn(5, 8, device=device)
        made = rotary_gates(y, angles, angles, 3, 2, value_gate=gates, output_gate=gates)
        sum(x.sum() for x in made if x is not None).backward()
    one = Selection.from_mask(torch.rand(2, 1, 33, device=device) < 0.3)
    pages, table = torch.randn(8, 16, 2, 16, device=device), torch.randperm(8, device=device)[:6].view(2, 3)
    q, k, v = (x.detach() for x in (q, k, v))
    sparse_attention(q[:, :, :1], k, v, one, causal=True)
    sparse_attention(q[:, :, :1], pages, pages, one, page_table=table, lengths=lengths, causal=True)

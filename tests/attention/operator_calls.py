"""Calls of the room's public functions, for `tests/test_operators.py`."""

import torch

from gossamer.attention import Selection, indexer_loss, rotary_gates, sparse_attention, sparse_decode


def calls(device: torch.device) -> None:
    sparse_calls(device)


def sparse_calls(device: torch.device) -> None:
    """What attends to a selection, and what trains an indexer."""

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, requires_grad=True)

    lengths = torch.tensor([20, 33], device=device)
    for scopes in (1, 2):
        selection = Selection.from_mask(torch.rand(2, scopes, 33, 33, device=device) < 0.3)
        for options in ({}, {"lengths": lengths, "causal": False}):
            q, k, v = leaf(2, 4, 33, 16), leaf(2, 2, 33, 16), leaf(2, 2, 33, 16)
            out, lse = sparse_attention(q, k, v, selection, return_lse=True, **options)
            (out.sum() + torch.where(lse.isfinite(), lse, 0).sum()).backward()
            sparse_attention(q, k, v, selection, **options).sum().backward()
    selection = Selection.from_mask(torch.rand(2, 33, 33, device=device) < 0.3)
    for given in (None, lengths):
        operands = (leaf(2, 3, 33, 8), leaf(2, 33, 8), leaf(2, 33, 3), leaf(3))
        indexer_loss(q, k, *operands, selection=selection, lengths=given).backward()
    for gates in (True, False):
        y, angles = leaf(2, 5, 8 * (12 if gates else 7)), torch.randn(5, 8, device=device)
        made = rotary_gates(y, angles, angles, 3, 2, value_gate=gates, output_gate=gates)
        sum(x.sum() for x in made if x is not None).backward()
    one = Selection.from_mask(torch.rand(2, 1, 33, device=device) < 0.3)
    pages, table = torch.randn(8, 16, 2, 16, device=device), torch.randperm(8, device=device)[:6].view(2, 3)
    q, k, v = (x.detach() for x in (q, k, v))
    sparse_decode(q[:, :, :1], k, v, one)
    sparse_decode(q[:, :, :1], pages, pages, one, page_table=table, lengths=lengths)

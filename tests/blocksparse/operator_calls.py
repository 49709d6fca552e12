"""Calls of the room's operators with every kind of argument, for `tests/test_operators.py`."""

import torch

from gossamer import blocksparse


def calls(device: torch.device) -> None:
    mask = torch.tensor([[[True, False], [True, True]]], device=device)
    layout = blocksparse.Layout.from_mask(mask, (16, 32), size=(20, 40), capacity=4)
    x = torch.randn(1, 20, 40, device=device, requires_grad=True)
    blocksparse.from_dense(x, layout).to_dense(1.0).sum().backward()
    q, k = (torch.randn(2, 2, t, 8, device=device, requires_grad=True) for t in (20, 40))
    bias = torch.randn(2, 20, 40, device=device, requires_grad=True)
    lengths = torch.tensor([40, 3], device=device)
    blocksparse.attention(q, k, k, layout).sum().backward()
    places = torch.arange(40, device=device)
    relative = blocksparse.Relative(torch.randn(2, 5, 8, device=device, requires_grad=True), places[20:], places)
    added = {"bias": bias, "relative": relative}
    out, lse = blocksparse.attention(q, k, k, layout, **added, causal=True, valid_lengths=lengths, return_lse=True)
    (out.sum() + lse.exp().sum()).backward()

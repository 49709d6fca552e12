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
    out, lse = blocksparse.attention(q, k, k, layout, bias=bias, causal=True, valid_lengths=lengths, return_lse=True)
    (out.sum() + lse.exp().sum()).backward()
    _moves(device)


def _moves(device: torch.device) -> None:
    """What moves data, and its gradients. Every block of what is indexed is present: the rest is left as it was."""
    layout = blocksparse.Layout.from_mask(torch.ones(2, 2, 2, device=device), (16, 32), size=(20, 40), capacity=8)
    x, y = (torch.randn(2, 20, 40, device=device, requires_grad=True) for _ in range(2))
    a, b = blocksparse.from_dense(x, layout), blocksparse.from_dense(y, layout)
    outs = []
    for dim, bound in enumerate(x.shape):
        index = blocksparse.from_dense(torch.randint(-1, bound, x.shape, device=device), layout)
        outs += [blocksparse.gather(a, dim, index), blocksparse.scatter(a, dim, index, b)]
        for reduce in ("sum", "mean", "amax", "amin", "prod"):
            for include_self in (True, False):
                outs.append(blocksparse.scatter_reduce(a, dim, index, b, reduce, include_self=include_self))
        blocksparse.Layout.from_indices(index, dim, bound)
        outs += [blocksparse.repeat_interleave(a, 2, dim), blocksparse.cat([a, b], dim), *blocksparse.split(a, 11, dim)]
    outs += [blocksparse.repeat(a, (2, 1, 2)), blocksparse.adapt_layout(a, layout.adapt(64))]
    sum(out.to_dense().sum() for out in outs).backward()
    blocksparse.adapt_layout(a.detach(), layout.adapt(16))

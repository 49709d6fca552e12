"""Calls of the room's operators with every kind of argument, for `tests/recorded.py`."""

import torch

from gossamer import blocksparse
from tests.blocksparse.blocks import repeat_interleave


def calls(device: torch.device) -> None:
    mask = torch.tensor([[[True, False], [True, True]]], device=device)
    layout = blocksparse.Layout.from_mask(mask, (16, 32), size=(20, 40), capacity=4)
    x = torch.randn(1, 20, 40, device=device, requires_grad=True)
    blocks = blocksparse.from_dense(x, layout)
    (blocks.to_dense(1.0).sum() + blocks.square().sum(-1).sum()).backward()
    q, k = (torch.randn(2, 2, t, 8, device=device, requires_grad=True) for t in (20, 40))
    bias = torch.randn(2, 20, 40, device=device, requires_grad=True)
    lengths = torch.tensor([40, 3], device=device)
    blocksparse.attention(q, k, k, layout).sum().backward()
    places = torch.arange(40, device=device)
    relative = blocksparse.Relative(torch.randn(2, 5, 8, device=device, requires_grad=True), places[20:], places)
    added = {"bias": bias, "relative": relative}
    out, lse = blocksparse.attention(q, k, k, layout, **added, causal=True, lengths=lengths, return_lse=True)
    (out.sum() + lse.exp().sum()).backward()
    _operators(device)
    _moves(device)


def _operators(device: torch.device) -> None:
    # Whole blocks and exact capacities, for what stands behind the last block is nobody's.
    generator = torch.Generator(device).manual_seed(0)
    layouts = [blocksparse.Layout.random((2, 2, 3), (16, 32), 0.5, generator=generator, device=device) for _ in "ab"]
    x, y = (torch.randn(2, 32, 96, device=device, requires_grad=True) for _ in range(2))
    a, b = (blocksparse.from_dense(matrix, layout) for matrix, layout in zip((x, y), layouts))
    square = blocksparse.Layout.product(layouts[0], layouts[1].transpose())
    results = [
        blocksparse.matmul(a, b, transpose_b=True),
        blocksparse.matmul(a, b, transpose_a=True),
        blocksparse.matmul(a, y.mT),
        blocksparse.matmul(x, b, transpose_b=True),
        blocksparse.matmul(a, b, square, transpose_b=True).values,
        blocksparse.matmul(x, y, square, transpose_b=True).values,
        a.mT.values,
        a.sum(-1),
        a.amax(-2),
        a.amax(-1),
        (a + torch.ones(32, 1, device=device, requires_grad=True)).values,
    ]
    mask = torch.ones(32, 96, dtype=torch.bool, device=device)
    results += [blocksparse.softmax(a, mask=given, scale=0.5).values for given in (None, mask, a > 0)]
    torch.cat([result.flatten() for result in results]).sum().backward()


def _moves(device: torch.device) -> None:
    """What moves data, and its gradients. Every block of what is indexed is present: the rest is left as it was."""
    layout = blocksparse.Layout.from_mask(
        torch.ones(2, 2, 2, device=device).bool(), (16, 32), size=(20, 40), capacity=8
    )
    x, y = (torch.randn(2, 20, 40, device=device, requires_grad=True) for _ in range(2))
    a, b = blocksparse.from_dense(x, layout), blocksparse.from_dense(y, layout)
    outs = []
    for dim, bound in enumerate(x.shape):
        index = blocksparse.from_dense(torch.randint(-1, bound, x.shape, device=device), layout)
        outs += [blocksparse.gather(a, dim, index), blocksparse.scatter(a, dim, index, b)]
        for reduce in ("sum", "mean", "amax", "amin", "prod") if dim == 1 else ("sum",):
            for include_self in (True, False):
                outs.append(blocksparse.scatter(a, dim, index, b, reduce, include_self=include_self))
        blocksparse.layout_of_indices(index, dim, bound)
        outs += [repeat_interleave(a, 2, dim), blocksparse.cat([a, b], dim), *blocksparse.split(a, 11, dim)]
    outs += [blocksparse.repeat(a, (2, 1, 2)), blocksparse.adapt(a, blocksparse.adapt(layout, 64))]
    sum(out.to_dense().sum() for out in outs).backward()
    blocksparse.adapt(a.detach(), blocksparse.adapt(layout, 16))

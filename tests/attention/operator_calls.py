"""A call of each operator of the room, as the public functions make it."""

import torch

from gossamer.attention import AdaptiveK, Selection, indexer_scores, select_topk


def calls(device: torch.device) -> None:
    shapes = ((2, 3, 70, 8), (2, 90, 8), (2, 70, 3), (3,))
    q, k, w, bias = (torch.randn(shape, device=device).requires_grad_() for shape in shapes)
    lengths = torch.tensor([90, 40], device=device)
    for options in ({}, {"causal": False, "lengths": lengths}):
        out = indexer_scores(q, k, w, bias, **options)
        out.where(out.isfinite(), 0).sum().backward()
    out = indexer_scores(q, k, w, causal=False)
    out.sum().backward()
    found = select_topk(q, k, w, bias, k=9, window=2, sinks=1)
    select_topk(q, k, w, lengths=lengths, adaptive=AdaptiveK("entropy", 2, 8, 16), capacity=5)
    Selection.from_mask(found.to_mask())

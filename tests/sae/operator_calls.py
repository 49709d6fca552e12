"""Calls of the room's newer operators, for opcheck."""

import torch

from gossamer import gemm
from gossamer.sae.encode_dense import encode_dense


def calls(device: torch.device) -> None:
    """Dense latents of each activation."""
    x, W, b = (torch.randn(shape, device=device).requires_grad_() for shape in ((3, 12), (12, 90), (90,)))
    threshold = torch.full((90,), 0.5, device=device, requires_grad=True)
    for activation in (
        gemm.ReLU(),
        gemm.JumpReLU(threshold, 0.5, ste_to_input=True),
        gemm.TopK(4, torch.rand(90, device=device)),
        gemm.BatchTopK(4),
    ):
        acts, l0, *_ = encode_dense(x, W, b, activation)
        (acts.sum() + l0.sum()).backward()

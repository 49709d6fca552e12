"""Calls of the room's newer operators, for opcheck."""

import torch

from gossamer.sae.encode_dense import encode_dense


def calls(device: torch.device) -> None:
    """Dense latents of each activation."""
    x, W, b = (torch.randn(shape, device=device).requires_grad_() for shape in ((3, 12), (12, 90), (90,)))
    threshold = torch.full((90,), 0.5, device=device, requires_grad=True)
    for options in (
        {"activation": "relu"},
        {"activation": "jumprelu", "threshold": threshold, "bandwidth": 0.5, "ste_to_input": True},
        {"activation": "topk", "k": 4, "scale": torch.rand(90, device=device)},
        {"activation": "batchtopk", "k": 4},
    ):
        acts, l0, *_ = encode_dense(x, W, b, **options)
        (acts.sum() + l0.sum()).backward()

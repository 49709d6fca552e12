"""Calls of the room's operators with every kind of argument, for `tests/recorded.py`."""

import itertools

import torch

from gossamer import gemm, rowsparse

N, D = 90, 12


def calls(device: torch.device) -> None:
    for stacked, bias, recompute in itertools.product((False, True), repeat=3):
        x, gate, up, b = (
            torch.randn(shape, device=device).requires_grad_() for shape in ((3, D), (8, D), (8, D), (8,))
        )
        biases = {"gate_bias": b[:4] if stacked else b, "up_bias": None} if bias else {}
        out = gemm.linear_glu(x, gate, None if stacked else up, recompute=recompute, **biases)
        out.sum().backward()
    gemm.linear_glu(x.detach(), gate.detach(), activation="gelu")
    gemm.linear_glu(x.detach(), gate.detach(), out=torch.empty(3, 4, device=device))
    gemm.gated_mlp(x, gate, up, torch.randn(D, 8, device=device)).sum().backward()
    x, weight, W, b = (torch.randn(s, device=device).requires_grad_() for s in ((3, D), (N, D), (N, D), (N,)))
    jump = {"activation": gemm.JumpReLU(torch.rand(N, device=device))}
    # Every row overflows, for what does not is left unwritten in a source.
    for options in ({"capacity": 5}, {"capacity": 5, "bias": b, **jump}):
        rows = gemm.linear_pack(x, weight, **options)
        rowsparse.matmul(rows, W).sum().backward()
        rowsparse.matmul(rows.detach(), W.detach())
    gemm.linear_pack(x.detach(), weight.detach())
    rowsparse.matmul(gemm.linear_pack(x, weight, activation="relu2", capacity=5), W).sum().backward()

"""Calls of the room's operators, for `tests/recorded.py`."""

import torch

from gossamer import ffn, gemm
from gossamer.ffn.sparse_ffn import sparse_ffn


def calls(device: torch.device) -> None:
    gate, up = torch.randn(2, 90, 12, device=device)
    down, bias = torch.randn(7, 90, device=device), torch.full((90,), -2.0, device=device)
    for m in (3, 40):
        x = torch.randn(m, 12, device=device)
        for method in ("gather", "union"):
            ffn.gated(x, gate, up, down, gate_bias=bias, method=method)
            threshold = torch.rand(90, device=device)
            ffn.plain(x, up, down, up_bias=bias, activation=gemm.JumpReLU(threshold), method=method)
        sparse_ffn(x, gate, None, None, up, None, down.t().contiguous().t(), None, True, False, 1)

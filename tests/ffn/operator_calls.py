"""Calls of the room's operators, for `tests/recorded.py`."""

import torch

from gossamer import ffn, gemm
from gossamer.ffn.records import SparseFfn, SparseTraining
from gossamer.ffn.sparse_ffn import sparse_ffn
from gossamer.ffn.sparse_training import sparse_training


def calls(device: torch.device) -> None:
    gate, up = torch.randn(2, 90, 12, device=device)
    down, bias = torch.randn(7, 90, device=device), torch.full((90,), -2.0, device=device)
    for m in (3, 40):
        x = torch.randn(m, 12, device=device)
        ffn.gated(x, gate, up, down, gate_bias=bias, method="gather")
        threshold = torch.rand(90, device=device)
        ffn.plain(x, up, down, up_bias=bias, activation=gemm.JumpReLU(threshold), method="gather")
        sparse_ffn(SparseFfn(x, gate, None, None, up, None, down.t().contiguous().t(), None, True, True))
    # Every entry is active, for places behind the last are left unwritten.
    for gated in (True, False):
        x, gate, up, down = (torch.rand(s, device=device) + 0.1 for s in ((6, 12), (36, 12), (36, 12), (7, 36)))
        leaves = [t.requires_grad_() for t in (x, gate, up, down)]
        bias = torch.rand(36, device=device).requires_grad_()
        weights = (leaves[0], leaves[1], bias, None, *((leaves[2], bias) if gated else (None, None)), leaves[3])
        out, l1, *_ = sparse_training(SparseTraining(*weights, None, True, 36, 216, 256, 16))
        (out.sum() + l1).backward(retain_graph=True)
        out.sum().backward()

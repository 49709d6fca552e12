"""Block-sparse weights and block-sparse attention beside dense ones: time and error by the share of the blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from demo.measure import interleaved
from demo.train import Clock, Show
from gossamer import blocksparse
from gossamer.blocksparse import Layout
from gossamer.nn import BlockSparseLinear

BLOCK = 64
DENSITIES = (1.0, 0.5, 0.25, 0.1)
"""Shares of the blocks of a weight."""
WIDTH, ROWS = 2048, 512
LENGTH, HEADS, HEAD_DIM = 4096, 8, 64
WINDOWS = (1 / 4, 1 / 8, 1 / 32)
"""Of the sequence, how far behind its own a query's keys lie, beside those of the first block."""
CHECKED = 256
"""Rows of a result that are compared with float64."""
Case = tuple[tuple[Callable[[], Tensor], Callable[[], Tensor]], Tensor, Tensor]


@torch.inference_mode()
def block_sparse(
    device: torch.device, seed: int, *, seconds: float, show: Show, width: int = WIDTH, length: int = LENGTH
) -> dict[str, Any]:
    """`nn.BlockSparseLinear` `[width, width]` and causal `blocksparse.attention` over `length` tokens, each with
    fewer and fewer blocks, beside the dense product and dense attention, for `seconds` in all.

    The density of attention is the share of the blocks that a causal model sees."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(seed)
    x = torch.randn(ROWS, width, device=device, dtype=dtype)
    q, k, v = (torch.randn(1, HEADS, length, HEAD_DIM, device=device, dtype=dtype) for _ in range(3))
    side = width // BLOCK
    layouts = [("linear", Layout.random((side, side), BLOCK, density, device=device)) for density in DENSITIES]
    layouts += [("attention", local(length, int(share * length), device)) for share in WINDOWS]
    seen = int(blocksparse.causal((length, length), BLOCK, device=device).nnz)
    clock, rows = Clock(seconds), []
    for number, (operation, layout) in enumerate(layouts):
        share = int(layout.nnz) / (side * side if operation == "linear" else seen)
        show(number / len(layouts), f"{operation}, {share:.0%} of the blocks")
        calls, at, exact = _linear(x, layout) if operation == "linear" else _attention(q, k, v, layout)
        difference = (calls[1]()[..., at, :].double() - exact).abs().max().item()
        dense, sparse = interleaved(calls, device, (seconds - clock.elapsed) / (len(layouts) - number))
        rows.append(
            {
                "operation": operation,
                "density": share,
                "dense_seconds": dense.median,
                "sparse_seconds": sparse.median,
                "speed_up": dense.median / sparse.median,
                "largest_difference": difference,
                "largest_value": exact.abs().max().item(),
            }
        )
    show(1.0, f"{rows[-1]['speed_up']:.1f}x with {rows[-1]['density']:.0%} of the blocks of attention")
    return {
        "block_size": BLOCK,
        "width": width,
        "rows": ROWS,
        "length": length,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "dtype": str(dtype).removeprefix("torch."),
        "cases": rows,
    }


def local(length: int, window: int, device: torch.device) -> Layout:
    """A causal window and the first tokens."""
    near = blocksparse.sliding_window((length, length), BLOCK, (window, 0), device=device)
    first = blocksparse.global_tokens((length, length), BLOCK, BLOCK, device=device)
    return near.union(first).intersection(blocksparse.causal((length, length), BLOCK, device=device))


def _linear(x: Tensor, layout: Layout) -> Case:
    """(dense and block-sparse, some rows, what these are in float64)"""
    sparse = BlockSparseLinear(layout, bias=False, dtype=x.dtype)
    dense, at = sparse.weight.to_dense(), _rows(x.shape[0], x.device)
    return (lambda: F.linear(x, dense), lambda: sparse(x)), at, x[at].double() @ dense.double().t()


def _attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Case:
    at = _rows(q.shape[2], q.device)
    mask = layout.element_mask()[at]
    exact = F.scaled_dot_product_attention(q[:, :, at].double(), k.double(), v.double(), attn_mask=mask)

    def sparse() -> Tensor:
        out = blocksparse.attention(q, k, v, layout, causal=True)
        assert isinstance(out, Tensor)
        return out

    return (lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), sparse), at, exact


def _rows(length: int, device: torch.device) -> Tensor:
    return torch.linspace(0, length - 1, min(CHECKED, length), device=device).long()

"""Transposed blocks in the transposed layout's order: bound by memory, each element is read once and written once.

A program owns a block of the result. Rows of blocks lie side by side in memory on both sides; the turn happens in
registers and shared memory. Behind the last block there are zeros, and NaN everywhere where blocks are lost.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch


@triton.jit(do_not_specialize=["nnz_ptr", "capacity"])
def _blocksparse_transpose_kernel(
    x_ptr, out_ptr, nnz_ptr, order_ptr, capacity, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Program (block of the result); HEIGHT and WIDTH are those of the blocks that are read."""
    block = tl.program_id(0)
    nnz = tl.load(nnz_ptr)
    source = tl.load(order_ptr + block)
    i, j = tl.arange(0, HEIGHT), tl.arange(0, WIDTH)
    at = source.to(tl.int64) * (HEIGHT * WIDTH) + (i[:, None] * WIDTH + j[None, :])
    x = tl.load(x_ptr + at, mask=(i >= 0)[:, None] & ((j >= 0) & (block < nnz) & (nnz <= capacity))[None, :], other=0.0)
    if nnz > capacity:
        x = tl.full(x.shape, float("nan"), x.dtype)
    to = block.to(tl.int64) * (HEIGHT * WIDTH) + (j[:, None] * HEIGHT + i[None, :])
    tl.store(out_ptr + to, tl.trans(x))


_transpose = launch.Kernel(_blocksparse_transpose_kernel)


def transpose(values: Tensor, nnz: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Operator `blocksparse_transpose`; `back` is for the gradient alone."""
    values = values.contiguous()
    capacity, height, width = values.shape
    out = torch.empty(capacity, width, height, dtype=values.dtype, device=values.device)
    meta = {"HEIGHT": height, "WIDTH": width}
    warps = max(1, min(8, height * width // 1024))
    _transpose((capacity, 1, 1), (values, out, nnz, order, capacity), meta, num_warps=warps)
    return out


EXAMPLES = {
    _blocksparse_transpose_kernel: {
        "signature": {
            "x_ptr": "*bf16", "out_ptr": "*bf16", "nnz_ptr": "*i32", "order_ptr": "*i32", "capacity": "i32",
        },
        "constexprs": {"HEIGHT": 64, "WIDTH": 64},
        "num_warps": 4,
    },
}  # fmt: skip
"""Example signatures for the ahead-of-time compile test."""

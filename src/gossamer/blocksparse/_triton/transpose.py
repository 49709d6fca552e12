"""Transposed blocks in the transposed layout's order: bound by memory, each element is read once and written once.

A program owns a block of the result. Rows of blocks lie side by side in memory on both sides; the turn happens in
registers and shared memory. Behind the last block there are zeros, and NaN everywhere where blocks are lost. `turn`
does the same to every matrix of a batch, tile by tile, for products that ask for an operand the other way around.
"""

import torch
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.blocksparse._triton.tensor import lost, plain
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.records import BlocksparseTranspose


@launch.kernel(do_not_specialize=["nnz_ptr", "capacity"])
def _blocksparse_transpose_kernel(
    x_ptr, out_ptr, nnz_ptr, order_ptr, capacity, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """Program (block of the result); HEIGHT and WIDTH are those of the blocks that are read. With REST what stands
    behind the last block is read too. Whole numbers that are written as narrower ones stop at the ends of these."""
    block = tl.program_id(0)
    nnz = tl.load(nnz_ptr)
    source = tl.load(order_ptr + block)
    held = nnz <= capacity
    if REST:
        source = tl.where(block < nnz, source, block)
    else:
        held &= block < nnz
    i, j = tl.arange(0, HEIGHT), tl.arange(0, WIDTH)
    at = source.to(tl.int64) * (HEIGHT * WIDTH) + (i[:, None] * WIDTH + j[None, :])
    x = tl.load(x_ptr + at, mask=(i >= 0)[:, None] & ((j >= 0) & held)[None, :], other=0.0)
    if nnz > capacity:
        x = lost(x)
    if x_ptr.dtype.element_ty != out_ptr.dtype.element_ty:
        x = tl.minimum(tl.maximum(x, -(1 << 31)), (1 << 31) - 1).to(out_ptr.dtype.element_ty)
    to = block.to(tl.int64) * (HEIGHT * WIDTH) + (j[:, None] * HEIGHT + i[None, :])
    tl.store(out_ptr + to, tl.trans(x))


@launch.kernel(specialize=("M",))
def _blocksparse_turn_kernel(x_ptr, out_ptr, M, N, TILE: tl.constexpr):
    """Program (tile of a matrix): x is [Z, M, N]."""
    across = tl.cdiv(N, TILE)
    tiles = tl.cdiv(M, TILE) * across
    tile = tl.program_id(0) % tiles
    start = (tl.program_id(0) // tiles).to(tl.int64) * M * N
    i = (tile // across * TILE + tl.arange(0, TILE)).to(tl.int64)
    j = (tile % across * TILE + tl.arange(0, TILE)).to(tl.int64)
    x = tl.load(x_ptr + start + (i[:, None] * N + j[None, :]), mask=(i < M)[:, None] & (j < N)[None, :])
    to = out_ptr + start + (j[:, None] * M + i[None, :])
    tl.store(to, tl.trans(x), mask=(j < N)[:, None] & (i < M)[None, :])


TILE = 64


def transpose(call: BlocksparseTranspose) -> Tensor:
    return turn_blocks(call.values, Lists(call.layout, call.form), call.values.dtype)


def turn_blocks(values: Tensor, lists: Lists, dtype: torch.dtype, rest: bool = False) -> Tensor:
    """Transposed blocks in the order of the transposed layout. With `rest` the values behind the last block stay, which
    are zeros otherwise. `dtype` is that of values, or int32 for int64, of which numbers beyond int32 become its ends.
    """
    capacity, height, width = values.shape
    out = torch.empty(capacity, width, height, dtype=dtype, device=values.device)
    meta = {"HEIGHT": height, "WIDTH": width, "REST": rest}
    warps = max(1, min(8, height * width // 1024))
    args = (plain(values), plain(out), lists.nnz, lists.transpose_order, capacity)
    _blocksparse_transpose_kernel((capacity, 1, 1), args, meta, num_warps=warps)
    return out


def turn(x: Tensor) -> Tensor:
    """`x.mT.contiguous()` of a contiguous `[Z, M, N]`, read and written by whole rows of a tile."""
    z, m, n = x.shape
    out = torch.empty(z, n, m, dtype=x.dtype, device=x.device)
    programs = z * launch.cdiv(m, TILE) * launch.cdiv(n, TILE)
    if programs:
        _blocksparse_turn_kernel((programs, 1, 1), (x, out, m, n), {"TILE": TILE}, num_warps=4)
    return out


EXAMPLES = {
    _blocksparse_transpose_kernel: {"HEIGHT": 64, "WIDTH": 64, "REST": False},
    _blocksparse_turn_kernel: {"x_ptr": "*fp32", "out_ptr": "*fp32", "TILE": TILE},
}

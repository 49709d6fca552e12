"""Blocks and parts of blocks moved: a copy, bound by memory.

Each row, column and matrix of the result names its source in a short map, and some have several, which are added (what
the gradient of a repetition is). A program owns a tile of one block of the result. Where the maps keep whole tiles
together (host code knows: repeats of whole blocks, parts that begin with a block, blocks of another size) a tile has
one source, found by four scalar loads, and is copied in whole sectors. Otherwise each element finds its own: a row and
a column of map entries, and block numbers out of the table of positions, which stays in the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.blocksparse._triton.tensor import lost, plain
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.records import BlocksparseRearrange

WHOLE, SCATTERED = 4096, 2048
"""Elements of a tile, at most: with one source, as many as a transposition has of blocks of 64, which came to 0.97 of a
copy's rate (one H200, n 7,616); where each element finds its own, fewer."""


@triton.jit
def _source(map_ptr, k, K, at, length, most):
    """Where elements `at` come from; -1 where from nowhere."""
    if map_ptr is None:
        return tl.where(at < most, at, -1)
    else:
        # Behind the last block places are negative.
        return tl.load(map_ptr + at * K + k, mask=(at >= 0) & (at < length), other=-1).to(tl.int32)


@launch.kernel(do_not_specialize=["nnz_ptr", "out_nnz_ptr", "capacity", "K"])
def _rearrange_kernel(
    values_ptr, out_ptr, nnz_ptr, positions_ptr, out_nnz_ptr, rows_ptr, cols_ptr, z_map_ptr, i_map_ptr, j_map_ptr,
    M, N, M_OUT, N_OUT, K, capacity,
    SOURCE: tl.constexpr, RESULT: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr, WHOLE: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """Program (block of the result, tile of it). SOURCE and RESULT are heights and widths of blocks."""
    H: tl.constexpr = SOURCE[0]
    W: tl.constexpr = SOURCE[1]
    HEIGHT: tl.constexpr = RESULT[0]
    WIDTH: tl.constexpr = RESULT[1]
    block = tl.program_id(0)
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    R, C = tl.cdiv(M, H), tl.cdiv(N, W)
    zr = tl.load(rows_ptr + block)
    rows_out = tl.cdiv(M_OUT, HEIGHT)
    in_i = tl.program_id(1) // (WIDTH // TW) * TH
    in_j = tl.program_id(1) % (WIDTH // TW) * TW
    i = zr % rows_out * HEIGHT + in_i
    j = tl.load(cols_ptr + block) * WIDTH + in_j
    down, across = tl.arange(0, TH)[:, None], tl.arange(0, TW)[None, :]
    if not WHOLE:
        i, j = i + down, j + across
    x = tl.zeros([TH, TW], tl.float32 if SUM else dtype)
    for k in range(0, K):
        z_in = (
            zr // rows_out if z_map_ptr is None else tl.load(z_map_ptr + zr // rows_out * K + k, mask=zr >= 0, other=-1)
        )
        z_in = z_in.to(tl.int32)
        i_in = _source(i_map_ptr, k, K, i, M_OUT, tl.minimum(M, M_OUT))
        j_in = _source(j_map_ptr, k, K, j, N_OUT, tl.minimum(N, N_OUT))
        found = (zr >= 0) & (z_in >= 0) & (i_in >= 0) & (j_in >= 0)
        number = tl.load(positions_ptr + (z_in * R + i_in // H) * C + j_in // W, mask=found, other=-1)
        found = (number >= 0) & (number < capacity)
        base = number.to(tl.int64) * (H * W)
        if WHOLE:
            at = base + tl.multiple_of(i_in % H * W, W) + tl.multiple_of(j_in % W, TW) + down * W + across
            found = found & (down >= 0) & (across >= 0)
        else:
            at = base + i_in % H * W + j_in % W
        taken = tl.load(values_ptr + at, mask=found, other=0)
        x = x + taken.to(tl.float32) if SUM else taken
    if (tl.load(nnz_ptr) > capacity) | (tl.load(out_nnz_ptr) > tl.num_programs(0)):
        x = lost(x)
    to = block.to(tl.int64) * (HEIGHT * WIDTH) + (in_i + down) * WIDTH + in_j + across
    tl.store(out_ptr + to, x.to(dtype))


def rearrange(call: BlocksparseRearrange) -> Tensor:
    values, source, result = call.values, Lists(call.layout, call.form), Lists(call.out_layout, call.out_form)
    (z, _, _, h, w, m, n, capacity, *_), (z_out, _, _, height, width, m_out, n_out, room, *_) = source.form, result.form
    out = torch.empty(room, height, width, dtype=values.dtype, device=values.device)
    if 0 in (z * m * n, z_out * m_out * n_out):
        return out.zero_()
    maps, tile = (call.z_map, call.i_map, call.j_map), call.tile
    copies = max(1 if x is None else x.shape[1] for x in maps)
    whole = min(tile) > 1
    # Tiles of whole blocks may be cut into as many as keep enough programs busy.
    tw = tile[1] if whole else width
    th = min(tile[0] if whole else height, (WHOLE if whole else SCATTERED) // tw)
    args = (
        plain(values), plain(out), source.nnz, source.positions, result.nnz, result.row_indices, result.col_indices,
        *maps, m, n, m_out, n_out, copies, capacity,
    )  # fmt: skip
    meta = {
        "SOURCE": (h, w), "RESULT": (height, width), "TH": th, "TW": tw, "WHOLE": whole, "SUM": copies > 1,
    }  # fmt: skip
    grid = (out.shape[0], height // th * (width // tw), 1)
    _rearrange_kernel(grid, args, meta, num_warps=max(1, th * tw // (1024 if whole else 512)))
    return out


EXAMPLES = {
    _rearrange_kernel: {"SOURCE": (64, 64), "RESULT": (64, 64), "TH": 64, "TW": 64, "WHOLE": True, "SUM": False},
}

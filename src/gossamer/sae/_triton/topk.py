"""The k largest entries of each row of pre-activations that are never in memory.

A sample of the columns, some of each tile, is multiplied first, and the number below its r-th largest is a row's
*bound*; its columns fall into groups, and with hardly a difference it is the r-th largest of their maxima. The whole
product then leaves tile-wise lists of the entries that exceed the bound (`gemm.linear_pack`): a few times k entries a
row, among which the k largest are found. r is so large that fewer than k are left in one of some 100,000 rows of
columns in no order: the number of k largest among the sampled is Poisson's.

Nothing is left to chance but time: a row with fewer than k entries above a bound that is not 0, with more than a tile
has slots for, or with more than a list holds is computed again, all of it. As only the device knows which, the kernels
that do it are always launched, and leave at once where no row wants it.
"""

import torch
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.gemm._triton.linear_pack import launch_linear_pack
from gossamer.rowsparse._triton.overflow import launch_linear_source
from gossamer.rowsparse._triton.pack import clear_slots
from gossamer.rowsparse.formats import empty_slots, empty_twell
from gossamer.sae import encode_path
from gossamer.sae._triton import select
from gossamer.sae._triton.select import SHIFT, count_above, emit_largest, group_maxima, kth_largest, order_key

LARGEST = tl.constexpr(2.0**62)
"""The most that a bound and its factor may be: their product is finite, for infinity has to exceed it. A lowered bound
only lets more through."""


@launch.kernel
def _row_bound_kernel(
    z_ptr, bias_ptr, scale_ptr, out_ptr, N, rank, BLOCK: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Program (row): the number below the rank-th largest of its BLOCK group maxima, or 0; with a scale, at most
    LARGEST."""
    row = tl.program_id(0).to(tl.int64)
    largest = group_maxima(z_ptr + row * N, bias_ptr, scale_ptr, N, BLOCK, VEC, SHIFT)
    kth = tl.maximum(kth_largest(largest, z_ptr, 0, rank, 0, BLOCK), 1)
    bound = ((kth - 1) << SHIFT).to(tl.float32, bitcast=True)
    if scale_ptr is not None:
        bound = tl.minimum(bound, LARGEST)
    tl.store(out_ptr + row, bound)


@launch.kernel
def _topk_of_tiles_kernel(
    values_ptr, indices_ptr, counts_ptr, scale_ptr, bounds_ptr, list_ptr, out_ptr, columns_ptr, spans_ptr, l0_ptr,
    again_ptr, M, tiles, slots, tile, k, length,
    BLOCK: tl.constexpr, LIST: tl.constexpr, CHUNK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Program p takes rows p, p + programs, ...: it brings their tiles together, an entry of each of BLOCK tiles at a
    time, in a list of `length` keys, as many columns and, if ranks are those of scaled numbers, numbers without the
    scale. The k largest are written as entries. `again` says which rows could not be settled."""
    lists = 2 if scale_ptr is None else 3
    columns_of = list_ptr + tl.program_id(0).to(tl.int64) * (lists * length)
    keys_of = columns_of + length
    own_of = keys_of + length
    row = tl.program_id(0).to(tl.int64)
    while row < M:
        base = 0
        most = 0
        for first in range(0, tiles, BLOCK):
            at = first + tl.arange(0, BLOCK)
            counts = tl.load(counts_ptr + row * tiles + at, mask=at < tiles, other=0).to(tl.int32)
            slot = base + tl.cumsum(counts, axis=0) - counts
            largest = tl.max(counts, axis=0)
            for rank in range(0, tl.minimum(largest, slots)):
                held = (rank < counts) & (slot + rank < length)
                entry = (row * tiles + at) * slots + rank
                value = tl.load(values_ptr + entry, mask=held, other=0.0)
                column = at * tile + tl.load(indices_ptr + entry, mask=held, other=0).to(tl.int32)
                tl.store(columns_of + slot + rank, column, mask=held)
                key = order_key(value.to(tl.float32), SHIFT)
                if scale_ptr is not None:
                    tl.store(own_of + slot + rank, value.to(tl.float32).to(tl.int32, bitcast=True) >> SHIFT, mask=held)
                    scale = tl.load(scale_ptr + column, mask=held, other=0.0).to(tl.float32)
                    key = order_key((value.to(tl.float32) * scale).to(value.dtype).to(tl.float32), SHIFT)
                tl.store(keys_of + slot + rank, key, mask=held)
            base += tl.sum(counts, axis=0)
            most = tl.maximum(most, largest)
        # Lists are read by other threads than those that wrote them.
        tl.debug_barrier()
        count = tl.minimum(base, length)
        lanes = tl.arange(0, LIST)
        keys = tl.load(keys_of + lanes, mask=lanes < count, other=0)
        # An element that is not listed does not exceed the bound, so that a k-th largest of the list that does is the
        # row's.
        bound = tl.load(bounds_ptr + row).to(tl.int32, bitcast=True) >> SHIFT
        kth = kth_largest(keys, keys_of, count, k, bound, LIST)
        settled = (most <= slots) & (base <= length) & ((kth > bound) | (bound == 0))
        tl.store(again_ptr + row, (~settled).to(tl.int64))
        if settled:
            kth = tl.maximum(kth, 1)
            need = k - count_above(keys, keys_of, count, kth, LIST)
            held = emit_largest(
                None, None, scale_ptr, keys_of, columns_of, own_of, count, kth, need, out_ptr + row * k,
                columns_ptr + row * k, 0, k, CHUNK, SHIFT,
            )  # fmt: skip
            tl.store(spans_ptr + row, row * k)
            tl.store(spans_ptr + M + row, held.to(tl.int64))
            tl.store(l0_ptr + row, held)
            clear_slots(out_ptr + row * k, columns_ptr + row * k, held, k, 256, 256)
        tl.debug_barrier()
        row += tl.num_programs(0)


def row_topk(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `select.row_topk`, of x @ weight + bias, on the path "bound"."""
    m = len(x)
    out = (*empty_slots(x, m, m * k), torch.empty(m, dtype=torch.float32, device=x.device))
    # As spans in buffers without a slot: a row that begins at 1 is computed again.
    again = torch.zeros_like(out[2])
    d, n, tile = x.shape[1], weight.shape[1], encode_path.TOPK_TILE
    run = encode_path.topk_run(d)
    bounds = _bounds(*_sample(x, weight, bias, scale, run), encode_path.topk_rank(k, run))
    packed = empty_twell(x, m, n, tile, encode_path.TOPK_SLOTS)
    # So little below the quotient that rounding loses nothing that exceeds the bound.
    factors = None if scale is None else ((1 - 2**-20) / scale.float()).clamp_(max=LARGEST.value)
    launch_linear_pack(x, weight.t(), bias, None, tile, packed, bounds, factors)
    tiles, length = launch.cdiv(n, tile), encode_path.topk_list(k, run)
    programs = min(m, 16 * tuning.programs(x.device))
    lists = torch.empty(programs, 2 if scale is None else 3, length, dtype=torch.int32, device=x.device)
    args = (*packed, scale, bounds, lists, *out, again, m, tiles, encode_path.TOPK_SLOTS, tile, k, length)
    # Most rows' entries are in registers, of one warp, and few other registers are taken, so that many rows fit.
    held = max(256, encode_path.topk_list(k, run, 1.5))
    meta = {"BLOCK": min(128, launch.next_power_of_2(tiles)), "LIST": held, "CHUNK": 128, "SHIFT": SHIFT[x.dtype]}
    _topk_of_tiles_kernel((programs, 1, 1), args, meta, num_warps=1)
    # Memory for the next launches.
    del packed, factors, bounds, lists, args
    _settle(x, weight, bias, scale, k, again, out)
    return out


def _sample(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, run: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(pre-activations of the sampled columns, bias that is still to be added, scale)."""
    tile = encode_path.TOPK_TILE
    whole = weight.shape[1] // tile * tile
    runs = weight[:, :whole].unflatten(1, (-1, tile))[:, :, :run]
    # Copied in the order in which it lies, and where that can be, 16 bytes at a time.
    if weight.stride(1) != 1:
        columns = _wide(runs.permute(1, 2, 0)).contiguous().flatten(0, 1).view(x.dtype).t()
    else:
        columns = _wide(runs).contiguous().flatten(1).view(x.dtype)
    bias, scale = (
        None if vector is None else vector[:whole].view(-1, tile)[:, :run].flatten() for vector in (bias, scale)
    )
    if bias is not None and bias.dtype is x.dtype:
        return torch.addmm(bias, x, columns), None, scale
    return x @ columns, bias, scale


def _wide(runs: Tensor) -> Tensor:
    """Views numbers as words of 16 bytes where all of them are whole."""
    size = 16 // runs.element_size()
    sizes = (runs.storage_offset(), runs.shape[-1], *runs.stride()[:-1])
    whole = runs.stride(-1) == 1 and runs.data_ptr() % 16 == 0 and not any(s % size for s in sizes)
    return runs.view(torch.complex128) if whole else runs


def _bounds(z: Tensor, bias: Tensor | None, scale: Tensor | None, rank: int) -> Tensor:
    """The bounds that entries of each row have to exceed, float32 [M], from 0 on."""
    m, n = z.shape
    bounds = torch.empty(m, dtype=torch.float32, device=z.device)
    vector = 16 // z.element_size()
    meta = {"BLOCK": max(min(launch.next_power_of_2(n), 512), 32 * vector), "VEC": vector, "SHIFT": SHIFT[z.dtype]}
    _row_bound_kernel((m, 1, 1), (z, bias, scale, bounds, n, rank), meta, num_warps=1)
    return bounds


def _settle(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, k: int, again: Tensor, out: tuple[Tensor, ...]
) -> None:
    """Writes the rows that `again` names, from all of their pre-activations."""
    (values, indices, spans, l0), m, n = out, x.shape[0], weight.shape[1]
    # Few blocks, for each costs two launches, and of those no more than a quarter of the matrix where that is large.
    blocks = min(4, launch.cdiv(m * n * x.element_size(), 64 << 20))
    block = min(m, launch.cdiv(launch.cdiv(m, blocks), 128) * 128)
    z = x.new_empty(block, n)
    for first in range(0, m, block):
        rows = slice(first, min(first + block, m))
        part, some = z[: rows.stop - first], again[:, rows].contiguous()
        launch_linear_source(x[rows], weight.t(), bias, None, some, 0, part)
        slots = slice(first * k, rows.stop * k)
        results = (values[slots], indices[slots], spans[:, rows], l0[rows])
        select.largest_of_rows(part, None, scale, k, results, some[0], first)


EXAMPLES = {
    _row_bound_kernel: {"scale_ptr": None, "out_ptr": "*fp32", "BLOCK": 512, "VEC": 8, "SHIFT": 16, "num_warps": 1},
    _topk_of_tiles_kernel: {
        "indices_ptr": "*u8", "counts_ptr": "*i16", "again_ptr": "*i64", "BLOCK": 128, "LIST": 1024,
        "CHUNK": 128, "SHIFT": 16, "num_warps": 1,
    },
}  # fmt: skip

"""rows @ weight: every program gathers one row's weights, a slice of columns at a time.

One program owns a row and BLOCK_D columns of the output. It takes BLOCK_E entries at once as a [BLOCK_E, BLOCK_D] tile
of gathered weight rows, so that many independent 16-byte loads are in flight, and keeps a tile of float32 partial sums
that it folds once at the end: no exchange between warps inside the loop, and one fixed order of addition.
Column slices are the slow axis of the grid: while all rows work on one slice, the weight's slice is what the L2 has
to hold (65,536 x 256 bfloat16 = 34 MB), not the whole weight. Rows that overflowed are left to `overflow`.

The weight gradient works on the transposed entries: a program owns BLOCK_N neighbouring weight rows, whose entries
lie side by side, and adds them up as a small product [BLOCK_N, BLOCK_E] @ [BLOCK_E, BLOCK_D] of a one-hot tile that
carries the values with gathered rows of the output's gradient. A step is a chain of loads (key, value and row), so
they are issued steps ahead. Blocks with many entries, which would hold everybody up at the end, get larger programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton import overflow
from gossamer.rowsparse._triton._rows import row_span

LONG = 1024
"""Entries up to which a block of weight rows is the work of a small program."""


@triton.jit
def gather_run(
    values_ptr, indices_ptr, begin, count, w_ptr, stride_wn, columns, inside, N,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Sums of value * weight row over entries begin to count, a lane of BLOCK_E each: float32 [BLOCK_E, BLOCK_D]."""
    acc = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    entry = begin + tl.arange(0, BLOCK_E)
    index = tl.load(indices_ptr + entry, mask=entry < count, other=-1, cache_modifier=CACHE)
    value = tl.load(values_ptr + entry, mask=entry < count, other=0.0, cache_modifier=CACHE).to(tl.float32)
    for _ in range(begin, count, BLOCK_E):
        valid = (index >= 0) & (index < N)
        w = tl.load(
            w_ptr + index.to(tl.int64)[:, None] * stride_wn + columns[None, :],
            mask=valid[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        # -1 is no entry, whatever stands in its value; an index past the weight must not vanish silently.
        here = tl.where(valid, value, tl.where(index == -1, 0.0, float("nan")))
        entry += BLOCK_E
        index = tl.load(indices_ptr + entry, mask=entry < count, other=-1, cache_modifier=CACHE)
        value = tl.load(values_ptr + entry, mask=entry < count, other=0.0, cache_modifier=CACHE).to(tl.float32)
        acc += here[:, None] * w
    return acc


@triton.jit
def gather_rows(
    values_ptr, indices_ptr, count, w_ptr, stride_wn, columns, inside, N,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, RUN: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Sum over a list's first `count` entries of value * weight row, at the given columns: float32 [BLOCK_D].

    With RUN, runs of that many entries are summed on their own: in float32 one running sum over a long row rounds worse
    than a dense product does. CACHE is the modifier of the list's loads: ".cg" where this launch has written the list.
    """
    if RUN > 0:
        acc = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        for begin in range(0, count, RUN):
            end = tl.minimum(begin + RUN, count)
            acc += gather_run(
                values_ptr, indices_ptr, begin, end, w_ptr, stride_wn, columns, inside, N, BLOCK_E, BLOCK_D, CACHE
            )  # fmt: skip
    else:
        acc = gather_run(
            values_ptr, indices_ptr, 0, count, w_ptr, stride_wn, columns, inside, N, BLOCK_E, BLOCK_D, CACHE
        )
    return tl.sum(acc, axis=0)


@triton.jit
def _matmul_fwd_kernel(
    values_ptr, indices_ptr, offsets_ptr, w_ptr, bias_ptr, out_ptr, arrived_ptr, stride_wn, N, D, capacity, tiles,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, RUN: tl.constexpr, IS_CSR: tl.constexpr,
    LEADS: tl.constexpr,
):  # fmt: skip
    """Program (row, column slice)."""
    if LEADS:
        # The kernel for overflowed rows may start as soon as every program here has: it waits for our results itself.
        gdc_launch_dependents()
    row = tl.program_id(0)
    if arrived_ptr is not None:
        if (row == 0) & (tl.program_id(1) == 0):
            overflow.clear_arrived(arrived_ptr, tiles)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < D
    start, count, overflowed = row_span(offsets_ptr, row, capacity, IS_CSR)
    if not overflowed:
        out = gather_rows(
            values_ptr + start, indices_ptr + start, count, w_ptr, stride_wn, columns, inside, N,
            BLOCK_E, BLOCK_D, RUN, "",
        )  # fmt: skip
        if bias_ptr is not None:
            out += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row.to(tl.int64) * D + columns, out, mask=inside)


@triton.jit
def block_span(offsets_ptr, block, N, BLOCK_N: tl.constexpr):
    """(begin, end) of the sorted entries that belong to a block of weight rows."""
    first = block * BLOCK_N
    return tl.load(offsets_ptr + first), tl.load(offsets_ptr + tl.minimum(first + BLOCK_N, N))


@triton.jit
def load_entries(keys_ptr, columns_ptr, at, end, BLOCK_E: tl.constexpr):
    """(keys, columns) of BLOCK_E sorted entries from `at` on; column -1 past the end."""
    entry = at + tl.arange(0, BLOCK_E)
    held = entry < end
    return tl.load(keys_ptr + entry, mask=held, other=0), tl.load(columns_ptr + entry, mask=held, other=-1)


@triton.jit
def load_values(values_ptr, starts_ptr, key, column, capacity, IS_CSR: tl.constexpr):
    """The values of sorted entries, from where they stand in their rows."""
    held = column >= 0
    row = key >> 32
    if IS_CSR:
        start = tl.load(starts_ptr + row, mask=held, other=0)
    else:
        start = row * capacity
    return tl.load(values_ptr + start + (key & 0xFFFFFFFF), mask=held, other=0.0)


@triton.jit
def load_gradients(grad_ptr, key, column, D, columns, inside):
    """The rows of the output's gradient that sorted entries belong to, a slice of columns."""
    row = key >> 32
    mask = (column >= 0)[:, None] & inside[None, :]
    return tl.load(grad_ptr + row[:, None] * D + columns[None, :], mask=mask, other=0.0)


@triton.jit
def weight_block(
    block, keys_ptr, columns_ptr, values_ptr, starts_ptr, grad_ptr, out_ptr, begin, end, capacity, N, D,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, RUN: tl.constexpr, IS_CSR: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Writes BLOCK_N weight rows' gradient at one slice of columns, from the sorted entries begin to end.

    Keys are read two steps ahead, values and gradient rows one, so that a step waits for none of the three in turn.
    With RUN, a multiple of BLOCK_E, runs of that many entries are summed on their own, as in `gather_rows`.
    """
    tl.static_assert(RUN % BLOCK_E == 0)
    mine = block * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < D
    key, column = load_entries(keys_ptr, columns_ptr, begin, end, BLOCK_E)
    next_key, next_column = load_entries(keys_ptr, columns_ptr, begin + BLOCK_E, end, BLOCK_E)
    grad = load_gradients(grad_ptr, key, column, D, columns, inside)
    value = load_values(values_ptr, starts_ptr, key, column, capacity, IS_CSR)
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    run_length = tl.maximum(end - begin, 1)
    if RUN > 0:
        run_length = tl.full([], RUN, run_length.dtype)
    for run in range(begin, end, run_length):
        acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for at in range(run, tl.minimum(run + run_length, end), BLOCK_E):
            next_grad = load_gradients(grad_ptr, next_key, next_column, D, columns, inside)
            next_value = load_values(values_ptr, starts_ptr, next_key, next_column, capacity, IS_CSR)
            onehot = tl.where(mine[:, None] == column[None, :], value[None, :], 0.0).to(grad.dtype)
            column = next_column
            next_key, next_column = load_entries(keys_ptr, columns_ptr, at + 2 * BLOCK_E, end, BLOCK_E)
            acc = overflow.dot(onehot, grad, acc, PRECISION, UPCAST)
            grad = next_grad
            value = next_value
        total += acc
    out = out_ptr + mine.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(out, total, mask=(mine < N)[:, None] & inside[None, :])


@triton.jit
def _matmul_bwd_weight_kernel(
    keys_ptr, columns_ptr, offsets_ptr, values_ptr, starts_ptr, grad_ptr, out_ptr, long_ptr, found_ptr, capacity, N, D,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, RUN: tl.constexpr, LONG: tl.constexpr,
    IS_CSR: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (block of weight rows, column slice). keys are (row << 32 | slot), sorted by weight row, then row.

    Blocks with more than LONG entries are only noted down, for `_matmul_bwd_weight_long_kernel`.
    """
    block = tl.program_id(0)
    begin, end = block_span(offsets_ptr, block, N, BLOCK_N)
    if end - begin <= LONG:
        weight_block(
            block, keys_ptr, columns_ptr, values_ptr, starts_ptr, grad_ptr, out_ptr, begin, end, capacity, N, D,
            BLOCK_N, BLOCK_E, BLOCK_D, RUN, IS_CSR, PRECISION, UPCAST,
        )  # fmt: skip
    else:
        if tl.program_id(1) == 0:
            # In order of arrival, which nothing shows: each block is summed by itself.
            tl.store(long_ptr + tl.atomic_add(found_ptr, 1, sem="relaxed"), block)


@triton.jit
def _matmul_bwd_weight_long_kernel(
    keys_ptr, columns_ptr, offsets_ptr, values_ptr, starts_ptr, grad_ptr, out_ptr, long_ptr, found_ptr, capacity, N, D,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, RUN: tl.constexpr, IS_CSR: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (share of the noted blocks, column slice): more warps and entries at a time, for latents that often
    fire."""
    for item in range(tl.program_id(0), tl.load(found_ptr), tl.num_programs(0)):
        block = tl.load(long_ptr + item)
        begin, end = block_span(offsets_ptr, block, N, BLOCK_N)
        weight_block(
            block, keys_ptr, columns_ptr, values_ptr, starts_ptr, grad_ptr, out_ptr, begin, end, capacity, N, D,
            BLOCK_N, BLOCK_E, BLOCK_D, RUN, IS_CSR, PRECISION, UPCAST,
        )  # fmt: skip


_matmul_fwd = launch.Kernel(_matmul_fwd_kernel)
_matmul_bwd_weight = launch.Kernel(_matmul_bwd_weight_kernel)
_matmul_bwd_weight_long = launch.Kernel(_matmul_bwd_weight_long_kernel)


def matmul(
    values: Tensor,
    indices: Tensor,
    offsets: Tensor,
    source: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Operator `matmul`. ELL where values is 2-D, with offsets = nnz_per_row; CSR where it is 1-D.

    As in `sae._triton.decode`, what follows from shapes is done once and kept as a plan.
    """
    # A gradient may arrive expanded, and a bias too.
    values, bias = values.contiguous(), None if bias is None else bias.contiguous()
    weight, source = overflow.unit_columns(weight), None if source is None else overflow.unit_columns(source)
    m = offsets.shape[0] - (values.dim() == 1)
    out = weight.new_empty((m, weight.shape[1]), dtype=out_dtype)
    if launch.INTERPRET or m == 0 or out.shape[1] == 0:
        _launch_matmul(values, indices, offsets, source, weight, bias, out)
        return out
    index = weight.get_device()
    stream = torch._C._cuda_getCurrentRawStream(index)
    key = (values.shape, m, weight.shape, weight.stride(0), values.dtype, weight.dtype, out_dtype, index, stream)
    key += (None if bias is None else bias.dtype, tuning.tf32())
    key += (None if source is None else (source.stride(0), source.dtype),)
    plan = _plans.get(key)
    entries = (values.data_ptr(), indices.data_ptr(), offsets.data_ptr())
    operands = (weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr())
    address = 0 if source is None else source.data_ptr()
    united = entries[0] | entries[1] | entries[2] | operands[0] | (operands[1] or 0) | address
    if plan is not None and launch.ready(index, united):
        gather, over, (partial, arrived) = plan
        counters = None if arrived is None else arrived.data_ptr()
        gather(stream, *entries, *operands, counters)
        if over is not None:
            over(stream, address, *operands, None if partial is None else partial.data_ptr(), counters, entries[2])
        return out
    plan = _launch_matmul(values, indices, offsets, source, weight, bias, out)
    if plan is not None and launch.may_keep(weight.device):
        launch.keep(_plans, key, plan)
    return out


_Plan = tuple[launch.Bound, launch.Bound | None, overflow.Workspace]
_plans: dict[tuple[object, ...], _Plan] = {}


def _launch_matmul(
    values: Tensor,
    indices: Tensor,
    offsets: Tensor,
    source: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> _Plan | None:
    """Launches, and returns what repeats it: the gather, the dense tiles and their workspace."""
    is_csr = values.dim() == 1
    (m, d), n, capacity = out.shape, weight.shape[0], values.shape[-1]
    if m == 0 or d == 0 or n == 0:
        out.copy_(out.new_zeros(d) if bias is None else bias)
        return None
    tile, warps = tuning.gather_tile(m, d, weight.element_size())
    # Half-precision results round far above what a running float32 sum loses.
    run = 64 * tile["BLOCK_E"] if out.dtype is torch.float32 else 0
    meta = {**tile, "RUN": run, "IS_CSR": is_csr}
    meta["LEADS"] = source is not None and tuning.dependent_launch(weight.device)
    key = (m, n, d, capacity, values.dtype, weight.dtype, weight.stride(0), out.dtype, bias is None or bias.dtype)
    key += (is_csr, source is None)
    space = (None, None) if source is None else overflow.workspace(m, n, weight)
    tiles = 0 if space[1] is None else space[1].shape[0]
    args = (values, indices, offsets, weight, bias, out, space[1], weight.stride(0), n, d, capacity, tiles)
    gather = _matmul_fwd(key, (m, launch.cdiv(d, meta["BLOCK_D"]), 1), args, meta, num_warps=warps, head=7)
    if source is None:
        return None if gather is None else (gather, None, space)
    over = overflow.forward(source, weight, bias, out, offsets[is_csr:], capacity, space)
    return None if gather is None or over is None else (gather, over, space)


def matmul_bwd_weight(
    grad: Tensor,
    indices: Tensor,
    keys: Tensor,
    columns: Tensor,
    col_offsets: Tensor,
    values: Tensor,
    offsets: Tensor,
    source: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The weight gradient [N, D] from transposed entries (see `transpose`)."""
    is_csr = values.dim() == 1
    n, d = col_offsets.shape[0] - 1, grad.shape[1]
    grad, values = grad.contiguous(), values.contiguous()
    out = torch.empty(n, d, dtype=dtype, device=grad.device)
    if n == 0 or d == 0:
        return out
    upcast = launch.INTERPRET or grad.dtype is torch.float32
    tile, warps = tuning.weight_tile(n, d, grad.element_size())
    wide, wide_warps = tuning.weight_long_tile(tile)
    run = max(64, wide["BLOCK_E"]) if out.dtype is torch.float32 else 0
    rest = {"IS_CSR": is_csr, "PRECISION": "ieee", "UPCAST": upcast}
    blocks, slices = launch.cdiv(n, tile["BLOCK_N"]), launch.cdiv(d, tile["BLOCK_D"])
    long = min(blocks, keys.numel() // LONG)
    # How many blocks are long, and from an aligned address on which.
    noted = torch.zeros(4 + long, dtype=torch.int32, device=grad.device)
    key = (n, d, values.shape[-1], values.dtype, grad.dtype, dtype, is_csr)
    args = (keys, columns, col_offsets, values, offsets, grad, out, noted[4:], noted, values.shape[-1], n, d)
    meta = {**tile, "RUN": run, "LONG": LONG, **rest}
    # One stage: the loads are already ordered by hand.
    _matmul_bwd_weight(key, (blocks, slices, 1), args, meta, num_warps=warps, num_stages=1)
    if long:
        grid = (min(long, tuning.programs(grad.device)), slices, 1)
        meta = {**wide, "RUN": run, **rest}
        _matmul_bwd_weight_long(key, grid, args, meta, num_warps=wide_warps, num_stages=1)
    if source is not None:
        overflow.backward_weight(source, grad, out, offsets[is_csr:], values.shape[-1])
    return out


_BWD_WEIGHT = {
    "keys_ptr": "*i64", "columns_ptr": "*i32", "offsets_ptr": "*i64", "values_ptr": "*bf16", "starts_ptr": "*i32",
    "grad_ptr": "*bf16", "out_ptr": "*bf16", "long_ptr": "*i32", "found_ptr": "*i32", "capacity": "i32", "N": "i32",
    "D": "i32",
}  # fmt: skip
_REST = {"IS_CSR": False, "PRECISION": "ieee", "UPCAST": False}
EXAMPLES = {
    _matmul_fwd_kernel: {
        "signature": {
            "values_ptr": "*fp32", "indices_ptr": "*i32", "offsets_ptr": "*i32", "w_ptr": "*fp32", "bias_ptr": "*fp32",
            "out_ptr": "*fp32", "arrived_ptr": "*i32", "stride_wn": "i32", "N": "i32", "D": "i32", "capacity": "i32",
            "tiles": "i32",
        },
        "constexprs": {"BLOCK_E": 4, "BLOCK_D": 128, "RUN": 64, "IS_CSR": False, "LEADS": False},
        "num_warps": 1,
    },
    _matmul_bwd_weight_kernel: {
        "signature": _BWD_WEIGHT,
        "constexprs": {"BLOCK_N": 16, "BLOCK_E": 16, "BLOCK_D": 128, "RUN": 0, "LONG": 1024, **_REST},
        "num_warps": 2,
        "num_stages": 1,
    },
    _matmul_bwd_weight_long_kernel: {
        "signature": _BWD_WEIGHT,
        "constexprs": {"BLOCK_N": 16, "BLOCK_E": 128, "BLOCK_D": 128, "RUN": 0, **_REST},
        "num_warps": 8,
        "num_stages": 1,
    },
}  # fmt: skip
"""Example signatures for the ahead-of-time compile test."""

"""A sparse feed-forward block of up to 16 rows: a step of decoding, whose time goes into waiting for weights.

`hidden` reads the gate's weight once. Its programs, one for a few columns each, are all at work at once, and each has
all or most of its weights on their way before it uses the first. A program that has its columns' activations knows
which of them any row has, reads the rows of up of these alone, and lists them: column numbers and products, in slots of
its own, from the first on, the others marked empty. With several rows the listed rows of up are multiplied SLOTS at a
time, as many as there are, and not masked among all of the program's columns: that is a second pass of the same length,
and few of its lines would be read.

`down` has a program for each slice of a few columns of the result, which reads the lists and the slice of each listed
row of down: many rows at once, of short pieces, because a program that owns its slice shares no sum with another, and
nothing has to be added up in the end. Empty slots are masked and read nothing. Of each list SLOTS are looked at before
any more, so that threads side by side have columns that are near to one another: where down's weight lies by rows they
share what is read.

On Hopper each of the two is launched while the kernel before it runs, and waits for its end before it reads anything
that may be written until then: for `down` that is not its bias, because `hidden` is past its own wait.

A single row is multiplied without tensor cores, and so is float32 that may not be rounded to TF32: there, weights stay
in the registers that they were loaded to, for all rows. docs/design/ffn.md has attempts that lost.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton.overflow import dot

ROWS = 16
"""The fewest rows of a tensor core's product, and the most that come here."""
SLOTS = tl.constexpr(16)
"""Rows of up that are multiplied together: the fewest of a tensor core's product. As many slots of a list are looked
at together by `down`."""
PIECES = tl.constexpr(4)
"""Parts of K that such a product is cut into, one for each warp."""
UPCAST = tl.constexpr(launch.INTERPRET)


@triton.jit
def columns_product(
    w_rows, x_ptr, stride_xm, held, M, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Weight rows that are held, [BLOCK_N, 1] pointers, times the rows of x: float32 [BLOCK_N, ROWS]. PRECISION: of
    tensor cores, or "none" without them."""
    m = tl.arange(0, ROWS)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        w = tl.load(w_rows + k[None, :], mask=held[:, None] & (k < K)[None, :], other=0.0)
        if PRECISION != "none":
            x_rows = x_ptr + m[None, :] * stride_xm
            x = tl.load(x_rows + k[:, None], mask=(m < M)[None, :] & (k < K)[:, None], other=0.0)
            acc = dot(w, x, acc, PRECISION, UPCAST)
        elif ROWS == 1:
            x = tl.load(x_ptr + k, mask=k < K, other=0.0)
            acc += tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)[:, None]
        else:
            # Not unrolled: of several rows of x on their way at once the weights would be spilled.
            for row in range(0, M):
                x = tl.load(x_ptr + row * stride_xm + k, mask=k < K, other=0.0)
                product = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
                acc += tl.where(m[None, :] == row, product[:, None], 0.0)
    return acc


@triton.jit
def pieces_product(
    w_rows, x_ptr, stride_xm, held, M, K, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """The same of [1, SLOTS, 1] pointers: float32 [SLOTS, ROWS]. Each warp has a part of K, for so few rows are one
    tile of a tensor core's product: a single sum over 2,048 columns of x is 128 steps, one after the other."""
    m = tl.arange(0, ROWS)
    acc = tl.zeros([PIECES, SLOTS, ROWS], tl.float32)
    piece: tl.constexpr = BLOCK_K // PIECES
    part = tl.arange(0, PIECES)[:, None, None] * piece
    for first in range(0, K, BLOCK_K):
        k = first + part + tl.arange(0, piece)[None, None, :]
        w = tl.load(w_rows + k, mask=held[None, :, None] & (k < K), other=0.0)
        k = first + part + tl.arange(0, piece)[None, :, None]
        x_rows = x_ptr + m[None, None, :] * stride_xm
        x = tl.load(x_rows + k, mask=(m < M)[None, None, :] & (k < K), other=0.0)
        acc = dot(w, x, acc, PRECISION, UPCAST)
    return tl.sum(acc, axis=0)


@triton.jit
def place_of(slot, program, programs, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    """Where a slot of a program's list is: with tensor cores lists lie one after the other. Without, slots of one
    number stand side by side: of many short lists most have none or one."""
    return slot * programs + program if PRECISION == "none" else program * BLOCK_N + slot


@launch.kernel(do_not_specialize=["M", "N"])
def _few_hidden_kernel(
    x_ptr, gate_ptr, gate_bias_ptr, threshold_ptr, up_ptr, up_bias_ptr, columns_ptr, values_ptr, entries_ptr,
    stride_xm, stride_gn, stride_un, M, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_U: tl.constexpr, ROWS: tl.constexpr,
    SQUARED: tl.constexpr, DEPENDENT: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_N columns): lists those that any row has. columns_ptr: lists of BLOCK_N slots, and how many of
    each are taken; values_ptr: ROWS of each slot; entries_ptr: how many each row has, [programs, ROWS]. BLOCK_U columns
    of x at a time are multiplied by up."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    # The compiler believes in multiples of 16 alone, unless it sees why: rows that begin on 8 are read as fast.
    stride_xm, stride_gn, stride_un = stride_xm // UNIT * UNIT, stride_gn // UNIT * UNIT, stride_un // UNIT * UNIT
    K = K // UNIT * UNIT
    program, programs = tl.program_id(0), tl.num_programs(0)
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    m = tl.arange(0, ROWS)
    gate_rows = gate_ptr + n.to(tl.int64)[:, None] * stride_gn
    acc = columns_product(gate_rows, x_ptr, stride_xm, inside, M, K, BLOCK_N, BLOCK_K, ROWS, PRECISION)
    if gate_bias_ptr is not None:
        acc += tl.load(gate_bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    # An entry is kept or not as it is where entries are packed: after it was rounded.
    z = acc.to(gate_ptr.dtype.element_ty).to(tl.float32)
    bound = tl.zeros([BLOCK_N], tl.float32)
    if threshold_ptr is not None:
        bound = tl.load(threshold_ptr + n, mask=inside, other=0.0).to(tl.float32)
        bound = tl.where(bound < 0, 0.0, bound)
    kept = ~(z <= bound[:, None]) & inside[:, None] & (m < M)[None, :]
    if entries_ptr is not None:
        tl.store(entries_ptr + program * ROWS + m, tl.sum(kept.to(tl.int32), axis=0))
    active = tl.max(kept.to(tl.int32), axis=1)
    count = tl.sum(active, axis=0)
    tl.store(columns_ptr + programs * BLOCK_N + program, count)
    slot = tl.arange(0, BLOCK_N)
    empty = columns_ptr + place_of(slot, program, programs, BLOCK_N, PRECISION)
    tl.store(empty, tl.full([BLOCK_N], -1, tl.int32), mask=slot >= count)
    held = active > 0
    order = tl.cumsum(active, axis=0) - active
    place = place_of(order, program, programs, BLOCK_N, PRECISION)
    tl.store(columns_ptr + place, n, mask=held)
    if count > 0:
        z = tl.where(kept, z, 0.0)
        if PRECISION != "none" and up_ptr is not None:
            # Before it is squared: a rounded number is not rounded again.
            tl.store(values_ptr + place[:, None] * ROWS + m[None, :], z, mask=held[:, None])
            tl.debug_barrier()
            for first in range(0, count, SLOTS):
                listed = first + tl.arange(0, SLOTS)
                there = listed < count
                # Out of registers: the weights are asked for before what was written can be read.
                same = held[None, :] & (order[None, :] == listed[:, None])
                column = tl.sum(tl.where(same, n[None, :], 0), axis=1)
                at = place_of(listed, program, programs, BLOCK_N, PRECISION)
                values = values_ptr + at[:, None] * ROWS + m[None, :]
                factor = tl.load(values, mask=there[:, None], other=0.0).to(tl.float32)
                up_rows = up_ptr + column.to(tl.int64)[None, :, None] * stride_un
                up = pieces_product(up_rows, x_ptr, stride_xm, there, M, K, BLOCK_U, ROWS, PRECISION)
                if up_bias_ptr is not None:
                    up += tl.load(up_bias_ptr + column, mask=there, other=0.0).to(tl.float32)[:, None]
                # A row without the entry takes nothing from it, not even a NaN.
                up = tl.where(factor == 0, 0.0, up)
                tl.store(values, factor * factor * up if SQUARED else factor * up, mask=there[:, None])
        else:
            if SQUARED:
                z *= z
            if up_ptr is not None:
                up_rows = up_ptr + n.to(tl.int64)[:, None] * stride_un
                up = columns_product(up_rows, x_ptr, stride_xm, held, M, K, BLOCK_N, BLOCK_U, ROWS, PRECISION)
                if up_bias_ptr is not None:
                    up += tl.load(up_bias_ptr + n, mask=held, other=0.0).to(tl.float32)[:, None]
                z = tl.where(kept, z * up, 0.0)
            tl.store(values_ptr + place[:, None] * ROWS + m[None, :], z, mask=held[:, None])


@triton.jit
def listed_slots(
    columns_ptr, step, programs, BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr, TAKEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(places, columns) of a step's slots, in the order in which they stand. Where lists do one after the other, TAKEN
    of each of some of them, then of those after these, and when all have been looked at, of their further slots. A slot
    that is empty, or beyond, has column -1."""
    i = tl.arange(0, BLOCK_U)
    if PRECISION == "none":
        at = step * BLOCK_U + i
        inside = at < programs * BLOCK_N
    else:
        steps = tl.cdiv(programs, BLOCK_U // TAKEN)
        program = step % steps * (BLOCK_U // TAKEN) + i // TAKEN
        slot = step // steps * TAKEN + i % TAKEN
        at = place_of(slot, program, programs, BLOCK_N, PRECISION)
        inside = (program < programs) & (slot < BLOCK_N)
    return at, tl.load(columns_ptr + at, mask=inside, other=-1)


@triton.jit
def listed_rows(column, down_ptr, stride_dn, stride_dd, d, D, BY_ROWS: tl.constexpr):
    """Slices of listed rows of down, [slots, columns of the result]."""
    held, inside = column >= 0, d < D
    n, d = column.to(tl.int64), d.to(tl.int64)
    if BY_ROWS:
        # Threads side by side have slots side by side, whose columns are near to one another.
        at = d[:, None] * stride_dd + n[None, :] * stride_dn
        return tl.trans(tl.load(down_ptr + at, mask=inside[:, None] & held[None, :], other=0.0))
    at = n[:, None] * stride_dn + d[None, :] * stride_dd
    return tl.load(down_ptr + at, mask=held[:, None] & inside[None, :], other=0.0)


@triton.jit
def add_listed(
    acc, down, column, at, values_ptr, M, BLOCK_U: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + values of listed columns times their slices of down, as PARTS products side by side."""
    held = column >= 0
    m = tl.arange(0, ROWS)
    if PRECISION != "none":
        value = tl.load(values_ptr + at[None, :] * ROWS + m[:, None], mask=held[None, :], other=0.0)
        a = tl.permute(tl.reshape(value, [ROWS, PARTS, BLOCK_U // PARTS]), [1, 0, 2])
        b = tl.reshape(down, [PARTS, BLOCK_U // PARTS, BLOCK_D])
        acc = dot(a, b, acc, PRECISION, UPCAST)
    else:
        for row in range(0, M):
            value = tl.load(values_ptr + at * ROWS + row, mask=held, other=0.0)
            total = tl.sum(value[:, None] * down.to(tl.float32), axis=0)
            acc += tl.where(m[:, None] == row, total[None, :], 0.0)[None, :, :]
    return acc


@launch.kernel(do_not_specialize=["programs", "M"])
def _few_down_kernel(
    columns_ptr, values_ptr, entries_ptr, down_ptr, bias_ptr, out_ptr, nnz_ptr, programs, stride_dn,
    stride_dd, M, D,
    BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_D: tl.constexpr, TAKEN: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, DEPENDENT: tl.constexpr, BY_ROWS: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_D columns of the result): the listed rows of down times their values, BLOCK_U slots at a time.
    programs: lists, of BLOCK_N slots each, TAKEN of which are looked at together."""
    D = D // UNIT * UNIT
    if not BY_ROWS:
        stride_dn = stride_dn // UNIT * UNIT
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    m = tl.arange(0, ROWS)
    inside = d < D
    if DEPENDENT:
        gdc_launch_dependents()
    bias = tl.zeros([BLOCK_D], tl.float32)
    if bias_ptr is not None:
        # The kernel that wrote it has ended, for `hidden` is past its own wait.
        bias = tl.load(bias_ptr + d, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    # Of lists that may turn out to be empty, so that nothing waits for the counts.
    at, column = listed_slots(columns_ptr, 0, programs, BLOCK_N, BLOCK_U, TAKEN, PRECISION)
    fullest = 0
    for first in range(0, programs, 1024):
        p = first + tl.arange(0, 1024)
        count = tl.load(columns_ptr + programs * BLOCK_N + p, mask=p < programs, other=0)
        fullest = tl.maximum(fullest, tl.max(count, axis=0))
    acc = tl.zeros([PARTS, ROWS, BLOCK_D], tl.float32)
    if PRECISION == "none":
        steps = tl.cdiv(fullest * programs, BLOCK_U)
    else:
        steps = tl.cdiv(fullest, TAKEN) * tl.cdiv(programs, BLOCK_U // TAKEN)
    for step in range(0, steps):
        down = listed_rows(column, down_ptr, stride_dn, stride_dd, d, D, BY_ROWS)
        acc = add_listed(acc, down, column, at, values_ptr, M, BLOCK_U, BLOCK_D, ROWS, PARTS, PRECISION)
        at, column = listed_slots(columns_ptr, step + 1, programs, BLOCK_N, BLOCK_U, TAKEN, PRECISION)
    out = tl.sum(acc, axis=0) + bias[None, :]
    tl.store(out_ptr + m.to(tl.int64)[:, None] * D + d[None, :], out, mask=(m < M)[:, None] & inside[None, :])
    if nnz_ptr is not None:
        if tl.program_id(0) == 0:
            total = tl.zeros([ROWS], tl.int32)
            for first in range(0, programs, 64):
                p = first + tl.arange(0, 64)
                counted = tl.load(entries_ptr + p[:, None] * ROWS + m[None, :], mask=(p < programs)[:, None], other=0)
                total += tl.sum(counted, axis=0)
            tl.store(nnz_ptr + m, total, mask=m < M)


@dataclass(frozen=True)
class Tile:
    """Of a program of `hidden`: columns of the gate, and columns of x at a time for gate and for up; its warps, stages
    and registers. Of a program of `down`: slots at a time, columns of the result, products side by side; its warps and
    registers; slots of a list that it looks at together."""

    hidden: tuple[int, int, int]
    hidden_launch: tuple[int, int, int | None]
    down: tuple[int, int, int]
    down_launch: tuple[int, int | None]
    taken: int = 1


ONE = Tile((8, 2048, 2048), (4, 1, 80), (1024, 16, 1), (8, None))
SOME = Tile((4, 2048, 2048), (8, 1, 80), (2048, 16, 1), (8, None))
MANY = Tile((32, 256, 256), (4, 3, None), (1024, 16, 8), (8, None), 8)
HOPPER = Tile((64, 256, 512), (4, 4, None), (1024, 16, 8), (8, None), 8)
HOPPER_MANY = replace(HOPPER, down=(2048, 16, 8), taken=16)
"""Of a single row, of several of float32, and of up to ROWS with tensor cores; on Hopper of up to half as many, and of
more. 64 columns are what Hopper's product takes out of shared memory, and read x half as often as 32."""
WIDE = replace(HOPPER, hidden=(128, 256, 512), hidden_launch=(8, 3, None))
WIDE_MANY = replace(WIDE, down=HOPPER_MANY.down, taken=HOPPER_MANY.taken)
WIDE_COLUMNS = replace(WIDE_MANY, down=(2048, 32, 8))
"""Tiles of 128 columns, for blocks with so many columns that their programs take three quarters of the GPU or more, in
one turn or several; the last with W_down by columns."""


def _with_tensor_cores(x: Tensor, n: int, by_rows: bool) -> Tile:
    if not tuning.hopper(x.device):
        return MANY
    wide, many = 4 * n >= 3 * 128 * tuning.programs(x.device), x.shape[0] > ROWS // 2
    if not wide:
        return HOPPER_MANY if many else HOPPER
    return WIDE if not many else WIDE_MANY if by_rows else WIDE_COLUMNS


def unit_of(*sizes: int) -> int:
    """Elements that all sizes are multiples of: 8, which is as many as a load takes of 16 bits each, or 1."""
    return 1 if any(size % 8 for size in sizes) else 8


def project(
    operands: tuple[Tensor | None, ...], out: Tensor, nnz: Tensor | None, squared: bool, tile: Tile | None = None
) -> None:
    """Writes out [M, D], and how many entries each row has [M] where `nnz` is not None. Operands as of the operator, x
    and the weights of gate and up with contiguous rows."""
    x, gate, gate_bias, threshold, up, up_bias, down, down_bias = operands
    assert x is not None and gate is not None and down is not None
    (m, k), n, d = x.shape, gate.shape[0], out.shape[1]
    wide, precision = x.element_size() > 2, tuning.dot_precision(x, k)["PRECISION"]
    dots = m > 1 and not (wide and precision == "ieee")
    rows = ROWS if dots else launch.next_power_of_2(m)
    stride_dd, stride_dn = down.stride()
    by_rows = stride_dd > 1
    tile = tile or (_with_tensor_cores(x, n, by_rows) if dots else ONE if m == 1 else SOME)
    block_n, block_k, block_u = tile.hidden
    block_k, block_u = (min(b // 2 if wide else b, launch.next_power_of_2(max(k, 64))) for b in (block_k, block_u))
    # Of a narrow block as many programs as the GPU has room for, with fewer columns each.
    least = ROWS if dots else 2
    while block_n > least and launch.cdiv(n, block_n) < tuning.programs(x.device) // 2:
        block_n //= 2
    programs = launch.cdiv(n, block_n)
    columns = torch.empty((block_n + 1) * programs, dtype=torch.int32, device=x.device)
    values = torch.empty(block_n * programs, rows, dtype=x.dtype if dots else torch.float32, device=x.device)
    entries = None if nnz is None else columns.new_empty(programs, rows)
    follows = tuning.dependent_launch(x.device)
    lists = (columns, values, entries)
    meta = {"BLOCK_N": block_n, "BLOCK_K": block_k, "BLOCK_U": block_u, "ROWS": rows, "SQUARED": squared}
    strides = (x.stride(0), gate.stride(0), 0 if up is None else up.stride(0))
    meta |= {"DEPENDENT": follows, "PRECISION": precision if dots else "none", "UNIT": unit_of(k, *strides)}
    heads: tuple[Any, ...] = (x, gate, gate_bias, threshold, up, up_bias, *lists)
    warps, stages, registers = tile.hidden_launch
    grid = (programs, 1, 1)
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages, "maxnreg": registers, "launch_pdl": follows}
    _few_hidden_kernel(grid, (*heads, *strides, m, n, k), meta, **options)
    slots, block_d, parts = tile.down
    meta = {"BLOCK_N": block_n, "BLOCK_U": slots // 2 if wide else slots, "BLOCK_D": block_d}
    meta |= {"TAKEN": min(tile.taken, block_n), "ROWS": rows}
    meta |= {"PARTS": parts, "DEPENDENT": follows, "BY_ROWS": by_rows}
    meta |= {"PRECISION": tuning.dot_precision(x, n)["PRECISION"] if dots else "none"}
    meta |= {"UNIT": unit_of(d, 0 if by_rows else stride_dn)}
    heads = (*lists, down, down_bias, out, nnz)
    grid = (launch.cdiv(d, block_d), 1, 1)
    warps, registers = tile.down_launch
    options = {"num_warps": warps, "num_stages": 1, "maxnreg": registers, "launch_pdl": follows}
    _few_down_kernel(grid, (*heads, programs, stride_dn, stride_dd, m, d), meta, **options)


EXAMPLES = {
    _few_hidden_kernel: {
        "gate_bias_ptr": "*bf16", "up_bias_ptr": "*bf16", "BLOCK_N": 32, "BLOCK_K": 256, "BLOCK_U": 256, "ROWS": ROWS,
        "SQUARED": False, "DEPENDENT": False, "PRECISION": "ieee", "UNIT": 8, "num_stages": 3,
    },
    _few_down_kernel: {
        "bias_ptr": "*bf16", "stride_dd": 1, "BLOCK_N": 32, "BLOCK_U": 1024, "BLOCK_D": 16, "TAKEN": 8, "ROWS": ROWS,
        "PARTS": 8, "DEPENDENT": False, "BY_ROWS": False, "PRECISION": "ieee", "UNIT": 8, "num_warps": 8,
        "num_stages": 1,
    },
}  # fmt: skip

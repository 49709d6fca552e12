"""A sparse feed-forward block of up to 16 rows: a step of decoding, whose time goes into reading weights.

`hidden` reads the gate's weight once, in as many programs as fill the GPU. A program that has its columns' activations
knows which of them any row has, and multiplies x by the rows of up of these alone: the others are masked, and masked
rows are not read. `down` reads, for its share of the columns, the rows of down of those that are not 0 in any row, all
at once, for there is no second wave to hide a wait behind. Its programs share the sum over columns; the last one to
finish a slice of the result adds up the float32 sums in fixed order. What lies between the two is small beside a
weight, and dense.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton.overflow import dot

ROWS = 16
"""The fewest rows of a tensor core's product."""


@triton.jit
def columns_product(
    w_rows, x_ptr, stride_xm, held, exists, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Weight rows that are held, [BLOCK_N, 1] pointers, times rows of x that exist: float32 [BLOCK_N, ROWS]."""
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    x_rows = x_ptr + tl.arange(0, ROWS)[None, :] * stride_xm
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        w = tl.load(w_rows + k[None, :], mask=held[:, None] & (k < K)[None, :], other=0.0)
        x = tl.load(x_rows + k[:, None], mask=exists[None, :] & (k < K)[:, None], other=0.0)
        acc = dot(w, x, acc, PRECISION, UPCAST)
    return acc


@triton.jit
def _few_hidden_kernel(
    x_ptr, gate_ptr, gate_bias_ptr, threshold_ptr, up_ptr, up_bias_ptr, hidden_ptr, counts_ptr,
    stride_xm, stride_gn, stride_un, M, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, SQUARED: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_N columns): what is multiplied by down, and how many entries each row has there."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    m = tl.arange(0, ROWS)
    exists = m < M
    gate_rows = gate_ptr + n.to(tl.int64)[:, None] * stride_gn
    acc = columns_product(gate_rows, x_ptr, stride_xm, inside, exists, K, BLOCK_N, BLOCK_K, ROWS, PRECISION, UPCAST)
    if gate_bias_ptr is not None:
        acc += tl.load(gate_bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    z = acc.to(hidden_ptr.dtype.element_ty).to(tl.float32)
    bound = tl.zeros([BLOCK_N], tl.float32)
    if threshold_ptr is not None:
        bound = tl.load(threshold_ptr + n, mask=inside, other=0.0).to(tl.float32)
        bound = tl.where(bound < 0, 0.0, bound)
    kept = ~(z <= bound[:, None]) & inside[:, None] & exists[None, :]
    tl.store(counts_ptr + tl.program_id(0) * ROWS + m, tl.sum(kept.to(tl.int32), axis=0))
    z = tl.where(kept, z, 0.0)
    if SQUARED:
        z *= z
    if up_ptr is not None:
        active = tl.max(kept.to(tl.int32), axis=1) > 0
        if tl.max(active.to(tl.int32), axis=0) > 0:
            up_rows = up_ptr + n.to(tl.int64)[:, None] * stride_un
            up = columns_product(
                up_rows, x_ptr, stride_xm, active, exists, K, BLOCK_N, BLOCK_K, ROWS, PRECISION, UPCAST
            )
            if up_bias_ptr is not None:
                up += tl.load(up_bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[:, None]
            z = tl.where(kept, z * up, 0.0)
    tl.store(hidden_ptr + m.to(tl.int64)[None, :] * N + n[:, None], z, mask=inside[:, None] & exists[None, :])


@triton.jit
def _few_down_kernel(
    hidden_ptr, counts_ptr, down_ptr, bias_ptr, out_ptr, nnz_ptr, partial_ptr, arrived_ptr, blocks,
    stride_dn, stride_dd, M, N, D,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (slice of the result's columns, share of what they are sums over)."""
    slice, split = tl.program_id(0), tl.program_id(1)
    m = tl.arange(0, ROWS)
    d = slice * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = d < D
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in range(split * BLOCK_N, N, SPLITS * BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        mask = (m < M)[:, None] & (n < N)[None, :]
        hidden = tl.load(hidden_ptr + m.to(tl.int64)[:, None] * N + n[None, :], mask=mask, other=0.0)
        active = tl.max((hidden != 0).to(tl.int32), axis=0) > 0
        at = n.to(tl.int64)[:, None] * stride_dn + d.to(tl.int64)[None, :] * stride_dd
        down = tl.load(down_ptr + at, mask=active[:, None] & inside[None, :], other=0.0)
        acc = dot(hidden, down, acc, PRECISION, UPCAST)
    part = m[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    partial_ptr += slice.to(tl.int64) * SPLITS * ROWS * BLOCK_D
    tl.store(partial_ptr + split * ROWS * BLOCK_D + part, acc, mask=(m < M)[:, None])
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + slice, 1, sem="acq_rel") == SPLITS - 1:
        tl.debug_barrier()
        tl.store(arrived_ptr + slice, 0)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for s in range(SPLITS):
            of_split = partial_ptr + s * ROWS * BLOCK_D + part
            acc += tl.load(of_split, mask=(m < M)[:, None], other=0.0, cache_modifier=".cg")
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + m.to(tl.int64)[:, None] * D + d[None, :], acc, mask=(m < M)[:, None] & inside[None, :])
        if slice == 0:
            total = tl.zeros([ROWS], tl.int32)
            for first in range(0, blocks, BLOCK_B):
                b = first + tl.arange(0, BLOCK_B)
                total += tl.sum(
                    tl.load(counts_ptr + b[:, None] * ROWS + m[None, :], mask=(b < blocks)[:, None], other=0), 0
                )
            tl.store(nnz_ptr + m, total, mask=m < M)


_few_hidden = launch.Kernel(_few_hidden_kernel)
_few_down = launch.Kernel(_few_down_kernel)


@dataclass(frozen=True)
class Tile:
    """columns of the gate by columns of x, of a program of `hidden`; columns summed over by columns of the result, of a
    program of `down`."""

    hidden: tuple[int, int] = (32, 256)
    hidden_launch: tuple[int, int] = (4, 3)
    down: tuple[int, int] = (512, 64)
    down_warps: int = 8
    splits: int = 16


TILE = Tile()


def project(
    x: Tensor,
    gate: tuple[Tensor, Tensor | None, Tensor | None],
    up: tuple[Tensor, Tensor | None] | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    out: Tensor,
    nnz: Tensor,
    squared: bool,
    tile: Tile = TILE,
) -> None:
    """Writes out and how many entries each row has. gate: weight [N, K], bias, threshold; down_weight: [D, N], any
    strides."""
    (m, k), n, d = x.shape, gate[0].shape[0], out.shape[1]
    up_weight, up_bias = up or (None, None)
    (block_n, block_k), (warps, stages) = tile.hidden, tile.hidden_launch
    if x.element_size() > 2:
        block_k //= 2
    blocks = launch.cdiv(n, block_n)
    hidden = x.new_empty(m, n)
    counts = torch.empty(blocks, ROWS, dtype=torch.int32, device=x.device)
    inner, block_d = tile.down
    if x.element_size() > 2:
        inner //= 2
    slices, splits = launch.cdiv(d, block_d), min(tile.splits, launch.cdiv(n, inner))
    arrived = launch.counters.get(slices, x.device)
    partial = launch.scratch.get(slices * splits * ROWS * block_d, x.device)
    meta = {"BLOCK_N": block_n, "BLOCK_K": block_k, "ROWS": ROWS, "SQUARED": squared, **tuning.dot_precision(x, k)}
    strides = (x.stride(0), gate[0].stride(0), 0 if up_weight is None else up_weight.stride(0))
    args = (x, *gate, up_weight, up_bias, hidden, counts, *strides, m, n, k)
    _few_hidden((blocks, 1, 1), args, meta, num_warps=warps, num_stages=stages)
    meta = {"BLOCK_N": inner, "BLOCK_D": block_d, "BLOCK_B": 64, "ROWS": ROWS, "SPLITS": splits}
    meta |= tuning.dot_precision(x, n)
    stride_dd, stride_dn = down_weight.stride()
    args = (hidden, counts, down_weight, down_bias, out, nnz, partial, arrived, blocks, stride_dn, stride_dd, m, n, d)
    _few_down((slices, splits, 1), args, meta, num_warps=tile.down_warps, num_stages=1)


_COMMON = {"ROWS": ROWS, "PRECISION": "ieee", "UPCAST": False}
EXAMPLES = {
    _few_hidden_kernel: {
        "signature": {
            "x_ptr": "*bf16", "gate_ptr": "*bf16", "gate_bias_ptr": "*bf16", "threshold_ptr": "*fp32",
            "up_ptr": "*bf16", "up_bias_ptr": "*bf16", "hidden_ptr": "*bf16", "counts_ptr": "*i32",
            **dict.fromkeys(("stride_xm", "stride_gn", "stride_un", "M", "N", "K"), "i32"),
        },
        "constexprs": {"BLOCK_N": 32, "BLOCK_K": 256, "SQUARED": False, **_COMMON},
        "num_warps": 4,
        "num_stages": 3,
    },
    _few_down_kernel: {
        "signature": {
            "hidden_ptr": "*bf16", "counts_ptr": "*i32", "down_ptr": "*bf16", "bias_ptr": "*bf16", "out_ptr": "*bf16",
            "nnz_ptr": "*i32", "partial_ptr": "*fp32", "arrived_ptr": "*i32", "blocks": "i32", "stride_dn": "i32",
            "stride_dd": "constexpr", **dict.fromkeys(("M", "N", "D"), "i32"),
        },
        "constexprs": {"BLOCK_N": 512, "BLOCK_D": 64, "BLOCK_B": 64, "SPLITS": 11, "stride_dd": 1, **_COMMON},
        "num_warps": 8,
        "num_stages": 1,
    },
}  # fmt: skip
"""Example signatures for the ahead-of-time compile test."""

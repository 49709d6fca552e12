"""Block-sparse attention, forward, through pointers: every dtype, GPU, head and block size, with a mask or a bias.

A program owns BLOCK_M queries of one head and walks the keys of the blocks that their block row lists, laid end to end,
BLOCK_N a step: small blocks share a step, large ones take several. A step gathers its keys and values by row, scores
them, and folds them into a running softmax in base 2. A bias (added; or boolean, True takes part) is read tile by tile,
from a dense tensor that may be broadcast, or from blocks in the order of the lists.

Few queries that meet many keys are split: program (tile, part) takes every SPLITS-th step and leaves its weighted mean
and log-sum-exp in float32; `_attention_join_kernel` joins them in order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning

INV_LN2 = 1.4426950408889634


@triton.jit
def listed(blocks_ptr, base, begin, count, at, BLOCK: tl.constexpr):
    """(row in the matrix, entry of the list, whether there is one) of positions in listed blocks laid end to end."""
    exists = at < count * BLOCK
    entry = begin + at // BLOCK
    block = tl.load(blocks_ptr + entry, mask=exists, other=0) - base
    return block * BLOCK + at % BLOCK, entry, exists


@triton.jit
def span(offsets_ptr, row, last, capacity):
    """(first entry, number of entries, whether the lists are incomplete) of a row; no entries where they are."""
    begin = tl.load(offsets_ptr + row)
    lost = tl.load(offsets_ptr + last) > capacity
    return begin, tl.where(lost, 0, tl.load(offsets_ptr + row + 1) - begin), lost


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def scores(
    s, bias_ptr, stride_bq, query, key, entry, inside, shift,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Scores, in base 2, with their bias; -inf where query and key do not meet. Queries and keys lie along either
    axis."""
    if CAUSAL:
        inside = inside & (key <= query + shift)
    if BIAS != "none":
        if BIAS == "dense":
            at = query.to(tl.int64) * stride_bq + key
        else:
            at = entry.to(tl.int64) * (BLOCK_Q * BLOCK_K) + (query % BLOCK_Q * BLOCK_K + key % BLOCK_K)
        bias = tl.load(bias_ptr + at, mask=inside, other=0)
        if bias_ptr.dtype.element_ty == tl.int8:
            inside = inside & (bias != 0)
        else:
            s += bias.to(tl.float32) * 1.4426950408889634
    return tl.where(inside, s, float("-inf"))


@triton.jit
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, lse_ptr, offsets_ptr, columns_ptr, lengths_ptr,
    stride_zb, stride_zh, stride_bb, stride_bh, stride_bq, H, GROUP, rows, tiles, Tq, Tk, D, scale, last, capacity,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS % tiles
    pair = tl.program_id(0) // (SPLITS * tiles)
    batch = pair // H
    head = pair % H
    lines = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_D)
    exists = lines < Tq
    row = (batch * stride_zb + head * stride_zh) * rows + tile * BLOCK_M // BLOCK_Q
    begin, count, lost = span(offsets_ptr, row, last, capacity)
    limit = Tk
    if lengths_ptr is not None:
        limit = tl.minimum(tl.load(lengths_ptr + batch), Tk)
    keep = exists[:, None] & (inner < D)[None, :]
    q = tl.load(q_ptr + (pair.to(tl.int64) * Tq + lines[:, None]) * D + inner[None, :], mask=keep, other=0.0)
    keys = (batch * (H // GROUP) + head // GROUP).to(tl.int64) * Tk
    if BIAS == "dense":
        bias_ptr += batch.to(tl.int64) * stride_bb + head.to(tl.int64) * stride_bh
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(part * BLOCK_N, count * BLOCK_K, SPLITS * BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        key, entry, present = listed(columns_ptr, 0, begin, count, at, BLOCK_K)
        present = present & (key < limit)
        rows_at = (keys + key)[:, None] * D + inner[None, :]
        some = present[:, None] & (inner < D)[None, :]
        k = tl.load(k_ptr + rows_at, mask=some, other=0.0)
        s = scores(
            dot(q, tl.trans(k), PRECISION, UPCAST) * scale, bias_ptr, stride_bq, lines[:, None], key[None, :],
            entry[None, :], exists[:, None] & present[None, :], Tk - Tq, BLOCK_Q, BLOCK_K, CAUSAL, BIAS,
        )  # fmt: skip
        most = tl.maximum(m, tl.max(s, 1))
        base = tl.where(most == float("-inf"), 0.0, most)
        p = tl.exp2(s - base[:, None])
        factor = tl.exp2(m - base)
        total = total * factor + tl.sum(p, 1)
        m = most
        v = tl.load(v_ptr + rows_at, mask=some, other=0.0)
        acc = acc * factor[:, None] + dot(p.to(v.dtype), v, PRECISION, UPCAST)
    # A row without keys has zeros; one with NaN keeps it.
    total = tl.where(lost, float("nan"), total)
    out = acc * tl.where(total == 0, 0.0, 1.0 / total)[:, None]
    lse = tl.where(total == 0, float("-inf"), (m + tl.log2(total)) * 0.6931471805599453)
    line = (pair * SPLITS + part).to(tl.int64) * Tq + lines
    tl.store(out_ptr + line[:, None] * D + inner[None, :], out, mask=keep)
    tl.store(lse_ptr + line, lse, mask=exists)


@triton.jit
def _attention_join_kernel(
    partial_ptr, partial_lse_ptr, out_ptr, lse_ptr, Tq, D, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Program (query, head): the mean of its parts' results, weighted by what their weights sum to."""
    pair = tl.program_id(0) // Tq
    line = tl.program_id(0) % Tq
    parts = (pair.to(tl.int64) * SPLITS + tl.arange(0, SPLITS)) * Tq + line
    lse = tl.load(partial_lse_ptr + parts)
    most = tl.max(lse, 0)
    weights = tl.exp(lse - tl.where(most == float("-inf"), 0.0, most))
    total = tl.sum(weights, 0)
    inner = tl.arange(0, BLOCK_D)
    values = tl.load(partial_ptr + parts[:, None] * D + inner[None, :], mask=(inner < D)[None, :], other=0.0)
    out = tl.sum(values * weights[:, None], 0) * tl.where(total == 0, 0.0, 1.0 / total)
    at = pair.to(tl.int64) * Tq + line
    tl.store(out_ptr + at * D + inner, out, mask=inner < D)
    tl.store(lse_ptr + at, tl.where(total == 0, float("-inf"), most + tl.log(total)))


_attention_fwd = launch.Kernel(_attention_fwd_kernel)
_attention_join = launch.Kernel(_attention_join_kernel)


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a step, warps and stages."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def tile_of(d: int, size: int, block: tuple[int, int]) -> Tile:
    """Tile of the forward pass: what registers and the smallest shared memory, 64 KiB on gfx942, hold."""
    wide = launch.next_power_of_2(d) * size
    if wide <= 256:
        return Tile(min(64, block[0]), 64, 4, 2)
    return Tile(min(32 if wide > 512 else 64, block[0]), 32 if wide <= 512 else 16, 4, 1)


def splits_of(programs: int, steps: int, device: torch.device) -> int:
    """Into how many parts the keys of few queries are split: two programs an SM, of eight steps at least."""
    most = min(2 * tuning.programs(device) // max(programs, 1), steps // 8, 64)
    return 1 << max(most, 1).bit_length() - 1


@dataclass(frozen=True)
class Problem:
    """What the kernels of one attention are compiled and launched for."""

    b: int
    h: int
    key_heads: int
    tq: int
    tk: int
    d: int
    z: tuple[int, int]
    block: tuple[int, int]
    causal: bool
    scale: float

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.h // self.key_heads

    @property
    def rows(self) -> int:
        """Block rows of a head."""
        return launch.cdiv(self.tq, self.block[0])

    @property
    def columns(self) -> int:
        """Block columns of a head."""
        return launch.cdiv(self.tk, self.block[1])

    @property
    def matrices(self) -> int:
        """Matrices of the layout."""
        return 1 + (self.b - 1) * self.z[0] + (self.h - 1) * self.z[1]


def bias_of(bias: Tensor | None) -> tuple[Tensor | None, str, tuple[int, int, int]]:
    """(what the kernels read, its kind, its strides by batch, head and query) of a bias or boolean mask."""
    if bias is None:
        return None, "none", (0, 0, 0)
    bias = bias.view(torch.int8) if bias.dtype is torch.bool else bias
    if bias.dim() == 3:
        return bias.contiguous(), "blocks", (0, 0, 0)
    if bias.stride(-1) != 1:
        bias = bias.contiguous()
    b, h, q = (0 if n == 1 else s for n, s in zip(bias.shape[:3], bias.stride()[:3]))
    return bias, "dense", (b, h, q)


def launch_attention_fwd(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lengths: Tensor | None, offsets: Tensor,
    columns: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, log-sum-exp)."""
    p, size = problem, q.element_size()
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    tile = tile_of(p.d, size, p.block)
    tiles = p.rows * (p.block[0] // tile.block_m)
    splits = splits_of(tiles * p.b * p.h, p.columns * p.block[1] // tile.block_n, q.device)
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)
    if splits > 1:
        partial = q.new_empty((p.b * p.h * splits, p.tq, p.d), dtype=torch.float32)
        partial_lse = q.new_empty((p.b * p.h * splits, p.tq), dtype=torch.float32)
    bias, kind, strides = bias_of(bias)
    sizes = (*p.z, *strides, p.h, p.group, p.rows, tiles, p.tq, p.tk, p.d, p.scale * INV_LN2)
    sizes += (p.matrices * p.rows, columns.shape[0])
    wide = launch.next_power_of_2(max(p.d, 16))
    meta = {"BLOCK_Q": p.block[0], "BLOCK_K": p.block[1], "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    meta |= {"BLOCK_D": wide, "CAUSAL": p.causal, "BIAS": kind, "SPLITS": splits, **tuning.dot_precision(q, p.tk)}
    key = (p, strides, q.dtype, bias is None or bias.dtype, lengths is None, splits, columns.shape[0], *meta.values())
    into = (partial, partial_lse) if splits > 1 else (out, lse)
    args = (q, k, v, bias, *into, offsets, columns, lengths, *sizes)
    grid = (tiles * splits * p.b * p.h, 1, 1)
    _attention_fwd(key, grid, args, meta, num_warps=tile.warps, num_stages=tile.stages)
    if splits > 1:
        meta = {"SPLITS": splits, "BLOCK_D": wide}
        args = (partial, partial_lse, out, lse, p.tq, p.d)
        _attention_join((q.dtype, p.tq, p.d, splits), (p.b * p.h * p.tq, 1, 1), args, meta, num_warps=1)
    return out, lse


def problem_of(
    q: Tensor, k: Tensor, z_batch: int, z_head: int, height: int, width: int, causal: bool, scale: float
) -> Problem:
    """The problem of an operator's arguments."""
    (b, h, tq, d), (_, hk, tk, _) = q.shape, k.shape
    return Problem(b, h, max(hk, 1), tq, tk, d, (z_batch, z_head), (height, width), causal, scale)


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lengths: Tensor | None, row_offsets: Tensor,
    col_indices: Tensor, row_indices: Tensor, col_offsets: Tensor, transpose_order: Tensor, positions: Tensor,
    z_batch: int, z_head: int, height: int, width: int, causal: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Operator `blocksparse_attention` -> (out like q, float32 log-sum-exp `[B, H, Tq]`)."""
    if q.numel() == 0:
        # Weights of heads without columns sum up all the same: their scores are 0.
        if q.shape[-1] == 0 and q.shape[:3].numel():
            q_wide, k_wide = (x.new_zeros(*x.shape[:3], 1) for x in (q, k))
            problem = problem_of(q_wide, k_wide, z_batch, z_head, height, width, causal, scale)
            _, lse = launch_attention_fwd(problem, q_wide, k_wide, k_wide, bias, lengths, row_offsets, col_indices)
            return q.new_empty(q.shape), lse
        return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)
    problem = problem_of(q, k, z_batch, z_head, height, width, causal, scale)
    return launch_attention_fwd(problem, q, k, v, bias, lengths, row_offsets, col_indices)


_INTEGERS = (
    "stride_zb", "stride_zh", "stride_bb", "stride_bh", "stride_bq", "H", "GROUP", "rows", "tiles", "Tq", "Tk", "D",
)  # fmt: skip

EXAMPLES = {
    _attention_fwd_kernel: {
        "signature": {
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "bias_ptr", "out_ptr"), "*bf16"), "lse_ptr": "*fp32",
            **dict.fromkeys(("offsets_ptr", "columns_ptr", "lengths_ptr"), "*i32"),
            **dict.fromkeys(_INTEGERS, "i32"), "scale": "fp32", "last": "i32", "capacity": "i32",
        },
        "constexprs": {
            "BLOCK_Q": 64, "BLOCK_K": 64, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 128, "CAUSAL": True,
            "BIAS": "dense", "SPLITS": 1, "PRECISION": "ieee", "UPCAST": False,
        },
        "num_warps": 4,
        "num_stages": 2,
    },
    _attention_join_kernel: {
        "signature": {
            "partial_ptr": "*fp32", "partial_lse_ptr": "*fp32", "out_ptr": "*bf16", "lse_ptr": "*fp32", "Tq": "i32",
            "D": "i32",
        },
        "constexprs": {"SPLITS": 8, "BLOCK_D": 128},
        "num_warps": 1,
    },
}  # fmt: skip
"""Example signatures for the ahead-of-time compile test."""

"""The decoders of the article that gossamer's SAE decoding grew from, rebuilt from its description as peers.

Exact allocation: count, prefix sum, read the total on the host, fill, decode. Fixed allocation: `max_l0` slots a
token, filled in one pass; `validate` reads the largest count on the host, without it extra entries are dropped.
The structure is the article's, including what makes it slow: a program per token and 1,024 features that claims its
slots with an atomic on the token's cursor (the order of entries varies), a decode grid of (tokens, D / 256) that takes
one entry per step, and a zero-initialised float32 output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_F = 1024
BLOCK_D = 256


class Exact(NamedTuple):
    """Compressed rows: `indices` and `values` [nnz], `row_offsets` [B + 1]."""

    indices: Tensor
    values: Tensor
    row_offsets: Tensor


class Fixed(NamedTuple):
    """Slots: `indices` and `values` [B * max_l0], `counts` [B] (may exceed `max_l0` where not validated)."""

    indices: Tensor
    values: Tensor
    counts: Tensor
    max_l0: int


@triton.jit
def _count_kernel(acts_ptr, counts_ptr, F, BLOCK_F: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    values = tl.load(acts_ptr + row.to(tl.int64) * F + columns, mask=columns < F, other=0.0)
    tl.atomic_add(counts_ptr + row, tl.sum((values != 0.0).to(tl.int32)))


@triton.jit
def _fill_exact_kernel(acts_ptr, row_offsets_ptr, cursors_ptr, indices_ptr, values_ptr, F, BLOCK_F: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    values = tl.load(acts_ptr + row.to(tl.int64) * F + columns, mask=columns < F, other=0.0)
    fired = values != 0.0
    ones = fired.to(tl.int32)
    claimed = tl.atomic_add(cursors_ptr + row, tl.sum(ones))
    slots = tl.load(row_offsets_ptr + row) + claimed + tl.cumsum(ones) - ones
    tl.store(indices_ptr + slots, columns, mask=fired)
    tl.store(values_ptr + slots, values, mask=fired)


@triton.jit
def _fill_fixed_kernel(acts_ptr, cursors_ptr, indices_ptr, values_ptr, F, max_l0, BLOCK_F: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    values = tl.load(acts_ptr + row.to(tl.int64) * F + columns, mask=columns < F, other=0.0)
    fired = values != 0.0
    ones = fired.to(tl.int32)
    claimed = tl.atomic_add(cursors_ptr + row, tl.sum(ones))
    ranks = claimed + tl.cumsum(ones) - ones
    kept = fired & (ranks < max_l0)
    tl.store(indices_ptr + row * max_l0 + ranks, columns, mask=kept)
    tl.store(values_ptr + row * max_l0 + ranks, values, mask=kept)


@triton.jit
def _decode_row(indices_ptr, values_ptr, start, count, W_dec_ptr, out_ptr, row, D, BLOCK_D: tl.constexpr):
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = columns < D
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    for i in range(count):
        feature = tl.load(indices_ptr + start + i).to(tl.int64)
        value = tl.load(values_ptr + start + i).to(tl.float32)
        total += value * tl.load(W_dec_ptr + feature * D + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * D + columns, total, mask=mask)


@triton.jit
def _decode_exact_kernel(indices_ptr, values_ptr, row_offsets_ptr, W_dec_ptr, out_ptr, D, BLOCK_D: tl.constexpr):
    row = tl.program_id(0)
    start = tl.load(row_offsets_ptr + row)
    count = tl.load(row_offsets_ptr + row + 1) - start
    _decode_row(indices_ptr, values_ptr, start, count, W_dec_ptr, out_ptr, row, D, BLOCK_D)


@triton.jit
def _decode_fixed_kernel(indices_ptr, values_ptr, counts_ptr, W_dec_ptr, out_ptr, D, max_l0, BLOCK_D: tl.constexpr):
    row = tl.program_id(0)
    # Slots past max_l0 belong to the next token: an unvalidated overflow drops entries, it does not borrow them.
    count = tl.minimum(tl.load(counts_ptr + row), max_l0)
    _decode_row(indices_ptr, values_ptr, row * max_l0, count, W_dec_ptr, out_ptr, row, D, BLOCK_D)


def pack_exact(acts: Tensor) -> Exact:
    """`acts` [B, F] contiguous to compressed rows; waits for the device once."""
    B, F = acts.shape
    grid = (B, triton.cdiv(F, BLOCK_F))
    counts = torch.zeros(B, dtype=torch.int32, device=acts.device)
    _count_kernel[grid](acts, counts, F, BLOCK_F=BLOCK_F)
    row_offsets = torch.zeros(B + 1, dtype=torch.int32, device=acts.device)
    row_offsets[1:] = counts.cumsum(0).to(torch.int32)
    nnz = int(row_offsets[-1].item())
    indices = torch.empty(nnz, dtype=torch.int32, device=acts.device)
    values = torch.empty(nnz, dtype=acts.dtype, device=acts.device)
    cursors = torch.zeros(B, dtype=torch.int32, device=acts.device)
    _fill_exact_kernel[grid](acts, row_offsets, cursors, indices, values, F, BLOCK_F=BLOCK_F)
    return Exact(indices, values, row_offsets)


def pack_fixed(acts: Tensor, max_l0: int = 512, validate: bool = True) -> Fixed:
    """`acts` [B, F] contiguous to `max_l0` slots a row; `validate` waits for the device and raises ValueError."""
    B, F = acts.shape
    indices = torch.empty(B * max_l0, dtype=torch.int32, device=acts.device)
    values = torch.empty(B * max_l0, dtype=acts.dtype, device=acts.device)
    cursors = torch.zeros(B, dtype=torch.int32, device=acts.device)
    _fill_fixed_kernel[(B, triton.cdiv(F, BLOCK_F))](acts, cursors, indices, values, F, max_l0, BLOCK_F=BLOCK_F)
    if validate and (largest := int(cursors.max().item())) > max_l0:
        raise ValueError(
            f"jumprelu_sae_kernels.pack_fixed: max_l0 must be at least the largest count {largest}, got {max_l0}."
        )
    return Fixed(indices, values, cursors, max_l0)


def decode_packed(rows: Exact | Fixed, W_dec: Tensor) -> Tensor:
    """`rows` @ `W_dec` [F, D] contiguous, float32 [B, D]."""
    D = W_dec.shape[1]
    B = len(rows.counts) if isinstance(rows, Fixed) else len(rows.row_offsets) - 1
    out = torch.zeros(B, D, dtype=torch.float32, device=W_dec.device)
    grid = (B, triton.cdiv(D, BLOCK_D))
    if isinstance(rows, Fixed):
        _decode_fixed_kernel[grid](rows.indices, rows.values, rows.counts, W_dec, out, D, rows.max_l0, BLOCK_D=BLOCK_D)
    else:
        _decode_exact_kernel[grid](rows.indices, rows.values, rows.row_offsets, W_dec, out, D, BLOCK_D=BLOCK_D)
    return out


def decode_exact(acts: Tensor, W_dec: Tensor) -> Tensor:
    """The article's exact-allocation pipeline: `acts` [B, F] @ `W_dec` [F, D], float32 [B, D]."""
    return decode_packed(pack_exact(acts), W_dec.contiguous())


def decode_fixed(acts: Tensor, W_dec: Tensor, max_l0: int = 512, validate: bool = True) -> Tensor:
    """The article's fixed-allocation pipeline; unvalidated, it silently drops what exceeds `max_l0`."""
    return decode_packed(pack_fixed(acts, max_l0, validate), W_dec.contiguous())

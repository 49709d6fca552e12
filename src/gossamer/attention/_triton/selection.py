"""Words of selected keys, and the lists that index them.

A word holds one bit for each of 64 queries, for one key. It is made of two halves of 32 queries, for the GPU's
integers have 32 bits. To list a block's keys, one program walks its words, `BLOCK` at a time, and carries how many it
has found: the only place where the order of keys matters, and a 64th of the selection's size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch


@triton.jit
def join_halves(low, high):
    """int64 words of two int32 halves."""
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def half_of_mask(mask_ptr, first, Tq, Tk, keys):
    """int32: bit i is the mask of query first + i."""
    rows = first + tl.arange(0, 32)
    inside = (rows < Tq)[:, None] & (keys < Tk)[None, :]
    taken = tl.load(mask_ptr + rows.to(tl.int64)[:, None] * Tk + keys[None, :], mask=inside, other=0).to(tl.int32)
    return tl.sum((taken != 0).to(tl.int32) << tl.arange(0, 32)[:, None], axis=0)


@launch.kernel
def _words_of_mask_kernel(mask_ptr, words_ptr, Tq, Tk, BLOCK: tl.constexpr):
    """Program (BLOCK keys, block of 64 queries, batch and scope)."""
    keys = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    block, scope = tl.program_id(1), tl.program_id(2).to(tl.int64)
    mask_ptr += scope * Tq * Tk
    low = half_of_mask(mask_ptr, block * 64, Tq, Tk, keys)
    high = half_of_mask(mask_ptr, block * 64 + 32, Tq, Tk, keys)
    at = (scope * tl.num_programs(1) + block) * Tk + keys
    tl.store(words_ptr + at, join_halves(low, high), mask=keys < Tk)


@launch.kernel
def _mask_of_words_kernel(words_ptr, mask_ptr, Tq, Tk, BLOCK: tl.constexpr):
    """Program (BLOCK keys, block of 64 queries, batch and scope)."""
    keys = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    block, scope = tl.program_id(1), tl.program_id(2).to(tl.int64)
    words = tl.load(words_ptr + (scope * tl.num_programs(1) + block) * Tk + keys, mask=keys < Tk, other=0)
    bits = tl.arange(0, 64)
    taken = (words[None, :] >> bits.to(tl.int64)[:, None]) & 1
    rows = block * 64 + bits
    inside = (rows < Tq)[:, None] & (keys < Tk)[None, :]
    at = (scope * Tq + rows)[:, None] * Tk + keys[None, :]
    tl.store(mask_ptr + at, taken.to(tl.int8), mask=inside)


@launch.kernel
def _union_of_words_kernel(words_ptr, counts_ptr, indices_ptr, blocks, Tk, reach, capacity, BLOCK: tl.constexpr):
    """Program (block of queries of one batch and scope), those with most keys first. Nobody takes a key further than
    `reach` behind its block's last query."""
    at = tl.num_programs(0) - 1 - tl.program_id(0)
    # In 32 bits: the remainder of 64 calls a function, which needs a stack.
    end = tl.minimum((at % blocks + 1) * 64 + reach, Tk)
    block = at.to(tl.int64)
    words_ptr += block * Tk
    indices_ptr += block * capacity
    found = 0
    for first in tl.range(0, end, BLOCK, num_stages=2):
        keys = first + tl.arange(0, BLOCK)
        taken = (tl.load(words_ptr + keys, mask=keys < end, other=0) != 0).to(tl.int32)
        slots = found + tl.cumsum(taken, axis=0) - taken
        tl.store(indices_ptr + slots, keys, mask=(taken != 0) & (slots < capacity))
        found += tl.sum(taken, axis=0)
    tl.store(counts_ptr + block, found)
    # From a multiple of 4 on, so that a thread stores 16 bytes.
    for first in range(found // 4 * 4, capacity, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        tl.store(indices_ptr + slots, -1, mask=(slots >= found) & (slots < capacity))


def words_of_mask(mask: Tensor) -> Tensor:
    """Operator `words_of_mask`: bool [B, S, Tq, Tk] -> int64 [B, S, ceil(Tq / 64), Tk]."""
    b, s, tq, tk = mask.shape
    words = mask.new_empty((b, s, launch.cdiv(tq, 64), tk), dtype=torch.int64)
    if words.numel():
        grid = (launch.cdiv(tk, 128), words.shape[2], b * s)
        _words_of_mask_kernel(grid, (mask.view(torch.int8), words, tq, tk), {"BLOCK": 128})
    return words


def mask_of_words(words: Tensor, num_queries: int) -> Tensor:
    """Operator `mask_of_words`: the inverse of `words_of_mask`."""
    b, s, blocks, tk = words.shape
    mask = words.new_empty((b, s, num_queries, tk), dtype=torch.bool)
    if mask.numel():
        grid = (launch.cdiv(tk, 128), blocks, b * s)
        args = (words, mask.view(torch.int8), num_queries, tk)
        _mask_of_words_kernel(grid, args, {"BLOCK": 128})
    return mask


def union_of_words(words: Tensor, capacity: int, reach: int | None = None) -> tuple[Tensor, Tensor]:
    """Operator `union_of_words` -> (counts, indices): the columns of words that differ from 0, if they fit.

    With `reach` no query of block m takes a key from 64 (m + 1) + reach on.
    """
    *scope, tk = words.shape
    counts = words.new_empty(scope, dtype=torch.int32)
    indices = words.new_empty((*scope, capacity), dtype=torch.int32)
    if counts.numel():
        block = min(4096, launch.next_power_of_2(tk))
        args = (words, counts, indices, words.shape[-2], tk, tk if reach is None else reach, capacity)
        _union_of_words_kernel((counts.numel(), 1, 1), args, {"BLOCK": block}, num_warps=8)
    return counts, indices


EXAMPLES = {
    _words_of_mask_kernel: {
        "signature": {"mask_ptr": "*i8", "words_ptr": "*i64", "Tq": "i32", "Tk": "i32"},
        "constexprs": {"BLOCK": 128},
        "num_warps": 4,
    },
    _mask_of_words_kernel: {
        "signature": {"words_ptr": "*i64", "mask_ptr": "*i8", "Tq": "i32", "Tk": "i32"},
        "constexprs": {"BLOCK": 128},
        "num_warps": 4,
    },
    _union_of_words_kernel: {
        "signature": {
            "words_ptr": "*i64", "counts_ptr": "*i32", "indices_ptr": "*i32",
            **dict.fromkeys(("blocks", "Tk", "reach", "capacity"), "i32"),
        },
        "constexprs": {"BLOCK": 4096},
        "num_warps": 8,
    },
}  # fmt: skip

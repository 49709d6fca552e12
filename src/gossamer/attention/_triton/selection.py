"""Words of selected keys.

A word holds one bit for each of 64 queries, for one key. It is made of two halves of 32 queries, for the GPU's
integers have 32 bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.attention.records import MaskOfWords, WordsOfMask


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


def words_of_mask(call: WordsOfMask) -> Tensor:
    """Operator `words_of_mask`."""
    (mask,) = call
    b, s, tq, tk = mask.shape
    words = mask.new_empty((b, s, launch.cdiv(tq, 64), tk), dtype=torch.int64)
    if words.numel():
        grid = (launch.cdiv(tk, 128), words.shape[2], b * s)
        _words_of_mask_kernel(grid, (mask.view(torch.int8), words, tq, tk), {"BLOCK": 128})
    return words


def mask_of_words(call: MaskOfWords) -> Tensor:
    """Operator `mask_of_words`."""
    words, num_queries = call
    b, s, blocks, tk = words.shape
    mask = words.new_empty((b, s, num_queries, tk), dtype=torch.bool)
    if mask.numel():
        grid = (launch.cdiv(tk, 128), blocks, b * s)
        args = (words, mask.view(torch.int8), num_queries, tk)
        _mask_of_words_kernel(grid, args, {"BLOCK": 128})
    return mask


EXAMPLES = {
    _words_of_mask_kernel: {"mask_ptr": "*i8", "BLOCK": 128},
    _mask_of_words_kernel: {"mask_ptr": "*i8", "BLOCK": 128},
}

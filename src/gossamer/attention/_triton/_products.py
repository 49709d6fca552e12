"""Functions that the kernels of attention share: products of long rows, blocks of columns, and how k and v lie."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def wide_product(
    a_ptr, a_at, a_read, b_ptr, b_at, b_read, D: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Rows of a times rows of b, CHUNK columns at a time, so that a thread's registers hold the operands."""
    s = tl.zeros([a_at.shape[0], b_at.shape[0]], tl.float32)
    for start in range(0, D, CHUNK):
        column = start + tl.arange(0, CHUNK)
        some = (column < D)[None, :]
        a = tl.load(a_ptr + a_at[:, None] + column[None, :], mask=a_read[:, None] & some, other=0.0)
        b = tl.load(b_ptr + b_at[:, None] + column[None, :], mask=b_read[:, None] & some, other=0.0)
        s = tl.dot(a, b.T, s, input_precision=PRECISION)
    return s


@triton.jit
def rows_product(
    a, b, a_ptr, a_rows, stride, a_limit, b_ptr, b_rows, b_limit, D: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """a times b, tiles of whole rows, or `wide_product` of the same rows of a matrix with this stride and of one of D
    columns: tiles that nothing uses are not loaded. Of float32 that is multiplied without tensor cores registers hold
    32 columns of the operands."""
    CHUNK: tl.constexpr = 32 if a_ptr.dtype.element_ty == tl.float32 and PRECISION == "ieee" else 128
    if CHUNK >= D:
        return tl.dot(a, b.T, input_precision=PRECISION)
    else:
        a_at, b_at = a_rows.to(tl.int64) * stride, b_rows.to(tl.int64) * D
        return wide_product(a_ptr, a_at, a_rows < a_limit, b_ptr, b_at, b_rows < b_limit, D, CHUNK, PRECISION)


@triton.jit
def block_of_columns(program, D: tl.constexpr, BLOCK: tl.constexpr):
    """(which unit of work, which columns) of programs of which cdiv(D, BLOCK) in a row share a unit."""
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    return program // BLOCKS, program % BLOCKS * BLOCK + tl.arange(0, BLOCK)


def stages_of(usual: int, x: Tensor) -> int:
    """Stages of loads of rows like x: two of float32 take more than the 64 KiB of shared memory of gfx942."""
    return min(usual, 2 if x.element_size() == 2 else 1) if torch.version.hip else usual


def strided(x: Tensor) -> Tensor:
    """x [..., D] with rows whose elements are neighbours."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def reached(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """k and v, in which 32 bits reach every row of a head, and their strides."""
    k, v = (x if x.shape[2] * x.stride(2) < 1 << 31 else x.contiguous() for x in (strided(k), strided(v)))
    return k, v, (*k.stride()[:3], *v.stride()[:3])

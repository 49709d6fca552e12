"""Operands as the copy engine of Hopper reads them: rows, or columns, that begin on 16 bytes."""

from torch import Tensor

from gossamer.rowsparse.dense_product import padded

LEAST = 512
"""Rows and columns of a product from which on a copy of operands costs less than reading them as they lie."""


def aligned(m: int, n: int, *operands: Tensor) -> tuple[Tensor, ...]:
    """The operands [m or n, K] of a product of m x n, 16-bit, or copies of those that are not aligned, if it is large.

    cuBLAS is slow with such operands as well: two products of 607 x 15,798 x 5,320 take it 1.02 ms on an H200, copies
    and our product 0.84.
    """
    if not copies(m, n):
        return operands
    return tuple(operand if _is_aligned(operand) else _copied(operand) for operand in operands)


def copies(m: int, n: int) -> bool:
    """Whether `aligned` copies what is not aligned."""
    return m >= LEAST and n >= LEAST


def readable(operand: Tensor, copied: bool = False) -> bool:
    """Whether the copy engine can read an operand, or with `copied` what `aligned` makes of it: 16 bits, rows
    contiguous and on 16 bytes."""
    stride, step = operand.stride()
    if operand.element_size() != 2 or operand.shape[1] == 0:
        return False
    if step == 1 and stride >= operand.shape[1] and (operand.data_ptr() | 2 * stride) % 16 == 0:
        return True
    # A copy of columns lies by columns.
    return copied and (step == 1 or stride != 1) and not _is_aligned(operand)


def _is_aligned(operand: Tensor) -> bool:
    stride = operand.stride(0) if operand.stride(1) == 1 else operand.stride(1)
    united = operand.data_ptr() | stride * operand.element_size()
    return 1 in operand.stride() and united % 16 == 0


def _copied(operand: Tensor) -> Tensor:
    turned = operand.stride(1) != 1 and operand.stride(0) == 1
    rows = operand.t() if turned else operand
    copy = rows.new_empty(rows.shape[0], padded(rows.shape[1], rows))[:, : rows.shape[1]].copy_(rows)
    return copy.t() if turned else copy

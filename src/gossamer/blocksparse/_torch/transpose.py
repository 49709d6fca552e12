"""Transposed blocks in the transposed layout's order, on the CPU."""

from torch import Tensor

from gossamer.blocksparse._torch.tensor import lost


def transpose(values: Tensor, nnz: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Operator `blocksparse_transpose`; `back` is for the gradient alone."""
    capacity, height, width = values.shape
    held = int(nnz)
    if held > capacity:
        return values.new_full((capacity, width, height), lost(values.dtype))
    out = values.new_zeros(capacity, width, height)
    out[:held] = values.mT[order[:held].long()]
    return out

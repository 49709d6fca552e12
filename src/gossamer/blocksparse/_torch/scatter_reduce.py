"""Elements put where indices say, on the CPU."""

import math

import torch
from torch import Tensor

from gossamer.blocksparse._torch.gather import places
from gossamer.blocksparse._torch.tensor import lost


def scatter_reduce(
    given: Tensor | None,
    src: Tensor | None,
    nnz: Tensor,
    row_indices: Tensor,
    col_indices: Tensor,
    positions: Tensor,
    index: Tensor,
    index_nnz: Tensor,
    index_rows: Tensor,
    index_cols: Tensor,
    index_row_offsets: Tensor,
    index_col_offsets: Tensor,
    index_order: Tensor,
    index_positions: Tensor,
    row_offsets: Tensor,
    col_offsets: Tensor,
    order: Tensor,
    sizes: list[int],
    reduce: str,
    include_self: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Operator `blocksparse_scatter_reduce`."""
    shape = (col_indices.shape[0], *index.shape[1:])
    if int(nnz) > shape[0] or int(index_nnz) > index.shape[0]:
        return torch.full(shape, lost(dtype), dtype=dtype)
    place = places(positions, index, index_nnz, index_rows, index_cols, sizes, "index of a scatter").view(-1)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.uint8 if dtype is torch.bool else dtype
    # One element more takes what has no place.
    size = math.prod(shape)
    place = torch.where(place < 0, size, place)
    flat = torch.zeros(size + 1, dtype=wide)
    if given is not None:
        flat[:size] = given.reshape(-1)
    if src is None:
        flat.index_add_(0, place, torch.ones((), dtype=wide).expand(place.shape))
    else:
        added = src.reshape(-1)[: len(place)]
        if reduce == "last":
            # The greatest of the positions, for a plain assignment leaves open which of equal indices is last.
            order = torch.full(flat.shape, -1).scatter_reduce_(0, place, torch.arange(len(place)), "amax")
            met = order >= 0
            flat[met] = added[order[met]].to(wide)
        else:
            flat.scatter_reduce_(0, place, added.to(wide), reduce, include_self=include_self)
    return flat[:size].view(shape).to(dtype, copy=True)

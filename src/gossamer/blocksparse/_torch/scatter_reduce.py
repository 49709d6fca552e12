"""Elements put where indices say, on the CPU."""

import torch
from torch import Tensor

from gossamer.blocksparse._torch.dense import lost
from gossamer.blocksparse._torch.gather import places


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
    sizes: list[int],
    reduce: str,
    include_self: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Operator `blocksparse_scatter_reduce`."""
    shape = (col_indices.shape[0], *index.shape[1:])
    if int(nnz) > shape[0] or int(index_nnz) > index.shape[0]:
        return torch.full(shape, lost(dtype), dtype=dtype)
    place, at = places(positions, shape[0], index, index_nnz, index_rows, index_cols, sizes, "index of a scatter")
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    if given is None:
        out = torch.zeros(shape, dtype=wide)
        # Beyond the matrix and behind the last block there is nothing to include.
    else:
        out = given.to(wide, copy=True, memory_format=torch.contiguous_format)
    flat = out.view(-1)
    if src is None:
        flat.index_add_(0, place, torch.ones((), dtype=wide).expand(place.shape))
    elif reduce == "last":
        # The greatest of the positions, for a plain assignment leaves open which of equal indices is last.
        order = torch.full(flat.shape, -1).scatter_reduce_(0, place, torch.arange(len(place)), "amax")
        met = order >= 0
        flat[met] = src.reshape(-1)[at[order[met]]].to(wide)
    elif dtype is torch.bool:
        # PyTorch reduces no bool.
        narrow = flat.to(torch.uint8).scatter_reduce_(
            0, place, src.reshape(-1)[at].to(torch.uint8), reduce, include_self=include_self
        )
        out = narrow.view(shape)
    else:
        flat.scatter_reduce_(0, place, src.reshape(-1)[at].to(wide), reduce, include_self=include_self)
    return out.to(dtype)

"""The smallest value that a batch keeps, which the threshold of a BatchTopK SAE follows."""

import torch
from torch import Tensor

from gossamer._core.ops import register, undispatched
from gossamer.rowsparse import Rows
from gossamer.rowsparse.formats import threshold_dtype
from gossamer.rowsparse.pack import anonymous, check_container
from gossamer.sae._torch.smallest import smallest as _cpu


def smallest(rows: Rows, scale: Tensor | None = None) -> Tensor:
    """The smallest value above 0 in rows, without a host sync; inf where there is none.

    Args:
        rows: `ELL`, `CSR` or `TwELL` of shape `(..., d_sae)`; of rows that overflowed, what they are read from.
        scale: `[d_sae]`, what each value is multiplied by first, or None.

    Returns:
        `[]` in float32, float64 if rows is, without a gradient.

    Raises:
        TypeError: rows is no container.
        ValueError: on the CPU, a row with more entries than slots and no source; on a GPU the result is NaN then.

    Source: Bussmann et al. 2024, "BatchTopK Sparse Autoencoders", for the threshold that is estimated from it.

    >>> from gossamer import rowsparse
    >>> smallest(rowsparse.pack(torch.tensor([[0.0, 3.0], [2.0, 4.0]]))).item()
    2.0
    """
    check_container("sae.smallest", rows)
    lists = anonymous("sae.smallest", rows.detach())
    if not rows.num_rows:
        return lists[0][0].new_full((), torch.inf, dtype=threshold_dtype(rows.dtype))
    scale = None if scale is None else scale.detach()
    found = [undispatched(_smallest, *given, scale)(*given, scale).amin() for given in lists]
    return found[0] if len(found) == 1 else torch.minimum(*found)


_smallest = register(
    "sae_smallest(Tensor values, Tensor indices, Tensor nnz, Tensor? source, Tensor? scale) -> Tensor",
    cpu=_cpu,
    strided=("source",),
    fake=lambda values, indices, nnz, *_: nnz.new_empty(nnz.shape, dtype=threshold_dtype(values.dtype)),
)

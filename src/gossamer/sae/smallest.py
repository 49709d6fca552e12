"""The smallest value that a batch keeps, which the threshold of a BatchTopK SAE follows."""

import torch
from torch import Tensor

from gossamer._core.ops import register, undispatched
from gossamer.rowsparse import Rows
from gossamer.rowsparse.formats import threshold_dtype
from gossamer.rowsparse.pack import parts
from gossamer.sae._torch.smallest import smallest as _cpu


def smallest(rows: Rows, scale: Tensor | None = None) -> Tensor:
    """The smallest value above 0 in rows, without a host sync; inf where there is none.

    Args:
        rows: `Rows` of shape `(..., d_sae)`; rows that overflowed are computed from the source.
        scale: `[d_sae]`, a factor for each value, or None.

    Returns:
        `[]` in float32, float64 if rows is, without a gradient.

    Raises:
        TypeError: rows is no container.
        ValueError: on the CPU, a row that overflowed without a source; on a GPU the result is NaN then.

    Source: Bussmann et al. 2024, "BatchTopK Sparse Autoencoders", for the threshold that is estimated from it.

    >>> from gossamer import rowsparse
    >>> smallest(rowsparse.pack(torch.tensor([[0.0, 3.0], [2.0, 4.0]]))).item()
    2.0
    """
    lists = parts("sae.smallest", rows.detach() if isinstance(rows, Rows) else rows)
    if not rows.num_rows:
        return lists[0].new_full((), torch.inf, dtype=threshold_dtype(rows.dtype))
    scale = None if scale is None else scale.detach()
    return undispatched(_smallest, *lists, scale)(*lists, scale).amin()


_smallest = register(
    "sae_smallest(Tensor values, Tensor indices, Tensor spans, Tensor? source, Tensor? scale) -> Tensor",
    cpu=_cpu,
    strided=("source",),
    fake=lambda values, indices, spans, *_: spans.new_empty(spans.shape[1], dtype=threshold_dtype(values.dtype)),
)

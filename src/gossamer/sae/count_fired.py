"""Firing counts of sparse autoencoders."""

import torch
from torch import Tensor

from gossamer._core.ops import register, undispatched
from gossamer.rowsparse import Rows
from gossamer.rowsparse.pack import parts
from gossamer.sae._torch.count_fired import count_fired as _cpu


def count_fired(rows: Rows) -> Tensor:
    """How many rows each latent fires in, that is, has a value other than 0 in; without a host sync.

    Args:
        rows: `Rows` of shape `(..., d_sae)`, such as `encode` returns. Repeated indices count as often
            as they occur.

    Returns:
        int64 `[d_sae]`, on the device of rows, without a gradient.

    Raises:
        TypeError: rows is no container.
        ValueError: on the CPU, an index outside [0, d_sae), or a row that overflowed without a source; on a GPU
            counts are far below 0 then.

    Source: this package.

    >>> from gossamer import rowsparse
    >>> count_fired(rowsparse.pack(torch.tensor([[0.0, 1.0], [2.0, 3.0]]))).tolist()
    [1, 2]
    """
    lists = parts("sae.count_fired", rows.detach() if isinstance(rows, Rows) else rows)
    return undispatched(_count_fired, *lists)(*lists, rows.num_columns)


_count_fired = register(
    "sae_count_fired(Tensor values, Tensor indices, Tensor spans, Tensor? source, SymInt n) -> Tensor",
    cpu=_cpu,
    strided=("source",),
    fake=lambda values, indices, spans, source, n: values.new_empty(n, dtype=torch.int64),
)

"""Firing counts of sparse autoencoders."""

from typing import Any

import torch
from torch import Tensor

from gossamer._core.operator import register
from gossamer.rowsparse import Rows
from gossamer.rowsparse.pack import parts
from gossamer.sae._torch.count_fired import count_fired as _cpu
from gossamer.sae.records import SaeCountFired


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
    counts: Tensor = _count_fired(SaeCountFired(*lists, rows.num_columns))
    return counts


@register(SaeCountFired, cpu=_cpu, fake=lambda call: call.values.new_empty(call.n, dtype=torch.int64), repeats=True)
def _count_fired() -> Any:
    from gossamer.sae._triton.count_fired import count_fired

    return count_fired

"""Row-sparse transposition."""

from typing import Any

import torch
from torch import Tensor

from gossamer._core.operator import register
from gossamer.rowsparse._torch.pack import refuse_overflow
from gossamer.rowsparse._torch.transpose import transpose_keys as _cpu
from gossamer.rowsparse.pack import parts
from gossamer.rowsparse.records import TransposeKeys
from gossamer.rowsparse.rows import Rows, unchecked


def transpose(rows: Rows) -> Rows:
    """The transposed matrix, with the entries of each row sorted by column; no host sync, bitwise reproducible.

    Args:
        rows: `Rows` of shape `(..., N)`; leading dimensions are flattened to M.

    Returns:
        `Rows` of shape `(N, M)` with buffers as long as those of `rows`, differentiable in values. If a row of
        `rows` had overflowed, every row of the result is marked as overflowed and is computed from its source, the
        dense transpose; rows with a source therefore cost a dense `[M, N]`.

    Raises:
        TypeError: rows is not a container.
        ValueError: on the CPU, a row that overflowed without a source; on a GPU the result overflows without a source
            then, and gives NaN.

    Source: Cetin et al., "Sparser, Faster, Lighter Transformer Language Models", training: the weight gradient
        needs the entries by column.

    >>> transpose(pack(torch.tensor([[0.0, 2.0], [3.0, 4.0]]), capacity="exact")).indices.tolist()
    [1, 0, 1]
    """
    operator = "rowsparse.transpose"
    values, indices, spans, source = parts(operator, rows)
    room = values.shape[0]
    if source is None and values.device.type == "cpu":
        refuse_overflow(operator, spans, room)
    col_offsets, keys, _ = transpose_keys(TransposeKeys(indices, spans, rows.num_columns))
    held = torch.arange(room, device=keys.device) < col_offsets[-1]
    keys = torch.where(held, keys, 0)
    ordered = torch.where(held, values[keys & 0xFFFFFFFF], 0) if room else values
    starts = torch.where(rows.overflowed, room + 1, col_offsets[:-1])
    if source is not None:
        # A source is right at overflowed rows alone; here every row is read from it.
        source = rows.to_dense().reshape(rows.num_rows, rows.num_columns).t()
    columns = torch.where(held, keys >> 32, -1).int()
    spans = torch.stack([starts, col_offsets.diff()])
    return unchecked(ordered, columns, spans, (rows.num_columns, rows.num_rows), source)


def _fake(call: TransposeKeys) -> tuple[Tensor, Tensor, Tensor]:
    indices, _, n = call
    keys = indices.new_empty(indices.numel(), dtype=torch.int64)
    return indices.new_empty(n + 1, dtype=torch.int64), keys, torch.empty_like(keys, dtype=torch.int32)


@register(TransposeKeys, cpu=_cpu, fake=_fake, repeats=True)
def transpose_keys() -> Any:
    from gossamer.rowsparse._triton.transpose import transpose_keys

    return transpose_keys

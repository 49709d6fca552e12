"""Row-sparse transposition."""

import torch
from torch import Tensor

from gossamer._core.ops import register
from gossamer.rowsparse._torch.pack import refuse_overflow
from gossamer.rowsparse._torch.transpose import transpose_keys as _cpu
from gossamer.rowsparse.container import unchecked
from gossamer.rowsparse.formats import CSR, ELL, Rows
from gossamer.rowsparse.pack import listed, parts, unpack


def transpose(rows: Rows) -> CSR:
    """The transposed matrix, as a CSR whose entries are sorted by column; no host sync, bitwise reproducible.

    Args:
        rows: `ELL`, `CSR` or `TwELL` of shape `(..., N)`; leading dimensions are flattened to M.

    Returns:
        `CSR` of shape `(N, M)` with buffers as long as the slots of `rows`, differentiable in values. If a row of
        `rows` had overflowed, every row of the result is marked as overflowed and is read from its source, the dense
        transpose; rows with a source therefore cost a dense `[M, N]`.

    Raises:
        TypeError: rows is not a container.
        ValueError: on the CPU, a row with more entries than slots and no source to read them from; on a GPU the result
            overflows without a source then, and gives NaN.

    Source: Cetin et al., "Sparser, Faster, Lighter Transformer Language Models", training: the weight gradient
        needs the entries by column.

    >>> transpose(pack(torch.tensor([[0.0, 2.0], [3.0, 4.0]]), capacity=2)).indices.tolist()
    [1, 0, 1, -1]
    """
    rows = listed("rowsparse.transpose", rows)
    values, indices, offsets, source = parts("rowsparse.transpose", rows)
    if source is None and values.device.type == "cpu":
        refuse_overflow("rowsparse.transpose", indices.shape[-1], offsets)
    row_offsets, keys, _ = transpose_keys(indices, offsets, rows.num_columns)
    held = torch.arange(keys.shape[0], device=keys.device) < row_offsets[-1]
    keys = torch.where(held, keys, 0)
    row, slot = keys >> 32, keys & 0xFFFFFFFF
    starts = row * values.shape[1] if isinstance(rows, ELL) else offsets[row] if keys.numel() else row
    ordered = torch.where(held, values.reshape(-1)[starts + slot], 0) if keys.numel() else values.reshape(-1)
    row_offsets = torch.cat([row_offsets[:1], row_offsets[1:] + rows.overflowed * (keys.shape[0] + 1)])
    if source is not None:
        # A source is right at overflowed rows alone; here every row is read from it.
        source = unpack(rows).reshape(rows.num_rows, rows.num_columns).t()
    indices = torch.where(held, row, -1).int()
    out: CSR = unchecked(CSR, ordered, indices, row_offsets, (rows.num_columns, rows.num_rows), source)
    return out


def _fake(indices: Tensor, offsets: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    keys = indices.new_empty(indices.numel(), dtype=torch.int64)
    return indices.new_empty(n + 1, dtype=torch.int64), keys, torch.empty_like(keys, dtype=torch.int32)


transpose_keys = register(
    "transpose_keys(Tensor indices, Tensor offsets, SymInt n) -> (Tensor, Tensor, Tensor)",
    cpu=_cpu,
    fake=_fake,
)

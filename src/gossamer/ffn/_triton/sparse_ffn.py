"""A feed-forward block whose gate is packed as it is computed, and what its rows need after that.

The gate is packed tile by tile (`gemm.linear_pack`). Then every row takes one of three ways, by counts that only the
device knows: the weights of its entries are gathered (`gather`), or those of the union of its group's entries
(`union`), or it goes through dense tiles (`heavy`). All kernels are launched, and leave at once where nothing is left
to them. Few rows have kernels of their own (`few`).
"""

import torch
from torch import Tensor

from gossamer._core import launch
from gossamer.ffn._triton import few, gather, heavy, union
from gossamer.ffn._triton._packed import SLOTS, TILE, Packed
from gossamer.ffn.costs import costs_of, sampled_groups
from gossamer.gemm._triton.linear_pack import launch_linear_pack
from gossamer.rowsparse._triton.dense_transpose import dense_transpose

BLOCK = 1 << 16
"""Rows that are on their way at one time."""
SAMPLE = 256
"""Rows whose gate tells how dense the others are."""


def sparse_ffn(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    threshold: Tensor | None,
    up_weight: Tensor | None,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_rows: Tensor | None,
    down_bias: Tensor | None,
    squared: bool,
    united: bool,
    step: int,
    unknown: bool,
    light: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Operator `sparse_ffn` -> (out [M, D], entries of each row [M], columns that groups of rows have in all), the
    latter two [0] where step is 0. `unknown`: a sample of rows decides whether all of them go through dense tiles.
    `light`: heavy rows are not expected, and may take longer."""
    m, n, d = x.shape[0], gate_weight.shape[0], down_weight.shape[0]
    if 0 < m <= few.ROWS and n and d:
        down = (down_weight if down_rows is None else down_rows.t(), down_bias)
        gate = (gate_weight, gate_bias, threshold)
        out, nnz = few.few(x, gate, (up_weight, up_bias), down, squared, step > 0)
        return out, nnz, nnz.new_zeros(sampled_groups(m, step))
    out = x.new_empty(m, d)
    nnz = torch.empty(m, dtype=torch.int32, device=x.device)
    sizes = nnz.new_empty(sampled_groups(m, step))
    if m == 0 or d == 0 or n == 0:
        out.copy_(out.new_zeros(d) if down_bias is None else down_bias)
        return out, nnz.zero_() if step else nnz.new_empty(0), sizes.zero_()
    gate_bias, threshold, up_bias, down_bias = (_contiguous(t) for t in (gate_bias, threshold, up_bias, down_bias))
    gate = (gate_weight.contiguous(), gate_bias, threshold)
    up = None if up_weight is None else (up_weight.contiguous(), up_bias)
    if down_rows is None:
        down_rows = down_weight.t() if down_weight.t().is_contiguous() else dense_transpose(down_weight)
    down = (down_rows.contiguous(), down_bias)
    x = x.contiguous()
    for first in range(0, m, BLOCK):
        part = slice(first, min(first + BLOCK, m))
        some = slice(sampled_groups(first, step), sampled_groups(part.stop, step))
        results = (out[part], nnz[part], sizes[some])
        _block(x[part], gate, up, down, down_weight, squared, united, step, unknown, light, results)
    return out, nnz if step else nnz.new_empty(0), sizes


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _block(
    x: Tensor,
    gate: tuple[Tensor, Tensor | None, Tensor | None],
    up: tuple[Tensor, Tensor | None] | None,
    down: tuple[Tensor, Tensor | None],
    down_weight: Tensor,
    squared: bool,
    united: bool,
    step: int,
    unknown: bool,
    light: bool,
    results: tuple[Tensor, Tensor, Tensor],
) -> None:
    (m, k), n, (out, nnz, sizes) = x.shape, gate[0].shape[0], results
    cost = costs_of(n, k, out.shape[1], up is not None, x)
    copied = not light and heavy.wants_rows(x, gate, None if up is None else up[0], down_weight)
    sample, most = None, 0
    if unknown and copied and step == 0:
        some = x[:: m // SAMPLE][:SAMPLE]
        sample, most = pack(some, *gate, None).counts, int(SAMPLE * cost.break_even(m))
    listed = heavy.start(m, cost.limit, sample, most, x)
    packed = pack(x, *gate, None if sample is None else listed[1:])
    unions = taken = None
    if step and not (united and step == 1):
        union.count(packed, cost.limit, step, n, sizes)
    if united:
        unions = union.unite(packed, cost.limit, n, squared, sizes if step == 1 else None)
        taken = unions.sizes
    rows = (listed, torch.empty_like(x) if copied else None)
    gather.gather(packed, x, up, down, out, nnz, rows, taken, squared)
    if unions is not None:
        union.project(unions, packed, cost.limit, x, up, down, out)
    heavy.project(rows, x, gate, up, down, down_weight, out, squared)


def pack(x: Tensor, weight: Tensor, bias: Tensor | None, threshold: Tensor | None, skip: Tensor | None) -> Packed:
    """The active entries of act(x @ weight.T + bias); on Hopper none where `skip` is below 0."""
    m, n = x.shape[0], weight.shape[0]
    values = x.new_empty(m, launch.cdiv(n, TILE.value), SLOTS.value)
    indices = torch.empty_like(values, dtype=torch.uint8)
    counts = torch.empty(values.shape[:2], dtype=torch.int16, device=x.device)
    launch_linear_pack(x, weight, bias, threshold, TILE.value, (values, indices, counts), skip=skip)
    return Packed(values, indices, counts)


EXAMPLES: dict[object, dict[str, object]] = {}
"""The kernels are those of `few`, `gather`, `union` and `heavy`."""

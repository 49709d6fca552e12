"""A feed-forward block whose gate is packed as it is computed, and what its rows need after that.

The gate is packed tile by tile (`gemm.linear_pack`). Then every row takes one of three ways, by counts that only the
device knows: the weights of its entries are gathered (`gather`), or those of the union of its group's entries
(`union`), or it goes through dense tiles (`heavy`). All kernels are launched, and leave at once where nothing is left
to them. Few rows have kernels of their own (`few`).

Calls that launch the same are repeated by a plan, with one piece of memory for all that lies between the kernels. With
2,048 rows the host took nearly five times as long as the device before (H200, PyTorch 2.11).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.ffn._triton import few, gather, heavy, union
from gossamer.ffn._triton._packed import LISTED, SLOTS, TILE, Packed, described
from gossamer.ffn.costs import MANY, costs_of, sampled_groups
from gossamer.gemm._triton.linear_pack import launch_linear_pack
from gossamer.rowsparse._triton.dense_transpose import launch_dense_transpose

BLOCK = 1 << 16
"""Rows that are on their way at one time."""
SAMPLE = 256
"""Rows whose gate tells how dense the others are."""

_plans = launch.Plans()


def sparse_ffn(
    x: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    threshold: Tensor | None,
    up_weight: Tensor | None,
    up_bias: Tensor | None,
    down_weight: Tensor,
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
        gate = (gate_weight, gate_bias, threshold)
        out, nnz = few.few(x, gate, (up_weight, up_bias), (down_weight, down_bias), squared, step > 0)
        return out, nnz, nnz.new_zeros(sampled_groups(m, step)) if step else torch.empty_like(nnz)
    light = light or m < MANY
    operands = (x, gate_weight, gate_bias, threshold, up_weight, up_bias, down_weight, down_bias)
    key = None
    if light and not (step or unknown or launch.INTERPRET):
        described_by, pointers, addresses = described(operands)
        key = (squared, united, x.dtype, x.device.index, tuning.tf32(), described_by)
        plan = _plans.get(key, x.device.index, addresses)
        if plan is not None:
            out = x.new_empty(m, d)
            _repeat(plan.launches, operands, pointers, out)
            none = torch.empty(0, dtype=torch.int32, device=x.device)
            return out, none, torch.empty_like(none)
    out = x.new_empty(m, d)
    nnz = torch.empty(m, dtype=torch.int32, device=x.device)
    sizes = nnz.new_empty(sampled_groups(m, step))
    if m == 0 or d == 0 or n == 0:
        out.copy_(out.new_zeros(d) if down_bias is None else down_bias)
        return out, nnz.zero_() if step else nnz.new_empty(0), sizes.zero_()
    gate = (gate_weight.contiguous(), gate_bias, threshold)
    up = None if up_weight is None else (up_weight.contiguous(), up_bias)
    turned = by_columns = down_weight.t().is_contiguous()
    down = (down_weight.t() if by_columns else x.new_empty(n, d), down_bias)
    x = x.contiguous()
    for first in range(0, m, BLOCK):
        part = slice(first, min(first + BLOCK, m))
        some = slice(sampled_groups(first, step), sampled_groups(part.stop, step))
        results = (out[part], nnz[part], sizes[some])
        weights = (gate, up, down, down_weight)
        launches = _block(x[part], *weights, turned, squared, united, step, unknown, light, results)
        turned = True
    own = (x, *gate, *(up or (None, None)), down_weight, down[1])
    if key is not None and launches is not None and m <= BLOCK and _same_memory(operands, own):
        _plans.keep(key, x.device, *launches)
    return out, nnz if step else nnz.new_empty(0), sizes


def _same_memory(given: Sequence[Tensor | None], read: Sequence[Tensor | None]) -> bool:
    """Whether nothing had to be copied."""
    return all(a is None or b is None or a.data_ptr() == b.data_ptr() for a, b in zip(given, read, strict=True))


class _Repeated(NamedTuple):
    """What a plan needs beside its launches: `inputs` makes the first one's descriptors; sizes are the bytes of values,
    indices and counts, of the list of heavy rows, of counts of entries, of parts of rows, of heavy rows' hidden
    activations, of a transposed weight, and of what `union.Unions` keeps in memory."""

    inputs: Callable[[Tensor, Tensor], tuple[Any, Any]]
    sizes: tuple[int, ...]


def _repeat(launches: Sequence[Any], operands: Sequence[Any], pointers: Sequence[int | None], out: Tensor) -> None:
    """Launches what `_block` did, with one piece of memory for all that lies between."""
    pack, turns, gathers, sums, projects, unions, (inputs, sizes) = launches
    room = torch.empty(sum(sizes), dtype=torch.uint8, device=out.device)
    at, parts = room.data_ptr(), []
    for size in sizes:
        parts.append(at)
        at += size
    packed, (listed, nnz, whole, hidden, rows), united = parts[:3], parts[3:8], parts[8:]
    x, gate, gate_bias, threshold, up, up_bias, down_weight, down_bias = pointers
    down, result = rows if turns is not None else down_weight, out.data_ptr()
    stream = torch._C._cuda_getCurrentRawStream(out.device.index)
    pack(stream, *inputs(operands[0], operands[1]), gate_bias, threshold, None, None, None, *packed, listed)
    if turns is not None:
        turns(stream, down_weight, rows)
    target, taken = result if sums is None else whole, None
    if united:
        *_, columns, values, taken = united
        unions[0](stream, *packed, *united)
    gathers(stream, *packed, x, up, up_bias, down, down_bias, target, nnz, listed, None, taken)
    if sums is not None:
        sums(stream, whole, down_bias, result)
    if united:
        if unions[1] is not None:
            unions[1](stream, x, up, up_bias, columns, taken, values)
        unions[2](stream, values, down, down_bias, columns, taken, packed[2], result)
    projects(stream, listed, x, gate, gate_bias, threshold, up, up_bias, hidden, down, down_bias, result)


def _block(
    x: Tensor,
    gate: tuple[Tensor, Tensor | None, Tensor | None],
    up: tuple[Tensor, Tensor | None] | None,
    down: tuple[Tensor, Tensor | None],
    down_weight: Tensor,
    turned: bool,
    squared: bool,
    united: bool,
    step: int,
    unknown: bool,
    light: bool,
    results: tuple[Tensor, Tensor, Tensor],
) -> tuple[Any, ...] | None:
    """Fills down with the transpose of down_weight unless it is `turned` already. Returns what repeats these launches
    where `_repeat` can."""
    (m, k), n, (out, nnz, sizes) = x.shape, gate[0].shape[0], results
    cost = costs_of(n, k, out.shape[1], up is not None, x)
    copied = not light and heavy.wants_rows(x, gate, None if up is None else up[0], down_weight)
    sample, most = None, 0
    listed = torch.empty(LISTED.value + m, dtype=torch.int32, device=x.device)
    if unknown and copied and step == 0:
        some = x[:: m // SAMPLE][:SAMPLE]
        sample, most = pack(some, *gate)[0].counts, int(SAMPLE * cost.break_even(m))
        heavy.start(listed, cost.limit, sample, most)
        packed, packs = pack(x, *gate, skip=listed[1:])
    else:
        packed, packs = pack(x, *gate, words=(listed, cost.limit))
        if packs is None:
            heavy.start(listed, cost.limit, None, 0)
    turns = None
    if not turned:
        # Where Hopper packs, on the multiprocessors that have no more tiles.
        if down_weight.stride(1) == 1:
            turns = launch_dense_transpose(down_weight, down[0], packs is not None)
        else:
            down[0].copy_(down_weight.t())
    unions = taken = None
    if step and not (united and step == 1):
        union.count(packed, cost.limit, step, n, sizes)
    if united:
        unions = union.unite(packed, cost.limit, n, squared, sizes if step == 1 else None)
        taken = unions.sizes
    rows = (listed, torch.empty_like(x) if copied else None)
    gathers, sums, parts = gather.gather(packed, x, up, down, out, nnz, rows, taken, squared)
    shared: tuple[launch.Bound | None, ...] = ()
    if unions is not None:
        shared = (unions.launch, *union.project(unions, packed, cost.limit, x, up, down, out))
    projects = heavy.project(rows, x, gate, up, down, down_weight, out, squared)
    needed = (packs, gathers, projects, *shared[::2])
    if None in needed or not _aligned(x, gate[0]) or (turns is None and not turned):
        return None
    from gossamer.gemm._gluon.linear_pack import descriptors

    whole = 4 * m * parts * out.shape[1] if sums is not None else 0
    between = (packed.values, packed.indices, packed.counts, listed, nnz)
    sizes_of = [*(t.nbytes for t in between), whole, m * n * x.element_size(), 0 if turned else down[0].nbytes]
    sizes_of += [] if unions is None else [t.nbytes for t in unions.memory]
    # Every part begins on 256 bytes, as the allocator's would.
    repeated = _Repeated(descriptors, tuple(-(-size // 256) * 256 for size in sizes_of))
    return packs, turns, gathers, sums, projects, shared, repeated


def _aligned(*operands: Tensor) -> bool:
    """Whether rows begin on 16 bytes, so that Hopper's kernel read the operands themselves."""
    return all((t.data_ptr() | t.stride(0) * t.element_size()) % 16 == 0 for t in operands)


def pack(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    threshold: Tensor | None,
    *,
    skip: Tensor | None = None,
    words: tuple[Tensor | None, int] = (None, 0),
) -> tuple[Packed, launch.Bound | None]:
    """The active entries of act(x @ weight.T + bias); on Hopper none where `skip` is below 0. Words, and what comes
    beside the entries, as of `launch_linear_pack`."""
    m, n = x.shape[0], weight.shape[0]
    values = x.new_empty(m, launch.cdiv(n, TILE.value), SLOTS.value)
    indices = torch.empty_like(values, dtype=torch.uint8)
    counts = torch.empty(values.shape[:2], dtype=torch.int16, device=x.device)
    out = (values, indices, counts)
    packs = launch_linear_pack(x, weight, bias, threshold, TILE.value, out, skip=skip, words=words)
    return Packed(values, indices, counts), packs


EXAMPLES: dict[object, dict[str, object]] = {}
"""The kernels are those of `few`, `gather`, `union` and `heavy`."""

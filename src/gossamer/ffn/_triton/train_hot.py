"""A sparse block's hot neurons in training: the neurons that many rows have, as dense products.

An entry of a list takes the time in which rows of weights are read. A neuron that more than one row in 64 has takes
less time as a column of a dense product: the activations of trained models have some hundred of these, with half of all
entries. `choose` counts the neurons of some rows, and gives the most frequent ones a slot each; they stand in no list,
but in `[M, H]`, a column for each slot, whose products are PyTorch's. Which neurons these are only the device knows. A
neuron without a slot is gathered, however many rows have it.
"""

import torch
import triton.language as tl
from torch import Tensor

from gossamer._core import launch
from gossamer.ffn._triton.entry_lists import RANKS, Hot, Weights, columns_at, through
from gossamer.ffn.costs import hot_bound
from gossamer.rowsparse.formats import sums_over_rows

SAMPLED = 2048
"""Rows of which the neurons are counted, about."""
LEAST = 64
"""Rows that have a neuron, at least, before it is hot."""
FLAT = 1024
"""Activations of a program."""


@launch.kernel
def _ffn_hot_sample_kernel(indices_ptr, counts_ptr, fired_ptr, step, tiles, slots, tile, limit, BLOCK: tl.constexpr):
    """Program (one of every `step` rows): counts its neurons, unless it goes through dense tiles as a whole."""
    row = tl.program_id(0).to(tl.int64) * step
    total = 0
    most = 0
    for first_tile in range(0, tiles, BLOCK):
        at = first_tile + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + row * tiles + at, mask=at < tiles, other=0).to(tl.int32)
        most = tl.maximum(most, tl.max(counts, axis=0))
        total += tl.sum(counts, axis=0)
    if (most <= slots) & (total <= limit):
        for first_tile in range(0, tiles, BLOCK):
            at = first_tile + tl.arange(0, BLOCK)
            counts = tl.load(counts_ptr + row * tiles + at, mask=at < tiles, other=0).to(tl.int32)
            for first in range(0, tl.max(counts, axis=0), RANKS):
                held, column = columns_at(indices_ptr + row * tiles * slots, at, counts, first, slots, tile)
                tl.atomic_add(fired_ptr + column, 1, mask=held, sem="relaxed")


@launch.kernel
def _ffn_hot_hidden_kernel(
    values_ptr, bias_ptr, through_hidden_ptr, penalty_ptr, hidden_ptr, through_ptr, l1_ptr, total, H,
    BLOCK: tl.constexpr, SQUARED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK of the M x H activations). Forward: adds the bias [H], if any, to the up projection that stands
    behind the gate in values_ptr, and writes the hidden activations, and the sum of these without signs. Backward, with
    the gradients of the hidden activations: those through the gate and the up projection, too, [M, 1 or 2, H]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = at < total
    z = tl.load(values_ptr + at, mask=held, other=0.0)
    active = z != 0
    up = None
    if GATED:
        up = tl.load(values_ptr + total + at, mask=held, other=0.0)
        if bias_ptr is not None:
            up = (up.to(tl.float32) + tl.load(bias_ptr + at % H).to(tl.float32)).to(z.dtype)
            tl.store(values_ptr + total + at, up, mask=held)
        up = up.to(tl.float32)
    if through_ptr is None:
        hidden = z.to(tl.float32)
        if SQUARED:
            hidden = (hidden * hidden).to(z.dtype).to(tl.float32)
        if GATED:
            # Zeros where nothing is active, whatever the other factor.
            hidden = tl.where(active, (hidden * up).to(z.dtype).to(tl.float32), 0.0)
        tl.store(l1_ptr + tl.program_id(0), tl.sum(tl.abs(hidden), axis=0))
    else:
        grad = tl.load(through_hidden_ptr + at, mask=held, other=0.0).to(tl.float32)
        hidden, through_gate, through_up = through(grad, z, active, up, penalty_ptr, SQUARED)
        to = through_ptr + at // H * (2 * H if GATED else H) + at % H
        tl.store(to, through_gate, mask=held)
        if GATED:
            tl.store(to + H, through_up, mask=held)
    tl.store(hidden_ptr + at, hidden, mask=held)


def choose(packed: tuple[Tensor, Tensor, Tensor], tile: int, n: int, limit: int, gated: bool, capacity: int) -> Hot:
    """packed and limit: as `entry_lists.row_lists` takes them. Slots that are not in use name neuron 0: their values
    are zeros, and `Slots` gives zeros for its weights."""
    values, indices, counts = packed
    m, tiles, slots = values.shape
    fired, listed = (torch.zeros(size, dtype=torch.int32, device=values.device) for size in (n, 2 + capacity))
    step = m // SAMPLED | 1
    rows, block = launch.cdiv(m, step), min(max(launch.next_power_of_2(tiles), 16), 64)
    args = (indices, counts, fired, step, tiles, slots, tile, limit)
    _ffn_hot_sample_kernel((rows, 1, 1), args, {"BLOCK": block}, num_warps=1)
    least = min(rows, max(int(hot_bound(rows, values.element_size(), values.device)), launch.cdiv(LEAST, step)))
    torch.sum(fired > least, 0, dtype=torch.int32, out=listed[1])
    slot = torch.full_like(fired, -1)
    if capacity:
        # Of neurons that are equally frequent the first have slots.
        order = fired.argsort(descending=True, stable=True)[:capacity]
        place = torch.arange(order.shape[0], dtype=torch.int32, device=values.device)
        torch.clamp(listed[1], max=order.shape[0], out=listed[0])
        unused = place >= listed[0]
        listed[2 : 2 + order.shape[0]] = order.masked_fill(unused, 0)
        slot.scatter_(0, order, place.masked_fill(unused, -1))
    return Hot(listed, slot, values.new_zeros(2 if gated else 1, m, capacity))


class Slots:
    """The neurons of `Hot.listed`, and weights by their slots. Slots that are not in use have zeros, whatever the
    weights of neuron 0 are."""

    def __init__(self, listed: Tensor) -> None:
        self.neurons = listed[2:]
        self._unused = torch.arange(self.neurons.shape[0], device=listed.device) >= listed[0]

    def gather(self, weight: Tensor) -> Tensor:
        """The rows of the neurons that have slots, `[H, ...]`."""
        return self._held(weight.index_select(0, self.neurons))

    def add(self, to: Tensor, rows: Tensor) -> None:
        """Adds rows `[H, ...]`, which it changes, to those of their neurons."""
        to.index_add_(0, self.neurons, self._held(rows))

    def _held(self, rows: Tensor) -> Tensor:
        return rows.masked_fill_(self._unused.view(-1, *[1] * (rows.dim() - 1)), 0)


def activations(
    values: Tensor, bias: Tensor | None, grad: Tensor | None, penalty: Tensor | None, squared: bool
) -> tuple[Tensor, Tensor]:
    """values: of `Hot`. (hidden activations `[M, H]`; the sums of their |.|, in parts, or, with the gradients of them,
    those through gate and up, `[M, (1 or 2) H]`)"""
    gates, m, capacity = values.shape
    programs = launch.cdiv(m * capacity, FLAT)
    hidden, through, parts = values.new_empty(m, capacity), None, None
    if grad is None:
        result = parts = torch.empty(programs, dtype=torch.float32, device=values.device)
    else:
        result = through = values.new_empty(m, gates * capacity)
    args = (values, bias, grad, penalty, hidden, through, parts, m * capacity, capacity)
    meta = {"BLOCK": FLAT, "SQUARED": squared, "GATED": gates == 2}
    _ffn_hot_hidden_kernel((programs, 1, 1), args, meta, num_warps=4)
    return hidden, result


def forward(hot: Hot, x: Tensor, weights: Weights, out: Tensor, l1: Tensor, squared: bool) -> Tensor:
    """Adds the hot neurons' products to out `[M, D]`, and puts the up projection into hot.values. l1: the sums of
    |hidden| of rows; with those of hot neurons, their sum."""
    if not hot.values.shape[2]:
        return l1.sum()
    slots = Slots(hot.listed)
    bias = None if weights.up_bias is None else slots.gather(weights.up_bias)
    if weights.up is not None:
        torch.mm(x, slots.gather(weights.up).t(), out=hot.values[1])
    hidden, parts = activations(hot.values, bias, None, None, squared)
    out.addmm_(hidden, slots.gather(weights.down))
    return l1.sum() + parts.sum()


def backward(
    listed: Tensor,
    values: Tensor,
    x: Tensor,
    weights: Weights,
    grad: Tensor,
    penalty: Tensor | None,
    dx: Tensor,
    grads: tuple[Tensor, Tensor, Tensor | None],
    sums: Tensor | None,
    squared: bool,
) -> None:
    """Adds the hot neurons' part to dx, to the gradients of W_down, W_gate and W_up, which are zeros there, and to sums
    `[2, N]`. values: of `Hot`."""
    gates, _, capacity = values.shape
    if not capacity:
        return
    slots = Slots(listed)
    through_hidden = grad @ slots.gather(weights.down).t()
    hidden, through = activations(values, None, through_hidden, penalty, squared)
    inner = [slots.gather(weight) for weight in (weights.gate, weights.up) if weight is not None]
    dx.addmm_(through, torch.cat(inner))
    found = (hidden.t() @ grad, *(through.t() @ x).chunk(gates))
    for to, part in zip(grads, found, strict=False):
        if to is not None:
            slots.add(to, part)
    if sums is not None:
        of = sums_over_rows(through, sums.dtype).view(gates, capacity)
        sums[:gates].index_add_(1, slots.neurons, of)


EXAMPLES = {
    _ffn_hot_sample_kernel: {"indices_ptr": "*u8", "counts_ptr": "*i16", "BLOCK": 32, "num_warps": 1},
    _ffn_hot_hidden_kernel: {
        "bias_ptr": None, "BLOCK": 1024, "SQUARED": False, "GATED": True,
    },
}  # fmt: skip

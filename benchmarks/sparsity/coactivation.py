"""Neurons that fire together, moved next to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.sparsity.order import propose, seconds, tiles
from gossamer._core import checks
from gossamer.ffn.block import Block, activated, run
from gossamer.ffn.costs import GROUP
from gossamer.sparsity.statistics import Batch, observe, run_batches, sparse_blocks

_OPERATOR = "coactivation"
_MEASURED = 4096
"""Rows that a block is measured on, which are kept of each."""


class _Place(NamedTuple):
    """Where a weight or bias is: the parameter of a module, found by its path, which of `parts` equal parts of it, and
    along which dimension its neurons lie."""

    path: str
    module: nn.Module
    parameter: str
    part: int
    parts: int
    dim: int


@dataclass(frozen=True)
class NeuronOrder:
    """What is proposed for one block.

    Args:
        order: `[N]` int64 on the CPU: the neuron that comes to each place.
        union: neurons that 32 neighbouring tokens have in all, on average.
        before, after: tiles of neighbouring neurons in which these lie, on average, as the neurons are and in the
            order. Groups of tokens that the order was made from are not among those that are counted.
        path: the way that the block goes, and was measured, or None.
        seconds_before, seconds_after: of the block on up to 4,096 rows of its input in the last batch; NaN where it was
            not measured.
    """

    order: Tensor
    union: float
    before: float
    after: float
    path: str | None = None
    seconds_before: float = float("nan")
    seconds_after: float = float("nan")

    @property
    def predicted(self) -> float:
        """How many times fewer tiles have to be loaded."""
        return self.before / self.after if self.after else 1.0

    @property
    def measured(self) -> float:
        """How many times less time the block takes; NaN where it was not measured."""
        return self.seconds_before / self.seconds_after


class Coactivation:
    """Proposed orders of neurons. `print` it for what they gain, `apply` them, `undo` them.

    Attributes:
        layers: `NeuronOrder` by the name of the block's module.
        tile: neurons of a tile.
        missed: blocks for which nothing is proposed: not called, or not as sparse ones, or with too few tokens.
        applied: whether the model's neurons are in these orders.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, NeuronOrder],
        places: dict[str, list[_Place]],
        tile: int,
        missed: tuple[str, ...] = (),
    ) -> None:
        self.layers, self.tile, self.missed, self.applied = layers, tile, missed, False
        self._model, self._places = model, places

    def apply(self) -> None:
        """Moves neurons, in place: rows of the weights and biases of gate and up, and columns of the down projection.

        The model computes the same up to rounding. What an optimizer keeps of its parameters is not moved.

        Raises:
            ValueError: applied already, or a layer is no longer what it was, such as one with an adapter since.
        """
        if self.applied:
            raise ValueError(
                "sparsity.Coactivation.apply: the orders must not be applied yet, but are. Call undo first."
            )
        self._move("apply", {name: found.order for name, found in self.layers.items()})
        self.applied = True

    def undo(self) -> None:
        """Moves neurons back, to the same bits.

        Raises:
            ValueError: not applied, or a layer is no longer what it was.
        """
        if not self.applied:
            raise ValueError("sparsity.Coactivation.undo: the orders must be applied, but are not. Call apply first.")
        self._move("undo", {name: found.order.argsort() for name, found in self.layers.items()})
        self.applied = False

    def _move(self, what: str, orders: dict[str, Tensor]) -> None:
        now = dict(self._model.named_modules())
        for place in (place for places in self._places.values() for place in places):
            module = now.get(place.path)
            # What adapts a layer takes its place and calls it, and would not be moved.
            if module is not place.module or type(module) is not nn.Linear or place.parameter not in module._parameters:
                raise ValueError(
                    f"sparsity.Coactivation.{what}: {place.path!r} must be the plain nn.Linear that it was, got "
                    f"{type(module).__name__}."
                )
        with torch.no_grad():
            for name, places in self._places.items():
                for place in places:
                    parameter = place.module._parameters[place.parameter]
                    assert parameter is not None
                    held = parameter.chunk(place.parts)[place.part]
                    held.copy_(held.index_select(place.dim, orders[name].to(held.device)))

    def __str__(self) -> str:
        lines = [
            f"{'layer':<32} {'union of 32':>11} {f'tiles of {self.tile}':>12} {'ordered':>9} {'predicted':>9} "
            f"{'way':>8} {'before':>11} {'after':>11} {'measured':>9}"
        ]
        for name, found in self.layers.items():
            lines.append(
                f"{name:<32} {found.union:>11.1f} {found.before:>12.1f} {found.after:>9.1f} {found.predicted:>8.2f}x "
                f"{found.path or '-':>8} {found.seconds_before * 1e6:>8.1f} us {found.seconds_after * 1e6:>8.1f} us "
                f"{found.measured:>8.2f}x"
            )
        if self.missed:
            lines.append(f"nothing proposed for: {', '.join(self.missed)}")
        return "\n".join(lines)


def coactivation(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    tile: int = 64,
    groups: int = 2048,
    measure: bool = True,
    progress: Callable[[int, int | None], Any] | None = None,
) -> Coactivation:
    """Proposes an order of each block's neurons in which those that neighbouring tokens have in common are neighbours.

    A block that loads weights by whole tiles reads fewer of them then. Gathering and unions read the same weights in
    any order, so that the measured gain of today's ways says how little or much that order matters to them; the
    predicted one counts tiles. Nothing is changed before `apply`.

    Args:
        model: `nn` modules or a model of transformers after `integrations.transformers.patch(model, sparse=True)`. A
            parameter that several blocks share cannot be ordered.
        batches: as in `statistics`.
        tile: neighbouring neurons that are loaded together.
        groups: of 32 neighbouring tokens, how many at most are kept of a block; spread over what was read.
        measure: whether the blocks are timed in both orders.
        progress: called with (steps done, steps in all or None): a step is a batch, and then a block.

    Returns:
        A `Coactivation`.

    Raises:
        ValueError: no sparse block in model, too few tokens, a size below 1, or a shared parameter.

    Source: this package's own; that co-active neurons are placed together is the idea of PowerInfer (arXiv 2312.12456)
    and its successors.

    >>> mlp = gossamer.nn.GatedMLP(8, 24, activation="relu")
    >>> proposal = coactivation(mlp, [torch.randn(4, 64, 8)], tile=8)
    >>> proposal.layers[""].after <= 3
    True
    """
    checks.positive(_OPERATOR, "tile", tile, "It is a number of neurons.")
    checks.positive(_OPERATOR, "groups", groups, "It is a number of groups of tokens.")
    blocks = sparse_blocks(_OPERATOR, model)
    given = list(batches)
    kept: dict[str, list[Tensor]] = {}
    last: dict[str, Block] = {}

    def collect(name: str, block: Block) -> None:
        x = block.x.reshape(-1, block.x.shape[-1])
        whole = x.shape[0] // GROUP
        if whole:
            # As many of each batch as make up `groups`, and at least two, one to order by and one to count.
            step = max(1, whole * len(given) // max(groups, 2 * len(given)))
            rows = x[: whole * GROUP].view(whole, GROUP, -1)[::step].flatten(0, 1)
            active = activated(block._replace(x=rows)) != 0
            kept.setdefault(name, []).append(active.view(-1, GROUP, active.shape[1]).any(1))
            last[name] = block._replace(x=x[: _MEASURED if measure else 0].clone())

    observe(_OPERATOR, blocks, collect)
    steps = len(given) + len(blocks)
    try:
        run_batches(model, given, None, None if progress is None else lambda done, _: progress(done, steps))
    finally:
        for sparse_block in blocks.values():
            sparse_block.observer = None
    layers, places = {}, {}
    for number, (name, held) in enumerate(kept.items(), len(given) + 1):
        bits = torch.cat(held).cpu().numpy()
        if len(bits) < 2:
            continue
        places[name] = _places(model, name, last[name])
        layers[name] = _proposed(bits, tile)
        path = blocks[name].last_path
        if measure and path is not None:
            layers[name] = _measured(layers[name], last[name], path)
        if progress is not None:
            progress(number, steps)
    if not layers:
        raise ValueError(f"{_OPERATOR}: batches must bring {2 * GROUP} tokens to a block, but none got as many.")
    return Coactivation(model, layers, places, tile, tuple(name for name in blocks if name not in layers))


def _proposed(bits: np.ndarray, tile: int) -> NeuronOrder:
    """Made from every second group, and judged by the others."""
    order, judged = propose(bits[::2], tile), bits[1::2]
    union = float(judged.sum() / len(judged))
    return NeuronOrder(torch.from_numpy(order), union, tiles(judged, tile), tiles(judged[:, order], tile))


def _measured(found: NeuronOrder, block: Block, path: str) -> NeuronOrder:
    order = found.order.to(block.x.device)

    def rows(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.detach().index_select(0, order)

    moved = block._replace(
        gate_weight=block.gate_weight.detach().index_select(0, order),
        gate_bias=rows(block.gate_bias),
        up_weight=rows(block.up_weight),
        up_bias=rows(block.up_bias),
        down_weight=block.down_weight.detach().index_select(1, order),
    )
    # The same for both: a weight whose transpose is contiguous needs no copy.
    both = [b._replace(down_weight=b.down_weight.detach().t().contiguous().t()) for b in (block, moved)]
    with torch.no_grad():
        calls = [lambda b=b: run(_OPERATOR, b, path, None) for b in both]
        before, after = seconds(calls, block.x.device)
    return replace(found, path=path, seconds_before=before, seconds_after=after)


def _places(model: nn.Module, name: str, block: Block) -> list[_Place]:
    """Where the parameters of a block are."""
    held = {
        id(parameter): (path, module, key)
        for path, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    }
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    found = []
    operands = ((block.gate_weight, 0), (block.gate_bias, 0), (block.up_weight, 0), (block.up_bias, 0))
    for tensor, dim in (*operands, (block.down_weight, 1)):
        if tensor is None:
            continue
        owner = tensor if id(tensor) in held else tensor._base
        if owner is None or id(owner) not in held or uses[id(owner)] > 1:
            raise ValueError(f"{_OPERATOR}: weights and biases of {name!r} must be parameters of one layer each.")
        parts = owner.shape[0] // tensor.shape[0]
        part = tensor.storage_offset() // tensor.numel() if parts > 1 else 0
        found.append(_Place(*held[id(owner)], part, parts, dim))
    return found

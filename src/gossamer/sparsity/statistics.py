"""Counts of the active neurons of a model's sparse blocks, on the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gossamer._core.modes import evaluating
from gossamer.ffn import SparseBlock
from gossamer.ffn.block import Block, activated

if TYPE_CHECKING:
    from typing_extensions import Self

_ELEMENTS = 1 << 24
"""Activations in memory at one time."""
Batch = Tensor | Mapping[str, Any] | tuple[Any, ...]


@dataclass
class LayerStatistics:
    """Counts of one block, int64 on its device. Properties wait for the device; adding to counts does not.

    Args:
        histogram: `[N + 1]`, how many tokens had that many entries.
        fired: `[N]`, on how many tokens each neuron fired.
        position_entries, position_tokens: `[T]`, the entries and the number of tokens by position in their sequence.
        token_entries, token_tokens: `[V]`, the same by token.

    >>> LayerStatistics.empty(6, "cpu").tokens
    0
    """

    histogram: Tensor
    fired: Tensor
    position_entries: Tensor
    position_tokens: Tensor
    token_entries: Tensor
    token_tokens: Tensor

    @staticmethod
    def empty(num_neurons: int, device: torch.device | str, vocabulary: int = 0) -> LayerStatistics:
        """Of no tokens."""
        sizes = (num_neurons + 1, num_neurons, 0, 0, vocabulary, vocabulary)
        return LayerStatistics(*(torch.zeros(size, dtype=torch.int64, device=device) for size in sizes))

    @property
    def num_neurons(self) -> int:
        return self.fired.numel()

    @property
    def tokens(self) -> int:
        """How many tokens were counted."""
        return int(self.histogram.sum())

    @property
    def mean(self) -> float:
        """Entries of a token, on average; NaN of none."""
        values = torch.arange(self.histogram.numel(), device=self.histogram.device)
        return float((self.histogram * values).sum().double() / self.histogram.sum())

    @property
    def max(self) -> int:
        """Entries of the token that has the most."""
        return self.quantile(1.0)

    @property
    def dead(self) -> int:
        """Neurons that never fired."""
        return int((self.fired == 0).sum())

    def quantile(self, share: float) -> int:
        """The number of entries that at least this share of the tokens do not exceed; 0 of no tokens."""
        below = self.histogram.cumsum(0)
        return int((below < (share * below[-1]).ceil()).sum())

    def add(self, active: Tensor, ids: Tensor | None, positions: Tensor | None, mask: Tensor | None) -> None:
        """Counts tokens, without waiting for the device.

        Args:
            active: `[M, N]` bool, which neurons fired.
            ids, positions: `[M]` int64, or None where they are not known.
            mask: `[M]` bool, which rows count as tokens, or None for all.
        """
        if mask is not None:
            active = active & mask[:, None]
        entries = active.sum(1)
        weight = torch.ones_like(entries) if mask is None else mask.long()
        self.histogram.scatter_add_(0, entries, weight)
        self.fired += active.sum(0)
        if positions is not None:
            self.position_entries.scatter_add_(0, positions, entries)
            self.position_tokens.scatter_add_(0, positions, weight)
        if ids is not None and self.token_tokens.numel():
            self.token_entries.scatter_add_(0, ids, entries)
            self.token_tokens.scatter_add_(0, ids, weight)

    def reach(self, length: int) -> None:
        """Makes room for positions below length."""
        missing = length - self.position_tokens.numel()
        if missing > 0:
            for name in ("position_entries", "position_tokens"):
                held = getattr(self, name)
                setattr(self, name, torch.cat((held, held.new_zeros(missing))))


class Recorder:
    """Counts the active neurons of a model's sparse blocks while it is entered, without waiting for the device.

    The gate of a block is computed once more for it, in training as well as without gradients. `report` knows positions
    and tokens; otherwise positions alone are known, of blocks that are called with `[B, T, K]`.

    Args:
        model: `nn` modules or a model of transformers after `integrations.transformers.patch(model, sparse=True)`.

    Attributes:
        layers: `LayerStatistics` by the name of the block's module, of those that were called.

    Raises:
        ValueError: no sparse block in model, or another recorder listens to one.

    Warns when it is left and no block was called, or none as a sparse one, as those with a hook are not.

    >>> mlp = gossamer.nn.GatedMLP(8, 24, activation="relu")
    >>> with torch.no_grad(), Recorder(mlp) as recorder:
    ...     out = mlp(torch.ones(2, 5, 8))
    >>> recorder.layers[""].tokens
    10
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: dict[str, LayerStatistics] = {}
        self._blocks = sparse_blocks("sparsity.Recorder", model)
        self._vocabulary = _vocabulary(model)
        self._two_sided = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self._batch: Mapping[str, Any] = {}

    def __enter__(self) -> Self:
        observe("sparsity.Recorder", self._blocks, self._count)
        return self

    def __exit__(self, error: Any, *_: Any) -> None:
        for block in self._blocks.values():
            block.observer = None
        if error is None and not self.layers:
            warnings.warn(
                f"sparsity.Recorder: nothing was recorded: no call reached one of {len(self._blocks)} sparse blocks. "
                "Calls of a module with a hook, an adapter or another activation than a ReLU do not.",
                stacklevel=2,
            )

    def read(self, batch: Batch) -> None:
        """Takes the tokens of the batch that the model is called with next."""
        if isinstance(batch, Tensor):
            batch = {} if batch.is_floating_point() else {"input_ids": batch}
        elif isinstance(batch, tuple):
            first = batch[0] if batch else None
            batch = {"input_ids": first} if isinstance(first, Tensor) and not first.is_floating_point() else {}
        self._batch = batch

    def _count(self, name: str, block: Block) -> None:
        x = block.x.reshape(-1, block.x.shape[-1])
        n = block.gate_weight.shape[0]
        if name not in self.layers:
            self.layers[name] = LayerStatistics.empty(n, x.device, self._vocabulary)
        found, (ids, mask) = self.layers[name], self._tokens(name, x.shape[0], x.device)
        length = ids.shape[-1] if ids is not None else block.x.shape[-2] if block.x.dim() > 2 else 0
        found.reach(length)
        positions = torch.arange(x.shape[0], device=x.device) % length if length else None
        flat = (None if ids is None else ids.flatten(), positions, None if mask is None else mask.flatten())
        span = max(1, _ELEMENTS // max(n, 1))
        for first in range(0, x.shape[0], span):
            some = slice(first, first + span)
            active = activated(block._replace(x=x[some])) != 0
            found.add(active, *(None if t is None else t[some] for t in flat))

    def _tokens(self, name: str, rows: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """ids and mask `[B, T]` of the rows that a block is called with, where they are the batch's."""
        side = "decoder_" if self._two_sided and "decoder" in name else ""
        ids, mask = (self._batch.get(f"{side}{kind}") for kind in ("input_ids", "attention_mask"))
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.numel() != rows:
            return None, None
        mask = mask if isinstance(mask, Tensor) and mask.shape == ids.shape else None
        return ids.to(device).long(), None if mask is None else mask.to(device) != 0


def run_batches(
    model: nn.Module,
    batches: Iterable[Batch],
    before: Callable[[Batch], Any] | None = None,
    progress: Callable[[int, int | None], Any] | None = None,
) -> None:
    """Calls a model with batches, in evaluation mode and without gradients."""
    total = len(batches) if isinstance(batches, Sized) else None
    with torch.no_grad(), evaluating(model):
        for number, batch in enumerate(batches, 1):
            if before is not None:
                before(batch)
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(*batch) if isinstance(batch, tuple) else model(batch)
            if progress is not None:
                progress(number, total)


def sparse_blocks(operator: str, model: nn.Module) -> dict[str, SparseBlock]:
    """The sparse blocks of a model by the names of their modules, in order."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{operator}: model must be a torch.nn.Module, got {type(model).__name__}.")
    modules = ((name, vars(module).get("sparse_block")) for name, module in model.named_modules())
    found = {name: block for name, block in modules if isinstance(block, SparseBlock)}
    if not found:
        raise ValueError(
            f"{operator}: model must have sparse blocks, got none. nn.GatedMLP and nn.MLP are some, and models of "
            "transformers have them after integrations.transformers.patch(model, sparse=True), where their activation "
            "is a ReLU or squared ReLU: others leave nothing out. print(patch(model, sparse=True)) says why."
        )
    return found


def observe(operator: str, blocks: Mapping[str, SparseBlock], call: Callable[[str, Block], Any]) -> None:
    """Has blocks call `call` with their names and operands."""
    taken = [name for name, block in blocks.items() if block.observer is not None]
    if taken:
        raise ValueError(f"{operator}: nothing else may listen to the blocks, but something does to {taken[0]!r}.")
    for name, block in blocks.items():
        block.observer = lambda operands, name=name: call(name, operands)


def _vocabulary(model: nn.Module) -> int:
    """How many tokens a model knows, or 0."""
    find: Any = getattr(model, "get_input_embeddings", None)
    embedding = None if find is None else find()
    if embedding is None:
        embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    return int(getattr(embedding, "num_embeddings", 0))

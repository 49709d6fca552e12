"""The recipe that makes a ReLU transformer sparse in training: L1's weight by step, dead neurons, and their rescue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from gossamer._core import checks


@dataclass(frozen=True)
class L1Schedule:
    """The weight of L1 in the loss, by optimizer step: 0 for `warmup` steps, a line for `ramp` steps, then constant.

    The loss is `cross_entropy + schedule(step) * l1`, where `l1` is the mean over layers of `ffn.Activity.l1`.

    Args:
        coefficient: where it ends. The paper recommends 2e-5, and 3e-4 with a warm-up.
        warmup: steps at 0, 5,000 in the paper.
        ramp: steps from 0 to `coefficient` after them, 5,000 in the paper.

    Raises:
        ValueError: a number below 0.
        TypeError: a number of another type.

    Source: Cetin et al., "Sparser, Faster, Lighter Transformer Language Models", equation 2, appendix C.3.

    >>> [L1Schedule(3e-4, warmup=100, ramp=100)(step) for step in (0, 100, 150, 200, 5000)]
    [0.0, 0.0, 0.00015, 0.0003, 0.0003]
    """

    coefficient: float
    warmup: int = 0
    ramp: int = 0

    def __post_init__(self) -> None:
        for name in ("coefficient", "warmup", "ramp"):
            checks.number("sparsity.L1Schedule", name, getattr(self, name), "0 switches it off.", zero=True)

    def __call__(self, step: int) -> float:
        """The weight in optimizer step number `step`, counted from 0."""
        if step < self.warmup:
            return 0.0
        return self.coefficient * min(1.0, (step - self.warmup) / self.ramp) if self.ramp else self.coefficient


class DeadNeuronTracker:
    """Which neurons fired for no token of an optimizer step, over all its micro-batches and all ranks.

    Counts stay on their device, and nothing waits for it.

    Args:
        group: the ranks that share a step; None takes all, where `torch.distributed` is initialised.

    Attributes:
        dead: bool, the shape of the counts: the neurons that were dead in the last whole step; None before.

    Source: Cetin et al., "Sparser, Faster, Lighter Transformer Language Models", appendix D.1.

    >>> tracker = DeadNeuronTracker()
    >>> tracker.add(torch.tensor([3, 0, 0]))
    >>> tracker.add(torch.tensor([0, 0, 2]))
    >>> tracker.step()
    tensor([False,  True, False])
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.dead: Tensor | None = None
        self._fired: Tensor | None = None

    def add(self, fired: Tensor) -> None:
        """Counts a micro-batch: `[N]` or `[L, N]`, on how many tokens each neuron fired (`ffn.Activity.fired`)."""
        fired = fired.detach()
        self._fired = fired.clone() if self._fired is None else self._fired.add_(fired)

    def step(self) -> Tensor:
        """Ends an optimizer step: returns `dead`, and begins to count anew.

        Raises:
            ValueError: nothing was added since the last step.
        """
        if self._fired is None:
            raise ValueError("sparsity.DeadNeuronTracker: step must follow add, got no counts since the last step.")
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self._fired, group=self.group)
        self.dead, self._fired = self._fired == 0, None
        return self.dead


@torch.no_grad()
def reinitialize_(
    weight: Tensor, dead: Tensor, *, rate: float = 0.1, std: float = 0.02, generator: torch.Generator | None = None
) -> None:
    """Moves the weights of dead neurons towards new random ones, in place; to be called after each optimizer step.

    Row j of a dead neuron becomes `(1 - rate) * weight[j] + rate * N(0, std^2)`, all others keep their bits. The
    function does not wait for the device. The optimizer's moments are left alone.

    Args:
        weight: `[N, K]` the weight that the activation follows, a neuron a row: `gate_proj.weight`, or `up_proj.weight`
            of a block without a gate. A DTensor that is split along N, as `fully_shard` makes it, gives the bits of one
            process where all ranks have generators in one state.
        dead: `[N]` bool, on the same device.
        rate: the share of the new weights, in [0, 1].
        std: of the new weights; that of the initialisation.
        generator: of the new weights, on weight's device; None takes PyTorch's.

    Raises:
        ValueError: shapes that do not fit, or a rate above 1 or below 0.

    Source: Cetin et al., "Sparser, Faster, Lighter Transformer Language Models", equation 6.

    >>> weight = torch.ones(3, 4)
    >>> reinitialize_(weight, torch.tensor([False, True, False]))
    >>> (weight != 1).any(1)
    tensor([False,  True, False])
    """
    operator = "sparsity.reinitialize_"
    if weight.dim() != 2 or dead.shape != weight.shape[:1]:
        raise ValueError(
            f"{operator}: weight must have shape [N, K] and dead [N], got {list(weight.shape)} and {list(dead.shape)}."
        )
    if not 0 <= rate <= 1:
        raise ValueError(f"{operator}: rate must be in [0, 1], got {rate}. The paper's is 0.1.")
    local: Any = weight.to_local() if isinstance(weight, DTensor) else weight
    # All ranks draw all rows, so that the rows of a neuron do not depend on how many ranks there are.
    new = torch.empty(weight.shape, dtype=local.dtype, device=local.device).normal_(0, std, generator=generator)
    rates = (dead.to(local.dtype) * rate)[:, None]
    if isinstance(weight, DTensor):
        mesh, places = weight.device_mesh, weight.placements
        if any(place.is_shard() and not place.is_shard(0) for place in places):
            raise ValueError(f"{operator}: weight must be split along N, its first dimension, got {places}.")
        new, rates = (distribute_tensor(t, mesh, places, src_data_rank=None).to_local() for t in (new, rates))
    local.lerp_(new, rates)


def scalars(l0: Tensor, dead: Tensor, **others: float) -> dict[str, float]:
    """Numbers of an optimizer step under the names that TensorBoard and Weights & Biases group into panels. The
    function waits for the device.

    Args:
        l0: `[L]`, active neurons of a token by layer.
        dead: `[L, N]` bool, as `DeadNeuronTracker.step` returns it.
        others: further numbers, which get their names.

    Returns:
        `l0`, `dead` (a share of all neurons), `l0/00`, `dead/00` and so on by layer, and the others.
        `wandb.log(found, step)` takes it as it is, and `writer.add_scalar(name, value, step)` its items.

    >>> scalars(torch.tensor([2.0, 4.0]), torch.tensor([[True, False], [False, False]]), loss=3.5)
    {'loss': 3.5, 'l0': 3.0, 'dead': 0.25, 'l0/00': 2.0, 'l0/01': 4.0, 'dead/00': 0.5, 'dead/01': 0.0}
    """
    counts, shares = l0.tolist(), dead.float().mean(1).tolist()
    found = {**others, "l0": sum(counts) / len(counts), "dead": sum(shares) / len(shares)}
    found |= {f"l0/{layer:02}": count for layer, count in enumerate(counts)}
    return found | {f"dead/{layer:02}": share for layer, share in enumerate(shares)}

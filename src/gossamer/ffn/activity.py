"""How active a block was on the tokens of one call: the term that training makes smaller, and counts."""

from typing import NamedTuple

import torch
from torch import Tensor


class Activity(NamedTuple):
    """The activity of one feed-forward block in one call, on the device of its activations.

    Args:
        l1: `[]` float32, the sum of |h| over the N neurons, averaged over tokens; differentiable. h is what the down
            projection multiplies.
        l0: `[]` float32, the number of neurons that the activation let through, averaged over tokens.
        fired: `[N]` int64, on how many tokens the activation let each neuron through.
        unlisted: `[]` int64, how many tokens of a block on lists have entries that are in no list: tokens with very
            many, and those behind a list that is full. Dense tiles compute them, exactly and without a limit.

    Source: Cetin et al., "Sparser, Faster, Lighter Transformer Language Models", equation 2 with the sum over neurons
    that its released code takes, section 4.3.

    >>> Activity.of(torch.tensor([[0.0, 2.0], [0.0, 1.0]]), torch.tensor([[0.0, -6.0], [0.0, 1.0]])).l1
    tensor(3.5000)
    """

    l1: Tensor
    l0: Tensor
    fired: Tensor
    unlisted: Tensor

    @staticmethod
    def of(active: Tensor, hidden: Tensor) -> "Activity":
        """The activity of dense activations.

        Args:
            active: `[..., N]`, the output of the activation.
            hidden: `[..., N]`, its product with the up projection; `active` itself in a block without a gate.
        """
        tokens = max(hidden.numel() // max(hidden.shape[-1], 1), 1)
        fired = (active.detach() != 0).flatten(0, -2).sum(0)
        l1 = hidden.abs().sum(-1, dtype=torch.promote_types(hidden.dtype, torch.float32)).sum() / tokens
        return Activity(l1, fired.sum() / tokens, fired, fired.new_zeros(()))

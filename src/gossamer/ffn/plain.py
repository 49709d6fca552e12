"""The feed-forward block without a gate, sparse where its activation is."""

from torch import Tensor

from gossamer.ffn.activity import Activity
from gossamer.ffn.block import Block, run
from gossamer.ffn.tracker import BlockTracker
from gossamer.gemm.activations import Activation, resolve_fixed


def plain(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    activation: Activation | str = "relu",
    method: str = "auto",
    density: BlockTracker | None = None,
    with_activity: bool = False,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor | tuple[Tensor, Activity]:
    """activation(x @ up_weight.T) @ down_weight.T, multiplying down what the activation lets through.

    The block of OPT, of T5 version 1.0 and of the original transformer. Exact on every path, as `gated`.

    Args:
        x: `[..., K]`, float, any strides.
        up_weight: `[N, K]` as in `nn.Linear`, any strides; the dtype and device of x.
        down_weight, activation, density, with_activity: as in `gated`.
        method: as in `gated`, without `"fused"`: a plain block has no gate to compute beside up.
        up_bias: `[N]`, added in float32, or None.
        down_bias: `[D]`, or None.

    Returns:
        `[..., D]` in the dtype of the weights, differentiable in x, weights and biases.

    Raises:
        ValueError, TypeError: as `gated`.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.3; Cetin et al., "Sparser, Faster,
    Lighter Transformer Language Models", section C.2.

    >>> plain(torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 4)).tolist()
    [[12.0, 12.0], [12.0, 12.0]]
    """
    fixed = resolve_fixed("ffn.plain", activation).parameters
    if method == "fused":
        raise ValueError(
            'ffn.plain: method must be one of auto, gather, dense, got "fused": that makes gate and up in one '
            'product, and a plain block has no gate. "dense" computes every neuron.'
        )
    block = Block(x, up_weight, up_bias, fixed.threshold, None, None, down_weight, down_bias, fixed.name)
    return run("ffn.plain", block, method, density, with_activity)

"""The gated feed-forward block, sparse where its gate is."""

from torch import Tensor

from gossamer.ffn.activity import Activity
from gossamer.ffn.block import Block, run
from gossamer.ffn.tracker import BlockTracker
from gossamer.gemm.activations import Activation, resolve_fixed


def gated(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    activation: Activation | str = "relu",
    method: str = "auto",
    density: BlockTracker | None = None,
    with_activity: bool = False,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor | tuple[Tensor, Activity]:
    """(activation(x @ gate_weight.T) * (x @ up_weight.T)) @ down_weight.T, computing what the gate lets through.

    The result is exact on every path: rows with more entries than there is room for go through dense tiles.
    NaN and Inf in the weights of up and down reach the rows that have their column, and rows that share products with
    these: 16 neighbours on a CPU, and up to 16 rows of a call on a GPU. A dense product spreads them to all rows: so do
    the paths that compute all, and on lists, under gradients, those of a neuron that many rows have.

    Where a gradient is needed, `"gather"` computes both passes on lists of the entries that the gate lets through,
    equations 3 and 4 of the paper, and keeps these and x alone; `"auto"` does where `density` says that it
    takes less time, and else computes all, as `gemm.gated_mlp`.

    Args:
        x: `[..., K]`, float, any strides.
        gate_weight, up_weight: `[N, K]` as in `nn.Linear`, any strides; the dtype and device of x.
        down_weight: `[D, N]` as in `nn.Linear`, the dtype and device of x. The rows of its transpose are gathered: with
            many rows on a GPU a transposed copy is made in each call, unless `down_weight.t()` is contiguous.
        activation: of the gate: `"relu"`, `"relu2"` (squared), or `gemm.JumpReLU(threshold)` without a bandwidth,
            which keeps z > threshold (FATReLU); the threshold has no gradient.
        method: `"gather"` multiplies the weights of each row's entries, and rows with very many in dense tiles; a CPU
            multiplies the whole block where most rows have very many;
            `"fused"` computes all, gate and up in one product (`"dense"` with a threshold); `"dense"` is plain PyTorch.
            `"auto"` takes what is fastest by what is known: without `density`, `"gather"` on the CPU, unless the block
            is small; on a GPU a path that computes all.
        density: the tracker that follows how sparse the block is from call to call, for `"auto"`.
        with_activity: whether the result is a pair whose second is an `ffn.Activity`: L1, which has a gradient, L0, and
            on how many rows each neuron fired. Without gradients a block then computes all.
        gate_bias, up_bias: `[N]`, added in float32, or None.
        down_bias: `[D]`, or None.

    Returns:
        `[..., D]` in the dtype of the weights, differentiable in x, weights and biases.

    Raises:
        ValueError: shapes or devices do not fit, or an activation or method that is not one of these.
        TypeError: dtypes differ or are not floating.

    Source: Cetin et al., "Sparser, Faster, Lighter Transformer Language Models", sections 3.3 and 3.4.

    >>> gated(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 3), torch.ones(5, 4)).tolist()[0]
    [36.0, 36.0, 36.0, 36.0, 36.0]
    """
    fixed = resolve_fixed("ffn.gated", activation).parameters
    gate = (gate_weight, gate_bias, fixed.threshold)
    block = Block(x, *gate, up_weight, up_bias, down_weight, down_bias, fixed.name)
    return run("ffn.gated", block, method, density, with_activity)

"""The backward pass of a gated block: a product of the library's, and a kernel of `linear_glu` after it."""

from torch import Tensor

from gossamer.gemm._triton.linear_glu import launch_glu_bwd


def gated_mlp_bwd_(grad: Tensor, down_weight: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Operator `gated_mlp_bwd_` -> what gate and up made, [M, N]; their gradients take their places."""
    hidden = grad @ down_weight
    launch_glu_bwd(hidden, gate, up, (gate, up), hidden, activation)
    return hidden

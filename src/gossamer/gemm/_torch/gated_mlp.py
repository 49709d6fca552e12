"""The backward pass of a gated block on the CPU."""

from torch import Tensor

from gossamer.gemm._torch.linear_glu import gradients


def gated_mlp_bwd_(grad: Tensor, down_weight: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Operator `gated_mlp_bwd_` -> what gate and up made, [M, N]; their gradients take their places."""
    hidden = grad @ down_weight
    for old, new in zip((gate, up, hidden), gradients(hidden, gate, up, activation)):
        old.copy_(new)
    return hidden

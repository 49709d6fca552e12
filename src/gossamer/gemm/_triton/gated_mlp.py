"""The backward pass of a gated block: a product of the library's, and a kernel of `linear_glu` after it. Hopper has one
for both, in `_gluon`."""

import torch
from torch import Tensor

from gossamer.gemm._triton.linear_glu import launch_glu_bwd
from gossamer.gemm.gated_mlp_path import choose_path


def gated_mlp_bwd_(grad: Tensor, down_weight: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Operator `gated_mlp_bwd_` -> what gate and up made, [M, N]; their gradients take their places."""
    if choose_path(grad, down_weight, gate, up) == "hopper":
        from gossamer.gemm._gluon import gated_mlp as hopper

        hidden = torch.empty_like(gate)
        hopper.launch_gated_mlp_bwd(grad, down_weight, gate, up, hidden, activation)
        return hidden
    hidden = grad @ down_weight
    launch_glu_bwd(hidden, gate, up, (gate, up), hidden, activation)
    return hidden

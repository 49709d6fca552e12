"""The backward pass of a gated block on the CPU."""

from torch import Tensor

from gossamer.gemm._torch.linear_glu import gradients
from gossamer.gemm.records import GatedMlpBwd


def gated_mlp_bwd(call: GatedMlpBwd) -> Tensor:
    """The product of activated gate and up, [M, N]."""
    hidden = call.grad @ call.down_weight
    for old, new in zip((call.gate, call.up, hidden), gradients(hidden, call.gate, call.up, call.activation)):
        old.copy_(new)
    return hidden

"""The backward pass of a gated block: a product of the library's, and a kernel of `linear_glu` after it."""

from torch import Tensor

from gossamer.gemm._triton.linear_glu import launch_glu_bwd
from gossamer.gemm.records import GatedMlpBwd


def gated_mlp_bwd(call: GatedMlpBwd) -> Tensor:
    """The product of activated gate and up, [M, N]."""
    hidden = call.grad @ call.down_weight
    launch_glu_bwd(hidden, call.gate, call.up, (call.gate, call.up), hidden, call.activation)
    return hidden

"""Dense products whose epilogue does more, and the sparse activations that such epilogues apply.

>>> linear_glu(torch.ones(2, 8), torch.ones(6, 8), activation="relu").shape
torch.Size([2, 3])
"""

from gossamer.gemm.activations import AbsTopK, BatchTopK, ClampedSwiGLU, GroupMax, JumpReLU, TopK
from gossamer.gemm.gated_mlp import gated_mlp
from gossamer.gemm.linear_glu import linear_glu
from gossamer.gemm.linear_pack import linear_pack

__all__ = [
    "AbsTopK",
    "BatchTopK",
    "ClampedSwiGLU",
    "GroupMax",
    "JumpReLU",
    "TopK",
    "gated_mlp",
    "linear_glu",
    "linear_pack",
]

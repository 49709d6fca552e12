"""Matrices with few stored entries per row: the container, packing, and products.

>>> rows = pack(torch.tensor([[0.0, 2.0, 0.0]]))
>>> matmul(rows, torch.eye(3)).tolist()
[[0.0, 2.0, 0.0]]
"""

from gossamer.rowsparse.convert import from_torch_sparse
from gossamer.rowsparse.density import Density, DensityTracker
from gossamer.rowsparse.edit import cat
from gossamer.rowsparse.matmul import matmul
from gossamer.rowsparse.pack import pack
from gossamer.rowsparse.rows import Rows
from gossamer.rowsparse.sampled_matmul import sampled_matmul
from gossamer.rowsparse.transpose import transpose

__all__ = [
    "Density",
    "DensityTracker",
    "Rows",
    "cat",
    "from_torch_sparse",
    "matmul",
    "pack",
    "sampled_matmul",
    "transpose",
]

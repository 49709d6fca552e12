"""Matrices with few stored entries per row: containers, packing, and their products.

>>> rows = pack(torch.tensor([[0.0, 2.0, 0.0]]))
>>> matmul(rows, torch.eye(3)).tolist()
[[0.0, 2.0, 0.0]]
"""

from gossamer.rowsparse.container import LinearSource, Packed
from gossamer.rowsparse.convert import convert, from_torch_sparse
from gossamer.rowsparse.density import Density, DensityTracker
from gossamer.rowsparse.edit import cat
from gossamer.rowsparse.formats import CSR, ELL, Rows, TwELL
from gossamer.rowsparse.matmul import matmul
from gossamer.rowsparse.pack import pack, unpack
from gossamer.rowsparse.sampled_matmul import sampled_matmul
from gossamer.rowsparse.transpose import transpose

__all__ = [
    "CSR",
    "Density",
    "DensityTracker",
    "ELL",
    "LinearSource",
    "Packed",
    "Rows",
    "TwELL",
    "cat",
    "convert",
    "from_torch_sparse",
    "matmul",
    "pack",
    "sampled_matmul",
    "transpose",
    "unpack",
]

"""Matrices of which only some blocks are stored: layouts, and tensors with their blocks.

>>> layout = Layout.from_mask(torch.eye(2), 16)
>>> from_dense(torch.ones(32, 32), layout).to_dense().sum().item()
512.0
"""

from gossamer.blocksparse.attention import attention
from gossamer.blocksparse.layout import Layout
from gossamer.blocksparse.relative import Relative
from gossamer.blocksparse.select_blocks import select_blocks
from gossamer.blocksparse.tensor import BlockSparseTensor, from_dense

__all__ = ["BlockSparseTensor", "Layout", "Relative", "attention", "from_dense", "select_blocks"]

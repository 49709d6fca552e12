"""Matrices of which only some blocks are stored: layouts, and tensors with their blocks.

>>> layout = Layout.from_mask(torch.eye(2), 16)
>>> from_dense(torch.ones(32, 32), layout).to_dense().sum().item()
512.0
"""

from gossamer.blocksparse.attention import attention
from gossamer.blocksparse.gather import gather
from gossamer.blocksparse.layout import Layout
from gossamer.blocksparse.rearrange import adapt_layout, cat, repeat, repeat_interleave, split
from gossamer.blocksparse.scatter_reduce import scatter, scatter_reduce
from gossamer.blocksparse.tensor import BlockSparseTensor, from_dense

__all__ = [
    "BlockSparseTensor",
    "Layout",
    "adapt_layout",
    "attention",
    "cat",
    "from_dense",
    "gather",
    "repeat",
    "repeat_interleave",
    "scatter",
    "scatter_reduce",
    "split",
]

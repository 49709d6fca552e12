"""Matrices of which only some blocks are stored: layouts, and tensors with their blocks.

>>> layout = Layout.from_mask(torch.eye(2), 16)
>>> from_dense(torch.ones(32, 32), layout).to_dense().sum().item()
512.0
"""

from gossamer.blocksparse.attention import attention
from gossamer.blocksparse.convert import from_block_mask, from_sparse_bsr, to_block_mask, to_sparse_bsr
from gossamer.blocksparse.gather import gather
from gossamer.blocksparse.layout import Layout
from gossamer.blocksparse.rearrange import adapt_layout, cat, repeat, repeat_interleave, split
from gossamer.blocksparse.rowwise import apply_rowwise, layer_norm, rms_norm
from gossamer.blocksparse.scatter_reduce import scatter, scatter_reduce
from gossamer.blocksparse.tensor import BlockSparseTensor, from_dense
from gossamer.blocksparse.validate import validate

__all__ = [
    "BlockSparseTensor",
    "Layout",
    "adapt_layout",
    "apply_rowwise",
    "attention",
    "cat",
    "from_block_mask",
    "from_dense",
    "from_sparse_bsr",
    "gather",
    "layer_norm",
    "repeat",
    "repeat_interleave",
    "rms_norm",
    "scatter",
    "scatter_reduce",
    "split",
    "to_block_mask",
    "to_sparse_bsr",
    "validate",
]

"""Matrices of which only some blocks are stored: layouts, and tensors with their blocks.

>>> layout = Layout.from_mask(torch.eye(2).bool(), 16)
>>> from_dense(torch.ones(32, 32), layout).to_dense().sum().item()
512.0
"""

from gossamer.blocksparse.attention import attention
from gossamer.blocksparse.convert import from_block_mask, from_sparse_bsr, to_block_mask, to_sparse_bsr
from gossamer.blocksparse.gather import gather
from gossamer.blocksparse.indexed import layout_of_indices
from gossamer.blocksparse.layout import Layout
from gossamer.blocksparse.matmul import matmul
from gossamer.blocksparse.patterns import causal, documents, global_tokens, sliding_window
from gossamer.blocksparse.rearrange import adapt, cat, merge, repeat, split, stack
from gossamer.blocksparse.relative import Relative
from gossamer.blocksparse.rowwise import layer_norm, rms_norm
from gossamer.blocksparse.scatter_reduce import scatter
from gossamer.blocksparse.select_blocks import select_blocks
from gossamer.blocksparse.softmax import softmax
from gossamer.blocksparse.tensor import BlockSparseTensor, from_dense
from gossamer.blocksparse.validate import validate

__all__ = [
    "BlockSparseTensor",
    "Layout",
    "Relative",
    "adapt",
    "attention",
    "cat",
    "causal",
    "documents",
    "from_block_mask",
    "from_dense",
    "from_sparse_bsr",
    "gather",
    "global_tokens",
    "layer_norm",
    "layout_of_indices",
    "matmul",
    "merge",
    "repeat",
    "rms_norm",
    "scatter",
    "select_blocks",
    "sliding_window",
    "softmax",
    "split",
    "stack",
    "to_block_mask",
    "to_sparse_bsr",
    "validate",
]

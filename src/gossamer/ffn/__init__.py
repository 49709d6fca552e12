"""Feed-forward blocks of transformers that compute what their activation lets through.

>>> gated(torch.ones(2, 8), torch.ones(6, 8), torch.ones(6, 8), torch.ones(8, 6), method="gather").shape
torch.Size([2, 8])
"""

from gossamer.ffn.activity import Activity
from gossamer.ffn.gated import gated
from gossamer.ffn.plain import plain
from gossamer.ffn.sparse_block import SparseBlock
from gossamer.ffn.tracker import BlockTracker

__all__ = ["Activity", "BlockTracker", "SparseBlock", "gated", "plain"]

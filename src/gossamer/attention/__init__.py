"""Attention in which each query takes selected keys: the indexer's scores, the selection, and attention to it.

>>> selection = Selection.from_mask(torch.ones(1, 3, 4, dtype=torch.bool).tril())
>>> selection.to_mask().shape
torch.Size([1, 1, 3, 4])
"""

from gossamer.attention.indexer_loss import indexer_loss
from gossamer.attention.indexer_scores import indexer_scores
from gossamer.attention.select_topk import AdaptiveK, select_topk
from gossamer.attention.selection import Selection
from gossamer.attention.sparse_attention import sparse_attention

__all__ = [
    "AdaptiveK",
    "Selection",
    "indexer_loss",
    "indexer_scores",
    "select_topk",
    "sparse_attention",
]

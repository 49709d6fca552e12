"""Attention in which each query takes selected keys: the indexer's scores, the selection, and what attends to it.

>>> selection = Selection.from_mask(torch.ones(1, 3, 4, dtype=torch.bool).tril())
>>> selection.to_mask().shape
torch.Size([1, 1, 3, 4])
"""

from gossamer.attention.indexer_scores import indexer_scores
from gossamer.attention.select_topk import AdaptiveK, select_topk
from gossamer.attention.selection import Selection

__all__ = ["AdaptiveK", "Selection", "indexer_scores", "select_topk"]

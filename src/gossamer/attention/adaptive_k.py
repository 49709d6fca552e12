"""Statistics that give an adaptive number of keys, outside of a selection: to calibrate a rule, or to train it.

Plain PyTorch on any device, a slab of queries at a time. A selection computes the same from the scores that it stores.
"""

import torch
from torch import Tensor

from gossamer.attention._torch.select_topk import by_rule
from gossamer.attention.indexer_scores import indexer_scores
from gossamer.attention.select_topk import AdaptiveK

SLAB = 1 << 24
"""Scores at a time: 64 MiB."""


@torch.no_grad()
def score_statistics(q_idx: Tensor, k_idx: Tensor, w: Tensor, bias: Tensor | None, granularity: int = 1) -> Tensor:
    """float32 `[B, T, 4]`: mean, variance, largest and entropy of the scores of the keys that each query sees.

    As many keys as queries, and causal. With a granularity of 4 the scores are those of units of four keys.
    """
    batch, _, length, _ = q_idx.shape
    rows = max(1, SLAB // max(batch * length, 1))
    parts = [torch.empty(batch, 0, 4, dtype=torch.float32, device=q_idx.device)]
    for first in range(0, length, rows):
        last = min(first + rows, length)
        given = (q_idx[:, :, first:last], k_idx[:, :last], w[:, first:last], bias)
        scores = indexer_scores(*given, out_dtype=torch.float32, causal=True)
        scores = torch.nn.functional.pad(scores, (0, -last % granularity), value=-torch.inf)
        scores = scores.unflatten(2, (-1, granularity)).amax(3)
        seen = torch.arange(first, last, device=q_idx.device)[:, None] // granularity
        inside = torch.arange(scores.shape[2], device=q_idx.device) <= seen
        count = seen + 1
        mean = scores.where(inside, 0).sum(2, keepdim=True) / count
        variance = (scores - mean).where(inside, 0).square().sum(2, keepdim=True) / (count - 1).clamp(min=1)
        log = scores.log_softmax(2)
        entropy = -(log.exp() * log).where(inside, 0).sum(2, keepdim=True)
        parts.append(torch.cat([mean, variance, scores.amax(2, keepdim=True), entropy], 2))
    return torch.cat(parts, 1)


def numbers_of_keys(statistics: Tensor, adaptive: AdaptiveK, granularity: int = 1) -> Tensor:
    """float32 `[B, T]`: how many keys the rule gives each query, before it is rounded down; differentiable in the
    rule's mean and predictor. A query that sees fewer takes all that it sees."""
    k_min, k_base, k_max = (k // granularity for k in (adaptive.k_min, adaptive.k_base, adaptive.k_max))
    seen = torch.arange(statistics.shape[1], device=statistics.device) // granularity + 1
    rule = (adaptive.rule, (k_min, k_base, k_max), adaptive.temperature, adaptive.mean, adaptive.predictor)
    return by_rule(*rule, statistics.unbind(2), seen).clamp(k_min, k_max) * granularity

"""Inputs as real models have them: selections that drift, and hidden states with a given pattern."""

import math
from typing import Any

import torch
from torch import Tensor

from gossamer.attention import Selection


def random_selection(
    num_queries: int,
    k: int,
    *,
    batch: int = 1,
    scopes: int = 1,
    jaccard: tuple[float, float] = (0.9, 0.8),
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Selection:
    """A causal selection that drifts as real ones do: neighbouring queries share most of their keys.

    A query takes the k visible keys with the largest scores. A key keeps its score for some time and then draws another
    one; each query sees it with a little noise of its own.

    Args:
        num_queries: T, also the number of keys.
        k: keys of each query; the first k queries take all that they see.
        batch, scopes: B and S.
        jaccard: how many of their keys two queries share, of all that either takes: at distance 1, and at distance 64.
            The second is below the first, and both are approximate.
        device, generator: as in `torch.randn`; the generator must be on `device`.

    Returns:
        `Selection` of T queries and T keys.

    Raises:
        ValueError: the shares do not fall within (0, 1), or rise with the distance.
    """
    near, far = (2 * share / (1 + share) for share in jaccard)
    if not 0 < far <= near < 1:
        raise ValueError(f"random_selection: jaccard must fall within (0, 1), got {jaccard}.")
    # Scores have an exponential tail, so that what noise and drift exchange does not depend on how many keys there are.
    noise, redrawn = (1 - near) * math.pi**0.5, 1 - far / near
    rows, t = batch * scopes, num_queries
    blocks, at = -(-t // 64), torch.arange(64, device=device)
    options: dict[str, Any] = {"device": device, "generator": generator}
    words = torch.zeros(rows, blocks, t, dtype=torch.int64, device=device)
    score = torch.rand(rows, 1, t, **options).log().neg()
    for block in range(blocks):
        last = min(64 * block + 64, t)
        queries = torch.arange(64 * block, last, device=device)[:, None]
        seen = torch.arange(last, device=device) <= queries
        new = torch.rand(rows, 1, t, **options).log().neg()
        # A key's moment lies in this block with the probability of being drawn again.
        moment = torch.rand(rows, 1, t, **options) * (64 / max(redrawn, 1e-9))
        if last > k:
            drawn = queries % 64 >= moment[..., :last]
            seen_score = torch.where(drawn, new[..., :last], score[..., :last])
            seen_score = seen_score + noise * torch.randn(seen_score.shape, **options)
            best = seen_score.masked_fill(~seen, -math.inf).topk(k, -1, sorted=False).indices
            seen = torch.zeros(seen_score.shape, dtype=torch.bool, device=device).scatter_(2, best, True) & seen
        words[:, block, :last] = (seen.long() << at[: len(queries), None]).sum(-2)
        score = torch.where(moment < 64, new, score)
    return Selection(words.view(batch, scopes, blocks, t), t)


def inputs_for(pattern: Tensor, weight: Tensor, *, steps: int = 20) -> tuple[Tensor, Tensor]:
    """Inputs of a layer whose ReLU lets through a given pattern: `relu(x @ weight.T + bias)` has its entries there.

    A step adds to x the weight rows of entries that are missing, and takes away those of entries too many. It works as
    long as the pattern is one that x can make at all, roughly for up to K / 10 entries a row; count what came out.

    Args:
        pattern: `[M, N]`, not 0 where there is to be an entry.
        weight: `[N, K]`, float, rows of about the same norm.
        steps: of the search, two products each.

    Returns:
        `(x, bias)`: `[M, K]` and `[N]` in the dtype of weight.
    """
    wanted, wide = pattern != 0, weight.float()
    norm = wide.square().sum(1).mean()
    # The largest eigenvalue of the product of a random matrix and its transpose bounds a step.
    rate = 1.0 / (norm * (1 + (weight.shape[0] / weight.shape[1]) ** 0.5) ** 2)
    x = wanted.float() @ wide / norm
    for _ in range(steps):
        z = (x.to(weight.dtype) @ weight.t()).float() - 0.5
        x += rate * torch.where(wanted, (0.25 - z).clamp(min=0), -(z + 0.25).clamp(min=0)) @ wide
    return x.to(weight.dtype), torch.full_like(weight[:, 0], -0.5)

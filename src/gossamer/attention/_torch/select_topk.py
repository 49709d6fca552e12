"""From the indexer's inputs to words of selected keys, on the CPU: a slab of queries at a time.

The definition that the kernels share. A query's scores are stored as *keys*, integers from 1 to 31,742 that divide the
range from 0 to the sum of its gates evenly, or with the activation "relu", whose scores have no bounds, numbers of 9
bits and an exponent, of either sign; 31,743 is NaN. Always-kept keys count as 31,744. A query takes the k first in
descending order of keys, ties in ascending order of columns. With a granularity of 4 a column is four neighbouring
keys, and has the largest of those that the query sees.
"""

import torch
from torch import Tensor

from gossamer.attention._torch.indexer_scores import gates_of, score_rows, visible_keys, working
from gossamer.attention._torch.selection import words_of_mask
from gossamer.attention.levels import CLOSED, FIRST_BITS, LEVELS, STEP_BITS, TINY, ZERO
from gossamer.attention.records import SelectTopk, WordsOfMask


def index_keys(
    q: Tensor, k: Tensor, gates: Tensor, bias: Tensor | None, scale: float, activation: str = "sigmoid"
) -> Tensor:
    """Keys [R, Tk] of one batch element's queries, int64."""
    relu = activation == "relu"
    total = gates.abs().sum(1, keepdim=True)
    gates = torch.where(total < CLOSED, torch.zeros_like(gates), gates * ((1 if relu else LEVELS) / total))
    scores = score_rows(q, k, gates, bias, scale, activation)
    if relu:
        steps = (scores.abs().float() + TINY).view(torch.int32).sub_(FIRST_BITS) >> STEP_BITS
        keys = ZERO + steps.clamp_(max=ZERO - 1) * scores.sign().int()
        return keys.masked_fill_(scores.isnan(), LEVELS + 2).long()
    return (scores + 1).round_().nan_to_num_(nan=LEVELS + 2).long()


def unit_keys(keys: Tensor, visible: Tensor, granularity: int) -> Tensor:
    """Keys [R, columns] of columns of `granularity` keys: the largest that is visible, or 0."""
    if granularity == 1:
        return keys
    keys = torch.where(torch.arange(keys.shape[1], device=keys.device) < visible[:, None], keys, 0)
    keys = torch.nn.functional.pad(keys, (0, -keys.shape[1] % granularity))
    return keys.unflatten(1, (-1, granularity)).amax(2)


def by_rule(
    rule: str, bounds: tuple[int, int, int], temperature: float, mean: Tensor | None, predictor: Tensor | None,
    statistics: tuple[Tensor, ...], seen: Tensor,
) -> Tensor:  # fmt: skip
    """The number that a rule gives queries that see so many columns, whose scores have this mean, variance, maximum and
    entropy; neither rounded nor bounded."""
    k_min, k_base, k_max = bounds
    average, variance, largest, entropy = statistics
    if rule == "entropy":
        return k_base * (0.5 + temperature * entropy / (seen + 1).log())
    assert mean is not None
    if rule == "variance":
        return k_base * (0.5 + 1 / (1 + temperature * variance / mean.float()))
    assert predictor is not None
    known = torch.stack([average, variance.sqrt(), largest], -1)
    hidden = (known @ predictor[:, :3].t() + predictor[:, 3]).relu()
    return k_min + (k_max - k_min) * (hidden @ predictor[:, 4] + mean.float()).sigmoid()


def rows_k(call: SelectTopk, keys: Tensor, visible: Tensor, gates: Tensor) -> Tensor:
    """How many columns each query takes, int64 [R]: from its visible keys [R, columns], and constants."""
    k_min, _, k_max = call.bounds
    inside = torch.arange(keys.shape[1], device=keys.device) < visible[:, None]
    step = gates.sum(1).float() / LEVELS
    level = torch.where(inside, keys - 1, 0)
    n = visible.clamp(min=1).float()
    average = level.sum(1).float() / n
    top = level.amax(1) if level.shape[1] else torch.zeros_like(visible)
    variance = entropy = average
    if call.rule == "entropy":
        below = (level - top[:, None]).float() * step[:, None]
        parts = torch.where(inside, below.exp(), 0)
        partition = parts.sum(1)
        entropy = partition.log() - (parts * below).sum(1) / partition
    else:
        off = torch.where(inside, (level.float() - average[:, None]) * step[:, None], 0)
        variance = off.square().sum(1) / (n - 1).clamp(min=1)
    statistics = (average * step, variance, top.float() * step, entropy)
    k = by_rule(call.rule, call.bounds, call.temperature, call.mean, call.predictor, statistics, n)
    # Not a number takes the fewest.
    return torch.where(k >= k_min, k.clamp(max=k_max), float(k_min)).long()


def take(keys: Tensor, visible: Tensor, k: Tensor, recent: Tensor, sinks: int) -> Tensor:
    """Mask [R, Tk] of the keys that each query takes of keys [R, Tk]. The first `visible` count, of which keys from
    `recent` on and the first `sinks` are always kept."""
    columns = torch.arange(keys.shape[1], device=keys.device)
    kept = (columns < sinks) | (columns >= recent[:, None])
    keys = torch.where(kept, LEVELS + 3, keys)
    # Distinct integers, in order of keys and then of columns: no sort has to be stable.
    order = torch.where(columns < visible[:, None], keys, 0) * keys.shape[1] + columns.flip(0)
    k = torch.minimum(k, visible)
    most = int(k.max()) if k.numel() else 0
    found = order.topk(most, dim=1).indices
    mask = torch.zeros_like(keys, dtype=torch.bool)
    return mask.scatter_(1, found, torch.arange(most, device=keys.device) < k[:, None])


def select_topk(call: SelectTopk) -> Tensor:
    """Operator `select_topk`."""
    q, k, w, bias, lengths = call[:5]
    scale, causal, window, sinks, workspace, granularity, activation = call[12:]
    (b, _, tq, _), tk, dtype = q.shape, k.shape[1], working(q.dtype)
    visible = visible_keys(tq, tk, causal, lengths, b, q.device)
    mask = torch.zeros(b, 1, tq, tk, dtype=torch.bool, device=q.device)
    bias = None if bias is None else bias.to(dtype)
    # A key and its order are 64-bit integers here.
    rows = max(1, workspace // max(16 * tk, 1))
    for i in range(b):
        all_keys, all_gates = k[i].to(dtype), gates_of(w[i].to(dtype), activation)
        for first in range(0, tq, rows):
            part = slice(first, first + rows)
            gates, seen = all_gates[part], visible[i, part]
            keys = index_keys(q[i, :, part].to(dtype), all_keys, gates, bias, scale, activation)
            keys, columns = unit_keys(keys, seen, granularity), -(-seen // granularity)
            wanted = rows_k(call, keys, columns, gates) if call.rule else torch.full_like(seen, call.bounds[1])
            recent = (seen - (window or 1 - granularity)).clamp(min=0) // granularity
            taken = take(keys, columns, wanted, recent, -(-sinks // granularity))
            taken = taken.repeat_interleave(granularity, 1)[:, :tk]
            mask[i, 0, part] = taken & (torch.arange(tk, device=q.device) < seen[:, None])
    return words_of_mask(WordsOfMask(mask))

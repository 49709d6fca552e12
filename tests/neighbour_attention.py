"""Calls of the operators of attention for `tests/neighbours.py`."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer import attention
from gossamer.attention.rotary_gates import rotary_gates
from tests.neighbours import Case, Results, Scenario


def visible(tq: int, tk: int, lengths: Tensor | None, b: int, causal: bool, least: int = 0) -> Tensor:
    """Bool [B, 1, Tq, Tk]: the keys in front of each query's own, or all; `least` is the first query's position."""
    held = torch.full((b,), tk) if lengths is None else lengths.long()
    keys = torch.arange(tk)
    seen = keys < held[:, None, None, None]
    if not causal:
        return seen.expand(b, 1, tq, tk)
    at = torch.arange(tq) + (held - tq).clamp(min=least)[:, None]
    return seen & (keys <= at[:, None, :, None])


def meeting(tq: int, tk: int, lengths: Tensor | None, b: int, causal: bool) -> Tensor:
    """As `visible`, of attention: the first of more queries than keys stand in front of these, and below a diagonal
    queries behind the keys of their sequence meet none."""
    seen = visible(tq, tk, lengths, b, causal, min(tk - tq, 0))
    if not causal or lengths is None:
        return seen
    at = torch.arange(tq) + (lengths.long() - tq).clamp(min=min(tk - tq, 0))[:, None]
    return seen & (at < lengths[:, None])[:, None, :, None]


def attend(
    q: Tensor, k: Tensor, v: Tensor, taken: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    share = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    scores = (q @ k.mT * scale + (0 if bias is None else bias)).masked_fill(~taken, -math.inf)
    if not k.shape[2]:
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(taken, (scores - torch.where(lse.isfinite(), lse, 0)[..., None]).exp(), 0)
    return weights @ v, lse


def head_sizes(case: Case) -> tuple[int, int, int, int]:
    g = case.pick(1, 2)
    return case.pick(0, 1, 2, 2), g * case.pick(1, 2), g, case.pick(1, 3, 8, 16, 17)


def lengths_of(case: Case, b: int, tk: int) -> Tensor | None:
    if case.pick(True, False):
        return None
    lengths = torch.randint(tk + 1, (b,), generator=case.generator)
    return case.give("lengths", lengths.to(case.pick(torch.int32, torch.int64)))


def attended(case: Case) -> Scenario:
    """Sparse attention, with NaN in keys and values that no query takes."""
    (b, h, g, d), tq, tk = head_sizes(case), case.size(), case.size()
    causal = case.pick(True, False)
    scopes = case.pick(1, g, h)
    case.clean["lengths"] = None
    lengths = lengths_of(case, b, tk)
    mask = case.chance(b, scopes, tq, tk, share=case.pick(0.02, 0.3, 1.0))
    taken = mask.repeat_interleave(h // scopes, 1) & meeting(tq, tk, lengths, b, causal)
    used = taken.any(2).view(b, g, h // g, tk).any(2)[..., None]
    case.give("q", case.draw(b, h, tq, d))
    case.give("k", case.draw(b, g, tk, d), ~used)
    case.give("v", case.draw(b, g, tk, case.pick(d, 1, 40)), ~used)
    case.give("words", attention.Selection.from_mask(mask).words)
    path, few = case.pick(None, "tiles", "lists"), tq <= 16 and case.pick(True, False)
    page, spare, scale = case.pick(0, 1, 4, 16), case.pick(0, 3), d**-0.5
    order = torch.randperm(64 * 4 * 2 + 9, generator=case.generator)
    garbage = case.pick(-1, 1 << 30)

    def call(q: Tensor, k: Tensor, v: Tensor, words: Tensor, lengths: Any) -> Results:
        selection = attention.Selection(words, tq)
        options: dict[str, Any] = {"causal": causal, "lengths": lengths, "return_lse": True}
        if not few:
            return list(attention.sparse_attention(q, k, v, selection, path=path, **options))
        q, k, v = (x.detach() for x in (q, k, v))
        if page:
            pages = -(-tk // page)
            places = order[order < b * pages + spare].view(-1)[: b * pages].view(b, pages)
            pools = []
            for x in (k, v):
                pool = x.new_full((b * pages + spare, page, g, x.shape[3]), math.nan)
                padded = F.pad(x, (0, 0, 0, pages * page - tk), value=math.nan)
                pool[places.flatten()] = padded.view(b, g, pages, page, x.shape[3]).permute(0, 2, 3, 1, 4).flatten(0, 1)
                pools.append(pool)
            wanted = F.pad(used.any(1)[..., 0], (0, pages * page - tk)).view(b, pages, page).any(-1)
            table = torch.where(wanted, places, garbage).to(torch.int32)
            return list(attention.sparse_attention(q, *pools, selection, page_table=table, **options))
        return list(attention.sparse_attention(q, k, v, selection, **options))

    def reference(q: Tensor, k: Tensor, v: Tensor, words: Tensor, lengths: Any) -> Results:
        return list(attend(q, k, v, taken, scale))

    return Scenario(call, reference, gradients=not few)


def indexed(case: Case) -> Scenario:
    """An indexer's scores and selections, with NaN in keys behind the lengths."""
    b, tk, heads, d = case.pick(0, 1, 2), case.size(), case.pick(1, 2, 3), case.pick(1, 3, 8)
    causal = case.pick(True, False)
    tq = min(case.size(), tk) if causal else case.size()
    case.clean["lengths"] = None
    lengths = lengths_of(case, b, tk)
    behind = ~visible(tq, tk, lengths, b, False)[:, 0, :1].mT if tq else None
    case.give("q", case.draw(b, heads, tq, d))
    case.give("k", case.draw(b, tk, d), behind)
    case.give("w", case.draw(b, tq, heads))
    case.maybe("bias", heads)
    options: dict[str, Any] = case.pick(
        {"k": case.pick(1, 5, 70)},
        {"k": 9, "window": 2, "sinks": 1},
        {"k": 8, "granularity": 4},
        {"k": attention.AdaptiveK("entropy", 2, 8, 16)},
    )
    select = case.pick(True, False)

    def call(q: Tensor, k: Tensor, w: Tensor, bias: Any, lengths: Any) -> Results:
        given: dict[str, Any] = {"causal": causal, "lengths": lengths}
        if select:
            return [
                attention.select_topk(
                    *(None if x is None else x.detach() for x in (q, k, w, bias)), **options, **given
                ).to_mask()
            ]
        return [attention.indexer_scores(q, k, w, bias, **given)]

    def reference(q: Tensor, k: Tensor, w: Tensor, bias: Any, lengths: Any) -> Results:
        if select:
            return [None]
        z = torch.einsum("bhqd,bkd->bqhk", q, k) * d**-0.5 + (0 if bias is None else bias[:, None])
        scores = (torch.sigmoid(w)[..., None] * torch.sigmoid(z)).sum(2)
        return [scores.masked_fill(~visible(tq, tk, lengths, b, causal)[:, 0], -math.inf)]

    return Scenario(call, reference, gradients=not select)


def gates(case: Case) -> Scenario:
    b, t, g, half = case.pick(0, 1, 2), case.size(17), case.pick(1, 2), case.pick(1, 4, 8)
    h, d, value, output = g * case.pick(1, 2), 2 * half, case.pick(True, False), case.pick(True, False)
    case.give("y", case.draw(b, t, d * (h + 2 * g + value * g + output * h), step=0.5))
    angles = torch.rand(b, t, half, generator=case.generator).repeat(1, 1, 2)
    case.give("cos", angles.cos())
    case.give("sin", angles.sin())

    def call(y: Tensor, cos: Tensor, sin: Tensor) -> Results:
        cos, sin = cos.detach(), sin.detach()
        return list(rotary_gates(y, cos, sin, h, g, value_gate=value, output_gate=output))

    return Scenario(call)


def indexer_trained(case: Case) -> Scenario:
    """An indexer's loss, with NaN in keys behind the lengths."""
    (b, h, g, d), t, heads = head_sizes(case), case.size(33), case.pick(1, 2, 3)
    case.clean["lengths"] = None
    lengths = lengths_of(case, b, t)
    behind = ~visible(1, t, lengths, b, False).mT
    case.give("q", case.draw(b, h, t, d))
    case.give("k", case.draw(b, g, t, d), behind)
    case.give("q_idx", case.draw(b, heads, t, 8, limit=1))
    case.give("k_idx", case.draw(b, t, 8, limit=1), behind[:, 0])
    case.give("w", case.draw(b, t, heads))
    case.give("bias", case.draw(heads))
    mask = case.chance(b, 1, t, t, share=case.pick(0.1, 1.0)) if case.pick(True, False) else None
    selection = None if mask is None else attention.Selection.from_mask(mask)

    def call(q: Tensor, k: Tensor, q_idx: Tensor, k_idx: Tensor, w: Tensor, bias: Tensor, lengths: Any) -> Results:
        given: dict[str, Any] = {"selection": selection, "lengths": lengths, "causal": True}
        return [attention.indexer_loss(q.detach(), k.detach(), q_idx, k_idx, w, bias, **given)]

    return Scenario(call)

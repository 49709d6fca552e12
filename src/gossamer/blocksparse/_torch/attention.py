"""Block-sparse attention on the CPU: one block row of one head after the other, with the keys that its blocks hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer._core.dropout import weights
from gossamer.blocksparse.attention_path import first_key
from gossamer.blocksparse.elements import cut_among
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.records import BlocksparseAttention, BlocksparseAttentionBwd

Call = BlocksparseAttention | BlocksparseAttentionBwd


class _Row(NamedTuple):
    """Where a block row's n queries are, `at` (batch, head, queries); the batch and head `of` its keys, and these,
    `key` `[L]`; the blocks `entry` that it lists, whether each of their keys is among these, `kept`, and which queries
    and keys meet, `inside` `[n, L]`."""

    at: tuple[int, int, slice]
    of: tuple[int, int]
    key: Tensor
    entry: Tensor
    kept: Tensor
    inside: Tensor


def _rows(call: Call) -> Iterator[_Row]:
    """Every block row that meets a key."""
    (b, h, tq, _), (hk, tk), (height, width) = call.q.shape, call.k.shape[1:3], call.form[3:5]
    lists = Lists(call.layout, call.form)
    offsets, columns = lists.row_offsets.tolist(), lists.col_indices.long()
    limits = torch.full((b,), tk) if call.lengths is None else call.lengths.long().clamp(max=tk)
    limit, shift = limits.tolist(), first_key(limits, tq, tk).tolist()
    rows, within = -(-tq // height), torch.arange(width)
    for batch, head, row in itertools.product(range(b), range(h), range(rows)):
        line = (batch * call.own[0] + head * call.own[1]) * rows + row
        begin, end = offsets[line], offsets[line + 1]
        first, last = row * height, min((row + 1) * height, tq)
        key, most = (columns[begin:end, None] * width + within).flatten(), limit[batch]
        if call.causal:
            most = min(most, last + shift[batch])
        kept, entry = key < most, torch.arange(begin, end)
        if not kept.any():
            continue
        inside = kept.expand(last - first, -1)
        if call.causal:
            stands = torch.arange(first, last)[:, None] + shift[batch]
            inside = inside & (key <= stands) & (stands < limit[batch])
        if lists.elements is not None:
            cut, elements = cut_among(lists.elements, entry, (height, width))
            whole = torch.ones(len(entry), height, width, dtype=torch.bool).index_put(cut, elements)
            inside = inside & whole.transpose(0, 1).flatten(1)[: last - first]
        at = batch, head, slice(first, last)
        yield _Row(at, (batch, head * hk // h), key[kept], entry, kept, inside[:, kept])


def _scores(call: Call, row: _Row, q: Tensor, k: Tensor) -> Tensor:
    """Scaled scores `[n, L]` of keys k with their bias, -inf where query and key do not meet."""
    s, inside, bias = q[row.at] @ k.T, row.inside, call.bias
    if call.relative is not None:
        for step in _steps(call, row):
            s += call.relative[row.at].to(s.dtype).gather(1, step)
    s *= call.scale
    if bias is not None and bias.dim() == 3:
        bias = bias[row.entry].transpose(0, 1).flatten(1)[: len(s), row.kept]
    elif bias is not None:
        bias = _matrix(bias, row)[row.at[2], row.key]
    if bias is not None and bias.dtype is torch.bool:
        inside = inside & bias
    elif bias is not None:
        s += bias
    return s.masked_fill_(~inside, -torch.inf)


def _steps(call: Call, row: _Row) -> Iterator[Tensor]:
    """For each term of relative positions, which number of a query's each key picks, `[n, L]`."""
    assert call.relative is not None and call.places is not None
    window = call.relative.shape[-1] // call.places.shape[0]
    for term, places in enumerate(call.places[:, row.at[0]].long()):
        step = places[call.q.shape[2] + row.key] - places[row.at[2], None] + window // 2
        yield step.clamp(0, window - 1) + term * window


def _thinned(call: Call, row: _Row, p: Tensor) -> Tensor:
    """Weights `[n, L]`, or their gradients, times the factors of dropout."""
    if call.seed is None:
        return p
    (batch, head, queries), key = row.at, row.key
    query = torch.arange(queries.start, queries.stop)[:, None]
    return p * weights(call.seed, batch * call.q.shape[1] + head, query, key, call.drop, p.dtype)


def _matrix(bias: Tensor, row: _Row) -> Tensor:
    """The matrix of a dense bias for a row's batch and head."""
    return bias[row.at[0] % bias.shape[0], row.at[1] % bias.shape[1]]


def _wide(*tensors: Tensor) -> list[Tensor]:
    return [x.to(torch.promote_types(x.dtype, torch.float32)).contiguous() for x in tensors]


def _token_major(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A result as `empty_like` lays it out."""
    return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def attention(call: BlocksparseAttention) -> tuple[Tensor, Tensor]:
    q, k, v = _wide(call.q, call.k, call.v)
    out, lse = q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -torch.inf)
    if Lists(call.layout, call.form).overflowed():
        return _token_major(out.fill_(torch.nan), call.q.dtype), lse.fill_(torch.nan)
    for row in _rows(call):
        s = _scores(call, row, q, k[row.of][row.key])
        most = s.amax(1, keepdim=True)
        p = s.sub_(most.masked_fill(most == -torch.inf, 0)).exp_()
        total = p.sum(1, keepdim=True)
        out[row.at] = _thinned(call, row, p) @ v[row.of][row.key] / torch.where(total == 0, 1, total)
        lse[row.at] = (most + total.log()).squeeze(1)
    return _token_major(out, call.q.dtype), lse


def attention_bwd(call: BlocksparseAttentionBwd) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, grad, out = _wide(call.q, call.k, call.v, call.grad, call.out)
    grads = dq, dk, dv = [torch.zeros_like(x) for x in (q, k, v)]
    dbias, drelative = (
        torch.zeros_like(x, dtype=q.dtype) if x is not None and wanted else q.new_empty(0)
        for x, wanted in ((call.bias, call.with_bias), (call.relative, call.with_relative))
    )
    delta = (grad * out).sum(3)
    if call.grad_lse is not None:
        delta -= call.grad_lse
    # A query without keys has weights of 0.
    lse = call.lse.masked_fill(call.lse == -torch.inf, torch.inf)
    q, grad = (x.masked_fill((lse == torch.inf)[..., None], 0) for x in (q, grad))
    lost = Lists(call.layout, call.form).overflowed()
    for row in () if lost else _rows(call):
        keys, values = k[row.of][row.key], v[row.of][row.key]
        p = _scores(call, row, q, keys).sub_(lse[row.at][:, None]).exp_()
        ds = _thinned(call, row, grad[row.at] @ values.T).sub_(delta[row.at][:, None]).mul_(p)
        dq[row.at] = ds @ keys * call.scale
        dk[row.of].index_add_(0, row.key, ds.T @ q[row.at] * call.scale)
        dv[row.of].index_add_(0, row.key, _thinned(call, row, p).T @ grad[row.at])
        if drelative.numel():
            for step in _steps(call, row):
                drelative[row.at].scatter_add_(1, step, ds * call.scale)
        if dbias.numel():
            ds = ds.masked_fill(~row.inside, 0)
        if dbias.dim() == 4:
            _matrix(dbias, row)[row.at[2]].index_add_(1, row.key, ds)
        elif dbias.numel():
            whole = ds.new_zeros(dbias.shape[1], len(row.kept))
            whole[: len(ds), row.kept] = ds
            dbias[row.entry] += whole.unflatten(1, (len(row.entry), -1)).transpose(0, 1)
    if lost:
        for x in (*grads, dbias, drelative):
            x.fill_(torch.nan)
    dq, dk, dv = (_token_major(x, call.q.dtype) for x in grads)
    return dq, dk, dv, dbias.to(call.q.dtype if call.bias is None else call.bias.dtype), drelative.to(call.q.dtype)

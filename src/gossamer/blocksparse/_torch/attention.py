"""Block-sparse attention on the CPU: block rows in chunks, each with the blocks that it lists gathered side by side.

Rows of one chunk list equally many blocks, so that nothing is padded, and its scores fit into a core's cache, for the
softmax goes over them several times. Where nothing is cut off a block, nothing is masked. A layout that leaves nothing
out, or a causal one nothing but later keys, is plain attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer._core.dropout import weights
from gossamer.blocksparse.attention_path import empty_like, first_key
from gossamer.blocksparse.elements import cut_among
from gossamer.blocksparse.lists import Lists
from gossamer.blocksparse.records import BlocksparseAttention, BlocksparseAttentionBwd

_CHUNK = 1 << 18
"""Scores that are held at once: 1 MiB in float32."""


@dataclass(frozen=True)
class _Chunk:
    """Block rows `[n]` of heads, and the L blocks that each lists. `inside`, `[n, height, L * width]`, says which
    queries and keys meet; None where all do."""

    batch: Tensor
    head: Tensor
    key_head: Tensor
    row: Tensor
    entry: Tensor
    column: Tensor
    query: Tensor
    key: Tensor
    inside: Tensor | None


class Attention:
    """The operands of one attention that its passes share."""

    def __init__(self, call: BlocksparseAttention | BlocksparseAttentionBwd) -> None:
        self.q, self.k, self.v, self.bias = call.q, call.k, call.v, call.bias
        self.relative, self.places, self.lengths = call.relative, call.places, call.lengths
        self.drop, self.seed = call.drop, call.seed
        self.lists, self.own, self.causal, self.scale = Lists(call.layout, call.form), call.own, call.causal, call.scale
        self.row_offsets, self.col_indices = self.lists.row_offsets, self.lists.col_indices
        self.elements, self.block = self.lists.elements, (self.lists.form.height, self.lists.form.width)

    def chunks(self) -> Iterator[_Chunk]:
        (b, h, tq, _), (_, hk, tk, _) = self.q.shape, self.k.shape
        height, width = self.block
        rows = -(-tq // height)
        triples = torch.arange(b * h * rows)
        batch, head, row = triples // (h * rows), triples // rows % h, triples % rows
        listed = (batch * self.own[0] + head * self.own[1]) * rows + row
        begin, counts = self.row_offsets[:-1].long()[listed], self.row_offsets.diff().long()[listed]
        limits, shift = torch.full((b,), tk), torch.full((b,), tk - tq)
        if self.lengths is not None:
            limits = self.lengths.long().clamp(max=tk)
            shift = first_key(limits, tq, tk)
        if self.causal or self.lengths is not None:
            # Blocks behind the diagonal or a length meet no query; a row's blocks are in order.
            end = limits[batch]
            if self.causal:
                end = torch.minimum(end, (row + 1) * height + shift[batch]).clamp(min=0)
            cols = -(-tk // width)
            of_row = torch.arange(self.row_offsets.numel() - 1).repeat_interleave(self.row_offsets.diff())
            places = of_row * cols + self.col_indices[: of_row.numel()]
            counts = torch.searchsorted(places, listed * cols + -(-end // width)) - begin
        cut = self.causal or self.lengths is not None or tq % height or tk % width
        order = counts.argsort(stable=True)
        # Where runs of rows with equal counts end.
        ends = torch.cat([counts[order].diff().nonzero().flatten() + 1, torch.tensor([order.numel()])]).tolist()
        for first, end in zip([0, *ends], ends):
            most = int(counts[order[first]]) if first < end else 0
            step = max(1, _CHUNK // max(1, height * width * most))
            for start in range(first, end if most else first, step):
                at = order[start : min(start + step, end)]
                entry = begin[at, None] + torch.arange(most)
                column = self.col_indices.long()[entry]
                query = row[at, None] * height + torch.arange(height)
                key = (column[..., None] * width + torch.arange(width)).flatten(1)
                inside = None
                if cut:
                    limit, stands, taking = limits[batch[at], None], query + shift[batch[at], None], query < tq
                    if self.causal:
                        taking &= stands < limit
                    inside = (key < limit)[:, None] & taking[..., None]
                    if self.causal:
                        inside &= key[:, None] <= stands[..., None]
                inside = self.taken(entry, inside)
                key_head = head[at] * hk // h
                yield _Chunk(batch[at], head[at], key_head, row[at], entry, column, query, key, inside)

    def taken(self, entry: Tensor, inside: Tensor | None) -> Tensor | None:
        """`inside` of a chunk, without the elements that its blocks `[n, L]` leave out."""
        if self.elements is None:
            return inside
        height, width = self.block
        (at, place), elements = cut_among(self.elements, entry, self.block)
        if not len(at):
            return inside
        if inside is None:
            inside = torch.ones(len(entry), height, entry.shape[1] * width, dtype=torch.bool)
        blocks = inside.view(len(entry), height, -1, width)
        blocks[at, :, place] &= elements
        return inside

    def keys(self, x: Tensor) -> Tensor:
        """k or v in blocks; whatever stands behind a length is 0."""
        if self.lengths is not None:
            behind = torch.arange(x.shape[2]) >= self.lengths[:, None]
            x = x.masked_fill(behind[:, None, :, None], 0)
        return self.blocks(x, self.block[1])

    def blocks(self, x: Tensor, size: int) -> Tensor:
        """x `[B, H, T, D]` in blocks of rows, in the working dtype: `[B, H, T / size, size, D]`."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        missing = -x.shape[2] % size
        # Contiguous, for gradients are added to views of what is made like this.
        return torch.nn.functional.pad(x, (0, 0, 0, missing)).contiguous().unflatten(2, (-1, size))

    def scores(self, chunk: _Chunk, q: Tensor, k: Tensor) -> Tensor:
        """Scaled scores `[n, height, L * width]` with their bias, -inf where query and key do not meet."""
        s = q @ k.transpose(1, 2)
        if self.relative is not None:
            of_queries = self.relative[chunk.batch[:, None], chunk.head[:, None], self.query_at(chunk)].to(s.dtype)
            for step in self.steps(chunk):
                s += of_queries.gather(2, step)
        s *= self.scale
        inside = chunk.inside
        if self.bias is not None:
            if self.bias.dim() == 3:
                bias = self.bias[chunk.entry].transpose(1, 2).flatten(2)
            else:
                bias = self.bias[self.bias_at(chunk)]
            if bias.dtype is torch.bool:
                inside = bias if inside is None else inside & bias
            else:
                s += bias
        return s if inside is None else s.masked_fill_(~inside, -torch.inf)

    def thinned(self, chunk: _Chunk, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Weights `[n, height, L * width]`, and their gradients, times the factors of dropout."""
        if self.seed is None:
            return tensors
        pair = (chunk.batch * self.q.shape[1] + chunk.head)[:, None, None]
        places = pair, chunk.query[..., None], chunk.key[:, None]
        factors = weights(self.seed, *places, self.drop, tensors[0].dtype)
        return tuple(x * factors for x in tensors)

    def query_at(self, chunk: _Chunk) -> Tensor:
        """`[n, height]`: the chunk's queries; what does not exist reads the last."""
        return chunk.query.clamp(max=self.q.shape[2] - 1)

    def steps(self, chunk: _Chunk) -> Iterator[Tensor]:
        """For each term of relative positions, which number of a query's each key picks, `[n, height, L * width]`."""
        assert self.relative is not None and self.places is not None
        window, tq = self.relative.shape[-1] // self.places.shape[0], self.q.shape[2]
        key = chunk.key.clamp(max=self.k.shape[2] - 1)
        for term, places in enumerate(self.places.long()):
            of_query, of_key = (places[chunk.batch[:, None], at] for at in (self.query_at(chunk), tq + key))
            step = of_key[:, None] - of_query[..., None] + window // 2
            yield step.clamp(0, window - 1) + term * window

    def bias_at(self, chunk: _Chunk) -> tuple[Tensor, ...]:
        """Where a dense bias holds the chunk's scores; what does not exist reads the last."""
        assert self.bias is not None
        batch = chunk.batch if self.bias.shape[0] > 1 else torch.zeros_like(chunk.batch)
        head = chunk.head if self.bias.shape[1] > 1 else torch.zeros_like(chunk.head)
        query = self.query_at(chunk)[..., None]
        return batch[:, None, None], head[:, None, None], query, chunk.key.clamp(max=self.k.shape[2] - 1)[:, None]


def _token_major(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A result as `empty_like` lays it out."""
    return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _flat(blocks: Tensor, chunk: _Chunk) -> Tensor:
    """Where the chunk's blocks of keys stand with `[B, Hk, columns]` as one dimension: whole blocks copy fastest."""
    return (((chunk.batch * blocks.shape[1] + chunk.key_head) * blocks.shape[2])[:, None] + chunk.column).flatten()


def _gathered(blocks: Tensor, chunk: _Chunk) -> Tensor:
    found = blocks.flatten(0, 2).index_select(0, _flat(blocks, chunk))
    return found.view(*chunk.column.shape, *found.shape[1:]).flatten(1, 2)


def _scattered(blocks: Tensor, chunk: _Chunk, values: Tensor) -> None:
    """Adds `[n, L * width, D]` to the chunk's blocks of keys, one after the other."""
    values = values.unflatten(1, (-1, blocks.shape[3])).flatten(0, 1)
    # A view, not a reshape, which could be a copy.
    blocks.view(math.prod(blocks.shape[:3]), *blocks.shape[3:]).index_add_(0, _flat(blocks, chunk), values)


def _added(to: Tensor, at: tuple[Tensor, ...], values: Tensor) -> None:
    """Adds values to contiguous `to` where `at` has places of its first dimensions, in their order: threads that share
    an `index_put_` add in any."""
    place = at[0]
    for size, index in zip(to.shape[1:], at[1:]):
        place = place * size + index
    shape = to.shape[len(at) :]
    to.view(-1, *shape).index_add_(0, place.flatten(), values.reshape(-1, *shape))


def leaves_nothing_out(given: Attention) -> bool | None:
    """Whether every query takes all keys (False), or all keys up to its own position (True), by the layout and
    `causal` together; None of every other attention."""
    q, k, v, lists, (height, width) = given.q, given.k, given.v, given.lists, given.block
    added = any(x is not None for x in (given.bias, given.relative, given.lengths, given.seed))
    if added or q.shape[2:] != k.shape[2:] or q.shape[3] != v.shape[3] or not q.numel():
        return None
    rows, cols, length = lists.form.rows, lists.form.cols, q.shape[2]
    row, col = torch.arange(rows)[:, None] * height, torch.arange(cols) * width
    present = lists.positions.view(-1, rows, cols) >= 0
    causal = given.causal or not bool(present.all())
    needed = (col < row + height) if causal else torch.ones(rows, cols, dtype=torch.bool)
    if not bool(present[:, needed].all()) or (causal and not given.causal and bool(present[:, ~needed].any())):
        return None
    straddles = bool((needed & (col + width > row + 1)).any())
    if given.elements is None:
        return None if causal and not given.causal and straddles else causal
    numbers = torch.arange(int(lists.nnz))
    (at,), inside = cut_among(given.elements, numbers, given.block)
    query = (lists.row_indices[at].long() % rows * height)[:, None, None] + torch.arange(height)[:, None]
    key = (lists.col_indices[at].long() * width)[:, None, None] + torch.arange(width)
    exists = (query < length) & (key < length)
    wanted = exists & (key <= query) if causal else exists
    if bool((wanted & ~inside).any()):
        return None
    if causal and not given.causal:
        whole = numbers.new_ones(len(numbers), dtype=torch.bool).index_fill_(0, at, False)
        first, last = lists.row_indices[numbers][whole] % rows * height, (lists.col_indices[numbers][whole] + 1) * width
        if bool((exists & inside & ~wanted).any()) or bool((last > first + 1).any()):
            return None
    return causal


def _as_dense(given: Attention) -> tuple[Tensor, Tensor, Tensor, bool] | None:
    """(q, k, v with as many heads, causal) of an attention that PyTorch computes as well, or None. PyTorch multiplies
    hidden keys by 0, so that operands have to be finite, and scales a mask of -inf, so that the scale is positive."""
    causal = leaves_nothing_out(given)
    if (
        causal is None
        or (causal and given.scale <= 0)
        or not all(bool(x.isfinite().all()) for x in (given.q, given.k, given.v))
    ):
        return None
    group = given.q.shape[1] // given.k.shape[1]
    k, v = (x if group == 1 else x.repeat_interleave(group, 1) for x in (given.k, given.v))
    return _by_rows(given.q), _by_rows(k), _by_rows(v), causal


def _by_rows(x: Tensor) -> Tensor:
    """The same with contiguous rows: PyTorch's operator takes them for that."""
    return x if x.stride(-1) == 1 else x.contiguous()


def attention(call: BlocksparseAttention) -> tuple[Tensor, Tensor]:
    """Operator `blocksparse_attention`."""
    given, (q, k, v), height = Attention(call), call[:3], call.form[3]
    b, h, tq, _ = q.shape
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    if given.lists.overflowed():
        return empty_like(q, v.shape[-1]).fill_(torch.nan), q.new_full((b, h, tq), torch.nan, dtype=lse_dtype)
    if (dense := _as_dense(given)) is not None:
        *qkv, causal = dense
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, causal, scale=call.scale)
        return _token_major(out, q.dtype), lse.contiguous()
    q_blocks, k_blocks, v_blocks = given.blocks(q, height), given.keys(k), given.keys(v)
    out = q_blocks.new_zeros(*q_blocks.shape[:-1], v.shape[-1])
    lse = q_blocks.new_full(q_blocks.shape[:-1], -torch.inf)
    for chunk in given.chunks():
        at = chunk.batch, chunk.head, chunk.row
        s = given.scores(chunk, q_blocks[at], _gathered(k_blocks, chunk))
        most = s.amax(2, keepdim=True)
        p = s.sub_(most.masked_fill(most == -torch.inf, 0)).exp_()
        total = p.sum(2, keepdim=True)
        (taken,) = given.thinned(chunk, p)
        out[at] = taken @ _gathered(v_blocks, chunk) / torch.where(total == 0, 1, total)
        lse[at] = (most + total.log()).squeeze(2)
    out, lse = out.flatten(2, 3)[:, :, :tq], lse.flatten(2, 3)[:, :, :tq]
    return _token_major(out, q.dtype), lse.contiguous()


def attention_bwd(call: BlocksparseAttentionBwd) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Operator `blocksparse_attention_bwd`."""
    given, (height, width), scale = Attention(call), call.form[3:5], call.scale
    grad, grad_lse, out, lse, q, k, v, bias, relative, *_ = call
    tq, tk = q.shape[2], k.shape[2]
    added = q.dtype if bias is None else bias.dtype
    dbias = lse.new_zeros(bias.shape) if call.with_bias and bias is not None else q.new_empty(0)
    drelative = lse.new_zeros(relative.shape) if call.with_relative and relative is not None else q.new_empty(0)
    if given.lists.overflowed():
        dq, dk, dv = (empty_like(x).fill_(torch.nan) for x in (q, k, v))
        return dq, dk, dv, dbias.fill_(torch.nan).to(added), drelative.new_full(drelative.shape, torch.nan).to(q.dtype)
    if grad_lse is None and bool(grad.isfinite().all()) and (dense := _as_dense(given)) is not None:
        *qkv, causal = dense
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(_by_rows(grad), *qkv, _by_rows(out), lse, 0.0, causal, scale=scale)
        if dk.shape[1] != k.shape[1]:
            dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
        dq, dk, dv = (_token_major(x, q.dtype) for x in (dq, dk, dv))
        return dq, dk, dv, dbias.to(added), drelative.to(q.dtype)
    # A query without keys has weights of 0, whatever it and its gradients hold.
    alone = (lse == -torch.inf)[..., None]
    q, grad = (x.masked_fill(alone, 0) for x in (q, grad))
    q_blocks, k_blocks, v_blocks = given.blocks(q, height), given.keys(k), given.keys(v)
    grad_blocks = given.blocks(grad, height)
    delta = (grad_blocks * given.blocks(out, height)).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta -= given.blocks(grad_lse[..., None].masked_fill(alone, 0), height)
    lse_blocks = given.blocks(lse[..., None].masked_fill(alone, torch.inf), height)
    dq, dk, dv = torch.zeros_like(q_blocks), torch.zeros_like(k_blocks), torch.zeros_like(v_blocks)
    for chunk in given.chunks():
        at = chunk.batch, chunk.head, chunk.row
        keys, values = _gathered(k_blocks, chunk), _gathered(v_blocks, chunk)
        p = given.scores(chunk, q_blocks[at], keys).sub_(lse_blocks[at]).exp_()
        taken, dp = given.thinned(chunk, p, grad_blocks[at] @ values.transpose(1, 2))
        ds = dp.sub_(delta[at]).mul_(p)
        dq[at] = ds @ keys * scale
        _scattered(dk, chunk, ds.transpose(1, 2) @ q_blocks[at] * scale)
        _scattered(dv, chunk, taken.transpose(1, 2) @ grad_blocks[at])
        if drelative.numel():
            rows = chunk.batch[:, None], chunk.head[:, None], given.query_at(chunk)
            sums = ds.new_zeros(*ds.shape[:2], drelative.shape[-1])
            for step in given.steps(chunk):
                sums.scatter_add_(2, step, ds * scale)
            # Queries beyond the last have weights of 0.
            _added(drelative, rows, sums)
        if dbias.numel():
            inside = ds if chunk.inside is None else ds.masked_fill(~chunk.inside, 0)
            if dbias.dim() == 3:
                _added(dbias, (chunk.entry,), inside.unflatten(2, (-1, width)).transpose(1, 2))
            else:
                _added(dbias, given.bias_at(chunk), inside)
    dq, dk, dv = (_token_major(x.flatten(2, 3)[:, :, :t], q.dtype) for x, t in ((dq, tq), (dk, tk), (dv, tk)))
    return dq, dk, dv, dbias.to(added), drelative.to(q.dtype)

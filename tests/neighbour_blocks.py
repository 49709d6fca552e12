"""Calls of the block-sparse operators, and of what takes PyTorch's own sparse matrices, for `tests/neighbours.py`."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer import blocksparse, rowsparse
from tests.blocksparse.blocks import repeat_interleave
from tests.neighbour_attention import attend, head_sizes, lengths_of, meeting, visible
from tests.neighbours import Case, Results, Scenario


def _layout(case: Case, batch: tuple[int, ...], share: float | None = None) -> blocksparse.Layout:
    rows, cols, block = case.pick(0, 1, 2, 3), case.pick(0, 1, 2, 3), (case.pick(16, 32), case.pick(16, 32))
    size = tuple(max(n * e - case.pick(0, 0, 1, 9), 0) for n, e in zip((rows, cols), block))
    mask = case.chance(*batch, rows, cols, share=case.pick(0.0, 0.5, 1.0) if share is None else share)
    capacity = max(int(mask.sum()) + case.pick(0, 0, 3), 1)
    return blocksparse.Layout.from_mask(mask, block, size=size, capacity=capacity)


def _blocks(case: Case, name: str, layout: blocksparse.Layout, x: Tensor | None = None) -> None:
    """Values of a layout's blocks, NaN beyond the matrix and behind the last block."""
    dense = case.draw(*layout.dense_shape) if x is None else x
    inside = blocksparse.from_dense(torch.ones(layout.dense_shape, dtype=torch.int32), layout).values == 1
    inside[int(layout.row_offsets[-1]) :] = False
    case.give(name, torch.where(inside, blocksparse.from_dense(dense, layout).values, 0), ~inside)


def block_products(case: Case) -> Scenario:
    layout = _layout(case, (2,))
    (m, n), wide = layout.size, case.pick(0, 1, 5, 17)
    _blocks(case, "values", layout)
    case.give("right", case.draw(2, n, wide))
    case.give("left", case.draw(2, wide, m))
    case.give("row", case.draw(n))
    case.give("other", case.draw(2, m, n))
    chosen = case.random.sample(range(9), 2)

    def call(values: Tensor, right: Tensor, left: Tensor, row: Tensor, other: Tensor) -> Results:
        x = blocksparse.BlockSparseTensor(values, layout)
        ways: list[Any] = [
            lambda: x.to_dense(),
            lambda: blocksparse.matmul(x, right),
            lambda: blocksparse.matmul(left, x),
            lambda: x.mT.to_dense(),
            lambda: blocksparse.matmul(x, blocksparse.from_dense(other, layout), transpose_b=True).to_dense(),
            lambda: x.sum(-1),
            lambda: (x + row).to_dense(),
            lambda: blocksparse.softmax(x).to_dense(),
            lambda: blocksparse.matmul(left, right, layout, transpose_a=True, transpose_b=True).to_dense(),
        ]
        return [ways[i]() for i in chosen]

    present = blocksparse.from_dense(torch.ones(layout.dense_shape), layout).to_dense() > 0

    def reference(values: Tensor, right: Tensor, left: Tensor, row: Tensor, other: Tensor) -> Results:
        x = blocksparse.BlockSparseTensor(values, layout).to_dense()
        scores = x.masked_fill(~present, -math.inf)
        ways: list[Any] = [
            lambda: x,
            lambda: x @ right,
            lambda: left @ x,
            lambda: x.mT,
            lambda: x @ torch.where(present, other, 0).mT,
            lambda: x.sum(-1),
            lambda: torch.where(present, x + row, 0),
            lambda: torch.where(present, (scores - scores.logsumexp(-1, True)).exp(), 0) if n else x,
            lambda: torch.where(present, left.mT @ right.mT, 0),
        ]
        return [ways[i]() for i in chosen]

    return Scenario(call, reference)


def block_moves(case: Case) -> Scenario:
    """Gathers, scatters, pieces of length 0, repeats; a scatter of several into one place has no dense reference."""
    layout = _layout(case, (2,))
    shape, dim = layout.dense_shape, case.pick(0, 1, 2)
    _blocks(case, "values", layout)
    _blocks(case, "source", layout)
    index = torch.randint(-1, max(shape[dim], 1), shape, generator=case.generator)
    if not shape[dim]:
        index.fill_(-1)
    indices = blocksparse.from_dense(index, layout)
    held = torch.zeros(indices.values.shape, dtype=torch.bool)
    held[int(layout.row_offsets[-1]) :] = True
    case.give("index", indices.values, held, 1 << 40)
    present = blocksparse.from_dense(torch.ones(shape), layout).to_dense() > 0
    cut = case.random.randint(0, shape[dim])
    block, times, reduce = case.pick(16, 32, 64), case.pick(0, 1, 2), case.pick("sum", "mean", "amax", "amin", "prod")
    include, what = case.pick(True, False), case.pick("gather", "scatter", "reduce", "split", "repeat", "cat", "adapt")

    def call(values: Tensor, source: Tensor, index: Tensor) -> Results:
        x, y, i = (blocksparse.BlockSparseTensor(v, layout) for v in (values, source, index))
        out: Any
        if what == "gather":
            out = [blocksparse.gather(x, dim, i)]
        elif what == "scatter":
            out = [blocksparse.scatter(x, dim, i, y)]
        elif what == "reduce":
            out = [blocksparse.scatter(x, dim, i, y, reduce, include_self=include)]
        elif what == "split":
            out = blocksparse.split(x, [cut, shape[dim] - cut], dim)
        elif what == "repeat":
            sizes = [times if i == dim else 1 for i in range(3)]
            out = [blocksparse.repeat(x, sizes), repeat_interleave(x, times, dim)]
        elif what == "cat":
            out = [blocksparse.cat([x, y], dim)]
        else:
            out = [blocksparse.adapt(x, blocksparse.adapt(layout, block))]
        return [tensor.to_dense() for tensor in out]

    def reference(values: Tensor, source: Tensor, index: Tensor) -> Results:
        x, y = (blocksparse.BlockSparseTensor(v, layout).to_dense() for v in (values, source))
        if what == "split":
            return list(x.split([cut, shape[dim] - cut], dim))
        if what == "repeat":
            return [x.repeat(*(times if i == dim else 1 for i in range(3))), x.repeat_interleave(times, dim)]
        if what == "cat":
            return [torch.cat([x, y], dim)]
        if what == "adapt":
            return [x]
        at = torch.where(present, blocksparse.BlockSparseTensor(index, layout).to_dense(), -1)
        if what == "gather":
            return [torch.where(at >= 0, x.gather(dim, at.clamp(min=0)), 0)] if shape[dim] else [x]
        if what == "reduce" and reduce == "sum" and include:
            # A place more takes what has no index.
            at, end = (
                torch.where(at < 0, shape[dim], at),
                x.new_zeros(x.select(dim, 0).shape).unsqueeze(dim) if shape[dim] else x,
            )
            return [
                torch.where(present, torch.cat([x, end], dim).scatter_add(dim, at, y).narrow(dim, 0, shape[dim]), 0)
            ]
        return [None]

    return Scenario(call, reference)


def block_attention(case: Case) -> Scenario:
    (b, h, g, d), layout = head_sizes(case), _layout(case, ())
    tq, tk = layout.size
    case.clean["lengths"] = None
    present = blocksparse.from_dense(torch.ones(tq, tk), layout).to_dense() > 0
    if tq and tq <= tk and case.pick(True, False):
        left, right = case.pick(0, 1, 7, 40), case.pick(0, 3)
        layout = blocksparse.sliding_window((tq, tk), layout.block_size, (left, right))
        apart = torch.arange(tk) - torch.arange(tk - tq, tk)[:, None]
        present, lengths = (apart >= -left) & (apart <= right), None
    else:
        lengths = lengths_of(case, b, tk)
    causal = case.pick(True, False)
    seen = meeting(tq, tk, lengths, b, causal)
    taken = (seen & present).expand(b, h, tq, tk)
    behind = ~visible(1, tk, lengths, b, False).mT
    case.give("q", case.draw(b, h, tq, d))
    case.give("k", case.draw(b, g, tk, d), behind)
    case.give("v", case.draw(b, g, tk, d), behind)
    case.maybe("bias", h, tq, tk)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Any, lengths: Any) -> Results:
        options: dict[str, Any] = {"bias": bias, "causal": causal, "lengths": lengths, "return_lse": True}
        return list(blocksparse.attention(q, k, v, layout, **options))

    def reference(q: Tensor, k: Tensor, v: Tensor, bias: Any, lengths: Any) -> Results:
        return list(attend(q, k, v, taken, d**-0.5, bias))

    return Scenario(call, reference)


def normed(case: Case) -> Scenario:
    """Norms of the present elements of each row."""
    layout = _layout(case, (2,))
    _blocks(case, "values", layout, case.draw(*layout.dense_shape) + 3 * case.chance(*layout.dense_shape))
    case.give("weight", case.draw(layout.size[1]))
    root = case.pick(True, False)

    def call(values: Tensor, weight: Tensor) -> Results:
        x = blocksparse.BlockSparseTensor(values, layout)
        norm: Any = blocksparse.rms_norm if root else blocksparse.layer_norm
        return [norm(x, weight, eps=1e-2).to_dense()]

    return Scenario(call)


def compressed(case: Case) -> Scenario:
    """PyTorch's own BSR and CSR matrices, with columns in any order."""
    rows, cols, e = case.pick(0, 1, 2, 3), case.pick(1, 2, 3), 16
    mask = case.chance(rows, cols)
    crow = F.pad(mask.sum(1).cumsum(0), (1, 0))
    order = [torch.randperm(cols, generator=case.generator) for _ in range(rows)]
    col = torch.cat([p[mask[i][p]] for i, p in enumerate(order)] or [torch.zeros(0, dtype=torch.int64)])
    case.give("values", case.draw(len(col), e, e))
    case.give("entries", case.draw(len(col)))
    case.give("crow", crow)
    case.give("col", col)

    def call(values: Tensor, entries: Tensor, crow: Tensor, col: Tensor) -> Results:
        x = torch.sparse_bsr_tensor(crow, col, values.detach(), (rows * e, cols * e))
        y = torch.sparse_csr_tensor(crow, col, entries.detach(), (rows, cols))
        return [blocksparse.from_sparse_bsr(x).to_dense(), rowsparse.from_torch_sparse(y).to_dense()]

    def reference(values: Tensor, entries: Tensor, crow: Tensor, col: Tensor) -> Results:
        at = torch.repeat_interleave(torch.arange(rows), crow.diff())
        dense = values.new_zeros(rows, cols, e, e).index_put((at, col), values)
        return [
            dense.permute(0, 2, 1, 3).reshape(rows * e, cols * e),
            values.new_zeros(rows, cols).index_put((at, col), entries),
        ]

    return Scenario(call, reference, gradients=False)

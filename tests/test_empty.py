"""Every operator where there is nothing to compute: no rows, no columns, no products to sum up, no entry.

Without biases a result is 0 then wherever it is anything, and so is each gradient. New memory is poisoned, so that
what nobody writes shows.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import attention, blocksparse, ffn, gemm, rowsparse, sae
from gossamer.attention.rotary_gates import rotary_gates
from gossamer.ffn.records import SparseFfn
from gossamer.ffn.sparse_ffn import sparse_ffn
from gossamer.sae.encode_dense import encode_dense
from gossamer.sae.smallest import smallest
from tests.blocksparse.blocks import repeat_interleave
from tests.recorded import Recorder, registered

Draw = Callable[..., Tensor]
Results = Iterator[Tensor]

# M rows, N columns, D products of a sum.
NO_ENTRY = (3, 90, 12)
NOTHING = [(0, 90, 12), (3, 0, 12), (3, 90, 0), (0, 0, 0), NO_ENTRY]
LARGE = [(0, 20_000, 512), (600, 0, 12), (600, 90, 0)]
"""No rows, beside weights of 40 MB; and many rows, which go other ways than few."""


def _rowsparse(draw: Draw, m: int, n: int, d: int) -> Results:
    acts, W, x = torch.zeros_like(draw(m, n)).requires_grad_(), draw(n, d), draw(m, d)
    options: list[dict[str, Any]] = [{"capacity": 8}, {"capacity": max(n, 1)}, {"capacity": "exact"}]
    for more in options:
        rows = rowsparse.pack(acts, **more)
        yield rows.to_dense()
        yield rowsparse.matmul(rows, W)
        yield rowsparse.sampled_matmul(x, W, rows.detach()).to_dense()
        yield rowsparse.transpose(rows).to_dense()
        yield rows.complete().to_dense()


def _decode(draw: Draw, m: int, n: int, d: int) -> Results:
    acts, W = torch.zeros_like(draw(m, n)).requires_grad_(), draw(n, d)
    for options in ({"capacity": 8}, {"capacity": max(n, 1)}, {}):
        yield sae.decode(acts, W, **options)
        yield sae.decode(acts.detach(), W.detach(), **options)
    yield sae.decode(rowsparse.pack(acts, capacity=8), W)


def _encode(draw: Draw, m: int, n: int, d: int) -> Results:
    x, W, threshold = draw(m, d), draw(d, n), draw(n)
    b = torch.full_like(threshold, -100.0) if (m, n, d) == NO_ENTRY else torch.zeros_like(threshold)
    limit = threshold.abs() + 1
    activations = ["relu", gemm.JumpReLU(limit, 0.5), gemm.JumpReLU(limit, 0.5, ste_to_input=True)]
    for activation in activations + ([gemm.TopK(4), gemm.BatchTopK(4)] if n else []):
        for capacity in (None, 2, "exact") if isinstance(activation, str | gemm.JumpReLU) else (None,):
            rows = sae.encode(x, W, b, activation, capacity=capacity)
            yield rows.to_dense()
            yield rows.l0
            yield sae.tanh_l0(rows, draw(n))
            yield sae.count_fired(rows)
            assert smallest(rows, torch.ones_like(threshold)).item() == torch.inf
        yield from encode_dense(x, W, b, activation)


def _gemm(draw: Draw, m: int, n: int, d: int) -> Results:
    x, gate, up, down, W = draw(m, d), draw(n, d), draw(n, d), draw(d, n), draw(n, 5)
    if (m, n, d) == NO_ENTRY:
        x = torch.zeros_like(x).requires_grad_()
    for recompute in (False, True):
        yield gemm.linear_glu(x, gate, up, recompute=recompute)
        yield gemm.linear_glu(x, torch.cat([gate, up]), recompute=recompute)
        yield gemm.gated_mlp(x, gate, up, down, recompute=recompute)
    yield gemm.linear_glu(x.detach(), gate.detach(), up.detach(), out=x.new_empty(m, n))
    more: list[dict[str, Any]] = [{}, {"capacity": 5}]
    for options in more:
        for operands in ((x, gate, W), (x.detach(), gate.detach(), W.detach())):
            rows = gemm.linear_pack(*operands[:2], **options)
            yield rows.to_dense()
            yield rows.l0
            yield rowsparse.matmul(rows, operands[2])


def _overflowing(draw: Draw, m: int, n: int, d: int) -> Results:
    """No rows, of which none can overflow, and the operators that serve those that do."""
    if m:
        return
    x, weight, W = draw(m, d), draw(n, d), draw(n, 5)
    rows = gemm.linear_pack(x, weight, capacity=2)
    yield rowsparse.matmul(rows, W)
    yield rows.to_dense()
    rows = sae.encode(x, weight.t(), capacity=2)
    yield rowsparse.matmul(rows, W)


def _ffn(draw: Draw, m: int, n: int, d: int) -> Results:
    x, gate, up, down = (t.detach() for t in (draw(m, d), draw(n, d), draw(n, d), draw(7, n)))
    if (m, n, d) == NO_ENTRY:
        x = torch.zeros_like(x)
    for method in ("auto", "gather", "dense"):
        yield ffn.gated(x, gate, up, down, method=method)
        yield ffn.plain(x, up, down, method=method)
    yield from sparse_ffn(SparseFfn(x, gate, None, None, up, None, down.t().contiguous().t(), None, True, True))
    weights = [t.requires_grad_() for t in (gate, up, down)]
    for out, activity in (
        ffn.gated(x, *weights, method="gather", with_activity=True),
        ffn.plain(x, weights[0], weights[2], method="gather", with_activity=True),
    ):
        yield out
        yield from (torch.nan_to_num(part) for part in activity)


def _selected(draw: Draw, b: int, t: int, s: int) -> Results:
    """B sequences, T queries, S keys of which none is taken."""
    q, k, v = draw(b, 4, t, 16), draw(b, 2, s, 16), draw(b, 2, s, 16)
    indexer = draw(b, 3, t, 8), draw(b, s, 8), draw(b, t, 3), draw(3)
    selection = attention.Selection.from_mask(torch.zeros(b, t, s, dtype=torch.bool, device=q.device))
    yield selection.to_mask()
    if not b * t * s:
        yield attention.indexer_scores(*indexer, causal=False)
        yield attention.select_topk(*indexer, k=9, causal=False).to_mask()
        adaptive = attention.AdaptiveK("entropy", 2, 8, 16)
        yield attention.select_topk(*indexer, k=adaptive, causal=False).to_mask()
    for path in ("tiles", "lists"):
        out, lse = attention.sparse_attention(q, k, v, selection, causal=False, return_lse=True, path=path)
        yield out
        yield torch.where(lse == -torch.inf, 0, lse)
    if t <= 16:
        yield attention.sparse_attention(*(x.detach() for x in (q, k, v)), selection, causal=False)
    if t == s:
        yield attention.sparse_attention(q, k, v, selection, indexer=indexer, causal=True)
        yield attention.indexer_loss(q, k, *indexer, selection=selection, causal=True)
        y, angles = draw(b, t, 8 * 12), torch.zeros(t, 8, device=q.device)
        yield from (made for made in rotary_gates(y, angles, angles, 3, 2) if not b * t and made is not None)


def _blocks(draw: Draw, b: int, rows: int, cols: int) -> Results:
    """B layouts of rows x cols blocks, none of which is present."""
    x, y = draw(b, 16 * rows, 32 * cols), draw(b, 16 * rows, 32 * cols)
    absent = torch.zeros(b, rows, cols, dtype=torch.bool, device=x.device)
    layout = blocksparse.Layout.from_mask(absent, (16, 32))
    left, right = blocksparse.from_dense(x, layout), blocksparse.from_dense(y, layout)
    square = blocksparse.Layout.product(layout, layout.transpose())
    products = [
        blocksparse.matmul(left, right, transpose_b=True),
        blocksparse.matmul(left, y.mT),
        blocksparse.matmul(x, right, transpose_b=True),
        blocksparse.matmul(left, right, square, transpose_b=True),
        blocksparse.matmul(x, y, square, transpose_b=True),
        left.mT,
        blocksparse.softmax(left),
        blocksparse.softmax(left, mask=left > 0),
        blocksparse.repeat(left, (2, 1, 2)),
        blocksparse.adapt(left, blocksparse.adapt(layout, 64)),
        repeat_interleave(left, 2, -1),
        blocksparse.cat([left, right], -2),
        left + x.new_zeros(b, 16 * rows, 1),
        left * x.new_zeros(b, 16 * rows, 1),
        left.square(),
    ]
    yield from (p.to_dense() if isinstance(p, blocksparse.BlockSparseTensor) else p for p in products)
    yield left.sum(-1)
    most = left.amax(-1)
    yield torch.where(most == -torch.inf, 0, most)
    for dim, bound in enumerate(x.shape):
        index = blocksparse.from_dense(torch.zeros(x.shape, dtype=torch.int64, device=x.device), layout)
        moved = [blocksparse.gather(left, dim, index), blocksparse.scatter(left, dim, index, right)]
        for reduce in ("sum", "amax", "prod"):
            moved.append(blocksparse.scatter(left, dim, index, right, reduce))
        if bound:
            blocksparse.layout_of_indices(index, dim, bound)
        yield from (tensor.to_dense() for tensor in moved)


def _block_attention(draw: Draw, b: int, rows: int, cols: int) -> Results:
    q, k = draw(b, 2, 16 * rows, 8), draw(b, 2, 32 * cols, 8)
    layout = blocksparse.Layout.from_mask(torch.zeros(b, 2, rows, cols, device=q.device).bool(), (16, 32))
    out, lse = blocksparse.attention(q, k, k, layout, return_lse=True)
    yield out
    yield torch.where(lse == -torch.inf, 0, lse)


MATRICES = [_rowsparse, _decode, _encode, _gemm, _overflowing, _ffn]
SEQUENCES = [(0, 70, 70), (2, 0, 0), (2, 0, 90), (2, 70, 0), (2, 70, 90), (2, 70, 70), (2, 4, 90)]
GRIDS = [(0, 2, 3), (2, 0, 3), (2, 2, 0), (2, 0, 0), (2, 2, 3)]
CASES = [
    *itertools.product(MATRICES, NOTHING),
    *((_selected, sizes) for sizes in SEQUENCES),
    *itertools.product((_blocks, _block_attention), GRIDS),
]


def run(scenario: Any, sizes: tuple[int, int, int], device: torch.device) -> list[Tensor]:
    """What the scenario computes, and the gradients of what it draws."""
    drawn: list[Tensor] = []
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        drawn.append(torch.randn(shape, device=device, generator=generator).requires_grad_())
        return drawn[-1]

    results = list(scenario(draw, *sizes))
    totals = [result.sum() for result in results if result.requires_grad]
    if totals:
        torch.stack(totals).sum().backward()
    return results + [tensor.grad for tensor in drawn if tensor.grad is not None]


@pytest.mark.parametrize("scenario, sizes", CASES, ids=lambda v: str(v) if isinstance(v, tuple) else v.__name__[1:])
def test_nothing_comes_of_nothing(scenario: Any, sizes: tuple[int, int, int], device: torch.device) -> None:
    for result in run(scenario, sizes, device):
        assert torch.equal(result, torch.zeros_like(result)), result


@pytest.mark.native
@pytest.mark.parametrize("sizes", LARGE, ids=str)
@pytest.mark.parametrize("scenario", MATRICES, ids=lambda scenario: scenario.__name__[1:])
def test_sizes_that_reach_every_path(scenario: Any, sizes: tuple[int, int, int], device: torch.device) -> None:
    for result in run(scenario, sizes, device):
        assert not result.any()


@functools.cache
def recorded(device: torch.device) -> dict[str, list[tuple[Any, ...]]]:
    """Operator -> its calls in all scenarios, as far as each comes."""
    with Recorder() as recorder:
        for scenario, sizes in CASES:
            with suppress(Exception):
                run(scenario, sizes, device)
    return recorder.calls


@pytest.mark.native
@pytest.mark.parametrize("name", registered())
def test_operator(name: str, device: torch.device) -> None:
    """Each is called with nothing, and its fake knows the shapes that come of it."""
    calls = recorded(device).get(name)
    assert calls, f"no scenario calls {name} with nothing to compute: add one"
    operator = getattr(torch.ops.gossamer, name.split("::")[1]).default
    for args in calls[:: max(len(calls) // 4, 1)]:
        torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))

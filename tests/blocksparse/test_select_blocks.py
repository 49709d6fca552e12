"""`blocksparse.select_blocks` against a search in float64, block by block."""

import math

import pytest
import torch
from torch import Tensor

from gossamer.blocksparse import Layout, attention, select_blocks
from tests.graphs import follows


def selected(
    q: Tensor, k: Tensor, block: tuple[int, int], *, top_k: int | None = None, threshold: float | None = None,
    sinks: int = 0, window: int | None = None, causal: bool = False, lengths: list[int] | None = None,
) -> Tensor:  # fmt: skip
    """The blocks by the definition, one row after the other."""
    (b, h, tq, d), (_, hk, tk, _) = q.shape, k.shape
    (height, width), rows, cols = block, -(-tq // block[0]), -(-tk // block[1])
    mask = torch.zeros(b, h, rows, cols, dtype=torch.bool)
    for batch, head, r in ((batch, head, r) for batch in range(b) for head in range(h) for r in range(rows)):
        length = tk if lengths is None else lengths[batch]
        mean = q[batch, head, r * height : (r + 1) * height].cpu().double().mean(0)
        shift = max(length - tq, min(tk - tq, 0))
        positions = range(r * height + shift, min((r + 1) * height, tq) + shift)
        found = {}
        for c in range(cols):
            keys = k[batch, head * hk // h, c * width : min((c + 1) * width, length)].cpu().double()
            if len(keys) and not (causal and c * width > positions[-1]):
                found[c] = float(mean @ keys.mean(0)) / math.sqrt(d)
        always = {c for c in found if c < sinks}
        if window is not None:
            first, last = positions[0] - window, positions[-1] + (0 if causal else window)
            always |= {c for c in found if c * width <= last and (c + 1) * width > first}
        total = sum(map(math.exp, found.values()))
        ranked = sorted(found, key=lambda c: (c not in always, -found[c], c))
        share = 0.0
        for rank, c in enumerate(ranked):
            fits = (top_k is None or rank < top_k) and (threshold is None or share < threshold)
            mask[batch, head, r, c] = fits or c in always
            share += math.exp(found[c]) / total
    return mask


def operands(device: torch.device, dtype: torch.dtype, size: tuple[int, int], heads: tuple[int, int] = (2, 1)):
    g = torch.Generator(device).manual_seed(0)
    return tuple(torch.randn(2, h, t, 8, device=device, generator=g).mul(2).to(dtype) for h, t in zip(heads, size))


@pytest.mark.parametrize("size, block", [((64, 64), (16, 16)), ((70, 150), (32, 16)), ((150, 70), (16, 32))], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 2},
        {"top_k": 2, "sinks": 1, "window": 0, "causal": True},
        {"top_k": 1, "sinks": 2, "window": 33},
        {"threshold": 0.7},
        {"threshold": 0.9, "window": 17, "causal": True},
        {"top_k": 3, "threshold": 0.8, "sinks": 1},
    ],
    ids=str,
)
def test_selects_by_definition(size, block, options, dtype: torch.dtype, device: torch.device) -> None:
    q, k = operands(device, dtype, size)
    layout = select_blocks(q, k, block, **options)
    assert torch.equal(layout.to_dense().cpu(), selected(q, k, block, **options))
    assert not bool(layout.overflowed) and layout.size == size and layout.block_size == block
    lengths = [size[1] - 3, 17]
    layout = select_blocks(q, k, block, lengths=torch.tensor(lengths, device=device), **options)
    assert torch.equal(layout.to_dense().cpu(), selected(q, k, block, lengths=lengths, **options))
    assert not bool(layout.overflowed)


def test_equal_scores_take_the_lowest_index(device: torch.device) -> None:
    q, k = torch.ones(1, 1, 32, 4, device=device), torch.ones(1, 1, 96, 4, device=device)
    layout = select_blocks(q, k, 16, top_k=2)
    assert layout.to_dense().tolist() == [[[[True, True, False, False, False, False]] * 2]]
    layout = select_blocks(q, k, 16, top_k=2, window=0)
    assert layout.to_dense()[0, 0].nonzero().tolist() == [[0, 0], [0, 4], [1, 0], [1, 5]]


def test_padding_and_nan(device: torch.device) -> None:
    """What stands behind a length is in no mean; NaN counts as the highest score."""
    q, k = operands(device, torch.float32, (64, 64))
    lengths = torch.tensor([40, 64], device=device)
    wanted = select_blocks(q, k, 16, top_k=1, lengths=lengths).to_dense()
    k[0, :, 40:] = math.nan
    assert torch.equal(select_blocks(q, k, 16, top_k=1, lengths=lengths).to_dense(), wanted)
    k[1, :, 50] = math.nan
    taken = select_blocks(q, k, 16, top_k=1, lengths=lengths).to_dense()
    assert bool(taken[1, ..., 3].all()) and int(taken[1].sum()) == 8


def test_every_query_has_a_key(device: torch.device) -> None:
    """A causal selection that keeps the diagonal leaves no row empty, and attention over all blocks is dense."""
    q, k = operands(device, torch.float32, (70, 70), (2, 2))
    layout = select_blocks(q, k, 16, top_k=2, window=0, causal=True)
    assert bool(attention(q, k, k, layout, causal=True, return_lse=True)[1].isfinite().all())
    layout = select_blocks(q, k, 16, threshold=1.0, causal=True, window=70)
    full = Layout.from_mask(torch.ones(5, 5, device=device).bool(), 16, size=(70, 70))
    torch.testing.assert_close(attention(q, k, k, layout, causal=True), attention(q, k, k, full, causal=True))


@pytest.mark.parametrize("tq, tk", [(0, 32), (32, 0), (0, 0)])
def test_empty_input(tq: int, tk: int, device: torch.device) -> None:
    q, k = (torch.randn(1, 2, t, 8, device=device) for t in (tq, tk))
    layout = select_blocks(q, k, 16, top_k=2, window=0)
    assert layout.shape == (1, 2, -(-tq // 16), -(-tk // 16)) and int(layout.nnz) == 0


def test_capacity_can_overflow(device: torch.device) -> None:
    q, k = operands(device, torch.float32, (64, 64))
    assert bool(select_blocks(q, k, 16, top_k=2, capacity=5).overflowed)


@pytest.mark.native
def test_compiles(compiled, device: torch.device) -> None:
    q, k = operands(device, torch.float32, (64, 64))
    fast = compiled(lambda q, k: select_blocks(q, k, 16, top_k=2, threshold=0.9, causal=True, window=0))
    ours, other = fast(q, k), select_blocks(q, k, 16, top_k=2, threshold=0.9, causal=True, window=0)
    assert torch.equal(ours.to_dense(), other.to_dense()) and ours.capacity == other.capacity


@pytest.mark.gpu
def test_no_sync_and_graph_capture(device: torch.device) -> None:
    q, k = operands(device, torch.float32, (256, 256))
    follows(lambda: [select_blocks(q, k, 16, top_k=2, threshold=0.9, causal=True).to_dense()], q)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"top_k": None}, ValueError, "top_k or threshold must be given, got neither"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"threshold": 1.5}, ValueError, "threshold must be at most 1, got 1.5"),
        ({"threshold": 0.0}, ValueError, "threshold must be above 0"),
        ({"sinks": -1}, ValueError, "sinks must be an int of at least 0, got -1"),
        ({"window": 1.5}, ValueError, "window must be an int of at least 0, got 1.5"),
        ({"block_size": 24}, ValueError, "block_size must be 16, 32, 64 or 128"),
        ({"k": torch.ones(1, 3, 32, 8)}, ValueError, "the heads of k must divide the 2 heads of q, got 3"),
        ({"k": torch.ones(1, 2, 32, 9)}, ValueError, r"q and k must have shapes \[B, H, Tq, D\]"),
        ({"q": torch.ones(1, 2, 32, 8, dtype=torch.int64)}, TypeError, "q must be float32, float16 or bfloat16"),
        ({"lengths": torch.ones(2).int()}, ValueError, r"lengths must have shape \[B\] = \[1\]"),
        ({"lengths": torch.ones(1)}, TypeError, "lengths must be int32 or int64, got float32"),
        ({"scale": math.nan}, ValueError, "scale must be a finite number, got nan"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change, error: type[Exception], message: str) -> None:
    q, k = torch.ones(2, 1, 2, 32, 8)
    given = {"q": q, "k": k, "block_size": 16, "top_k": 1, **change}
    with pytest.raises(error, match=f"blocksparse.select_blocks: {message}"):
        select_blocks(given.pop("q"), given.pop("k"), given.pop("block_size"), **given)

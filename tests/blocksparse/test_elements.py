"""Which elements of blocks take part: patterns against their definition, what layouts make of them, and who asks."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from gossamer import blocksparse
from gossamer.blocksparse import Layout
from tests.strategies import seeded

SIZES = [
    ((64, 64), (16, 16)),
    ((50, 90), (16, 32)),
    ((90, 50), (32, 16)),
    ((1, 200), (64, 128)),
    ((130, 130), (64, 64)),
]
Pattern = Callable[..., Layout]


def positions(size: tuple[int, int], length: int | None) -> tuple[Tensor, Tensor]:
    m, n = size
    shift = n - m if length is None else max(length - m, min(n - m, 0))
    return torch.arange(m)[:, None] + shift, torch.arange(n)


def window(behind: int, ahead: int, dilation: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda i, j: (i - j <= behind) & (j - i <= ahead) & ((i - j) % dilation == 0)


def packed(borders: list[int], causal: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def takes(i: Tensor, j: Tensor) -> Tensor:
        same = torch.zeros(torch.broadcast_shapes(i.shape, j.shape), dtype=torch.bool)
        for begin, end in itertools.pairwise(borders):
            same |= (i >= begin) & (i < end) & (j >= begin) & (j < end)
        return same & (i >= j) if causal else same

    return takes


BORDERS = [0, 7, 7, 40, 61, 88]
PATTERNS: dict[str, tuple[Pattern, Callable[[Tensor, Tensor], Tensor]]] = {
    "causal": (blocksparse.causal, lambda i, j: i >= j),
    "window": (lambda *a, **k: blocksparse.sliding_window(*a, (20, 3), **k), window(20, 3, 1)),
    "dilated": (lambda *a, **k: blocksparse.sliding_window(*a, (70, 40), dilation=3, **k), window(70, 40, 3)),
    "wide": (lambda *a, **k: blocksparse.sliding_window(*a, (120, 0), **k), window(120, 0, 1)),
    "first": (lambda *a, **k: blocksparse.global_tokens(*a, 17, **k), lambda i, j: (i >= 0) & (i < 17) | (j < 17)),
    "documents": (
        lambda *a, device, **k: blocksparse.documents(*a, torch.tensor(BORDERS, device=device), **k),
        packed(BORDERS, False),
    ),
    "causal documents": (
        lambda *a, device, **k: blocksparse.documents(*a, torch.tensor(BORDERS, device=device), causal=True, **k),
        packed(BORDERS, True),
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("size, block", SIZES, ids=str)
def test_patterns(size: tuple[int, int], block: tuple[int, int], name: str, device: torch.device) -> None:
    make, takes = PATTERNS[name]
    want = takes(*positions(size, None)).expand(size)
    layout = make(size, block, device=device)
    assert torch.equal(layout.element_mask().cpu(), want)
    assert torch.equal(layout.to_dense().cpu(), Layout.from_dense(want, block).to_dense())
    # Blocks of which all elements take part have no words.
    pad = torch.nn.functional.pad(want, (0, -size[1] % block[1], 0, -size[0] % block[0]), value=True)
    every = pad.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).all(3).all(1)
    cut = layout.to_dense().cpu() & ~every
    assert layout.form.cut == int(cut.sum()) and (layout.elements is None) == (not cut.any())
    whole = make(size, block, device=device, elements=False)
    assert whole.elements is None and torch.equal(whole.to_dense(), layout.to_dense())


@pytest.mark.parametrize("capacity", [None, 400])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("size, block", SIZES[:4], ids=str)
def test_lengths(size, block, name: str, capacity: int | None, device: torch.device) -> None:
    """The last query stands beside the last key that is in use, as in `attention.sparse_attention`."""
    make, takes = PATTERNS[name]
    lengths = torch.tensor([size[1], 37, 1, 0], device=device)
    layout = make(size, block, lengths=lengths, capacity=capacity, device=device)
    wanted = []
    for length in lengths.tolist():
        i, j = positions(size, length)
        wanted.append(takes(i, j).expand(size) & (i < length) & (j < length))
    assert torch.equal(layout.element_mask().cpu(), torch.stack(wanted))
    assert torch.equal(layout.to_dense().cpu(), Layout.from_dense(torch.stack(wanted), block).to_dense())


def test_tokens_of_each_sequence(device: torch.device) -> None:
    tokens, lengths = torch.tensor([[3, 40], [-1, 17]], device=device), torch.tensor([64, 30], device=device)
    layout = blocksparse.global_tokens((64, 64), 16, tokens, lengths=lengths)
    want = torch.zeros(2, 64, 64, dtype=torch.bool)
    for matrix, found, length in zip(want, tokens.tolist(), lengths.tolist()):
        for token in found:
            if 0 <= token < length:
                matrix[token, :length] = matrix[:length, token] = True
    assert torch.equal(layout.element_mask().cpu(), want)


def joined(device: torch.device) -> list[Layout]:
    size, block = (96, 96), 16
    tokens = torch.tensor([[3, 60], [17, 80]], device=device)
    return [
        blocksparse.sliding_window(size, block, (9, 4), device=device),
        blocksparse.global_tokens(size, block, tokens),
        Layout.random((2, 6, 6), block, 0.3, generator=seeded(0, device), device=device),
        blocksparse.causal(size, block, device=device),
    ]


@pytest.mark.parametrize("capacity", [None, 72])
@pytest.mark.parametrize("which", [(0, 1), (2, 0), (3, 1, 0), (2,), (0, 3)], ids=str)
def test_union_and_intersection(which: tuple[int, ...], capacity: int | None, device: torch.device) -> None:
    layouts = [joined(device)[k] for k in which]
    masks = [layout.element_mask() for layout in layouts]
    union, both = masks[0], masks[0]
    for mask in masks[1:]:
        union, both = union | mask, both & mask
    got = layouts[0].union(*layouts[1:], capacity=capacity)
    assert torch.equal(got.element_mask(), union) and (capacity is None) == got.filled
    assert torch.equal(layouts[0].intersection(*layouts[1:], capacity=capacity).element_mask(), both)


def test_transposed_and_copied(device: torch.device) -> None:
    layout = blocksparse.sliding_window((50, 90), (16, 64), (20, 3), capacity=30, device=device)
    turned = layout.transpose()
    assert torch.equal(turned.element_mask(), layout.element_mask().mT)
    assert torch.equal(turned.transpose().element_mask(), layout.element_mask())
    leaves, spec = _pytree.tree_flatten(layout)
    for same in (copy.deepcopy(layout), layout.to("cpu"), _pytree.tree_unflatten(leaves, spec)):
        assert torch.equal(same.element_mask().cpu(), layout.element_mask().cpu())


@pytest.mark.native
def test_compile(compiled, device: torch.device) -> None:
    def call(x: Tensor) -> Tensor:
        layout = blocksparse.sliding_window((50, 90), (16, 32), (20, 0), device=x.device)
        return layout.union(blocksparse.global_tokens((50, 90), (16, 32), 2, device=x.device), capacity=40).elements

    x = torch.zeros(1, device=device)
    assert torch.equal(compiled(call)(x), call(x))


def test_errors() -> None:
    for borders in ([3, 9], [0, 9, 4]):
        with pytest.raises(ValueError, match=r"blocksparse.documents: borders must ascend from 0, got \["):
            blocksparse.documents((16, 16), 16, torch.tensor(borders))
    with pytest.raises(ValueError, match=r"blocksparse.documents: borders must have shape \[documents \+ 1\]"):
        blocksparse.documents((16, 16), 16, torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"blocksparse.documents: borders must be int32 or int64"):
        blocksparse.documents((16, 16), 16, torch.zeros(2))

"""CUDA graphs that make layouts, and of attention with terms and a bias, follow their input."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gossamer import blocksparse
from gossamer.blocksparse import Layout, Relative
from tests.blocksparse.blocks import random_layout
from tests.graphs import follows
from tests.strategies import seeded


@pytest.mark.gpu
def test_a_layout_of_the_same_graph(device: torch.device) -> None:
    """Layouts made within it, of masks that change, and what is computed with them."""
    first = torch.rand(2, 3, 3, device=device, generator=seeded(2, device)) < 0.5
    second = torch.rand(2, 3, 3, device=device, generator=seeded(3, device)) < 0.5
    x = torch.randn(2, 48, 48, device=device, generator=seeded(4, device))

    def call() -> tuple[Tensor, ...]:
        a, b = (Layout.from_mask(mask, 16, capacity=18) for mask in (first, second))
        made = Layout.product(a, b, capacity=18), a.union(b, capacity=18), a.intersection(b, capacity=18)
        blocks = blocksparse.from_dense(x, made[1])
        moved = [out.to_dense() for out in ((blocks.exp() * 2).mT, blocksparse.softmax(blocks))]
        return *(layout.to_dense() for layout in made), blocks.sum(-1), *moved

    follows(call, first, second, x)


@pytest.mark.gpu
def test_attention_with_terms_and_a_bias(device: torch.device) -> None:
    generator = seeded(5, device)
    layout = random_layout((2,), (96, 128), (32, 32), device)
    shapes = [(2, 2, 96, 16), (2, 2, 128, 16), (2, 2, 128, 16), (2, 9, 16), (1, 25, 16), (2, 96, 128)]
    leaves = [torch.randn(shape, device=device, generator=generator).requires_grad_() for shape in shapes]
    places = torch.arange(128, device=device)
    pitches = torch.randint(-9, 9, (2, 128), device=device, generator=generator)

    def step() -> Sequence[Tensor]:
        q, k, v, near, far, bias = leaves
        terms = [Relative(near, places[32:], places), Relative(far, pitches[:, 32:], pitches)]
        out = blocksparse.attention(q, k, v, layout, relative=terms, bias=bias, causal=True)
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

    follows(step, *leaves)

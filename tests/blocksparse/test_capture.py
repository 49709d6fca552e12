"""CUDA graphs of the room's smaller operators, and of attention with terms and a bias, follow their input."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from gossamer import blocksparse
from gossamer.blocksparse import BlockSparseTensor, Layout, Relative
from tests.blocksparse.blocks import random_layout
from tests.graphs import follows
from tests.strategies import seeded

Step = Callable[..., Tensor]


def _norm(x: BlockSparseTensor, vector: Tensor) -> Tensor:
    return blocksparse.layer_norm(x, vector, 2 * vector).to_dense()


def _moved(x: BlockSparseTensor, vector: Tensor) -> Tensor:
    return ((x + vector - 2 * vector) * vector).to_dense()


def _spread(x: BlockSparseTensor, vector: Tensor) -> Tensor:
    rows = torch.linspace(-1, 1, x.shape[-2], device=x.device)
    return ((x * 0 + rows[:, None] + vector) * (vector - x) * x).to_dense()


STEPS: dict[str, Step] = {
    "sum": lambda x, vector: x.sum(-1) * x.mean(-1),
    "max": lambda x, vector: x.amax(-2).clamp(min=-9) * vector,
    "vectors": _moved,
    "broadcast": _spread,
    "layer_norm": _norm,
    "rms_norm": lambda x, vector: blocksparse.rms_norm(x, vector).to_dense(),
    "arithmetic": lambda x, vector: (1 / (x * x + 1).sqrt() + 2**x).to_dense() * vector,
    "rowwise": lambda x, vector: blocksparse.from_dense(x.to_dense().cumsum(-1), x.layout).to_dense() * vector,
}


def inputs(device: torch.device) -> tuple[Tensor, Tensor, Layout]:
    """Values that are a leaf, a vector of columns, and a layout with room and cut blocks."""
    layout = random_layout((2,), (40, 70), (16, 32), device)
    values = torch.randn(layout.capacity, 16, 32, device=device, generator=seeded(0, device)).requires_grad_()
    return values, torch.randn(70, device=device, generator=seeded(1, device)).requires_grad_(), layout


def run(step: Step, values: Tensor, vector: Tensor, layout: Layout) -> Sequence[Tensor]:
    out = step(BlockSparseTensor(values, layout), vector)
    return out.detach(), *torch.autograd.grad(out.square().sum(), (values, vector), allow_unused=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_rows_norms_and_arithmetic(name: str, device: torch.device) -> None:
    values, vector, layout = inputs(device)
    follows(lambda: run(STEPS[name], values, vector, layout), values, vector)


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
        return *(layout.to_dense() for layout in made), blocks.sum(-1), (blocks.exp() * 2).mT.to_dense()

    follows(call, first, second, x)


def attend(device: torch.device) -> tuple[Callable[[], Sequence[Tensor]], list[Tensor]]:
    """Attention with two terms of relative positions and a bias: a step, and its leaves."""
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

    return step, leaves


@pytest.mark.gpu
def test_attention_with_terms_and_a_bias(device: torch.device) -> None:
    step, leaves = attend(device)
    follows(step, *leaves)


@pytest.mark.native
def test_the_steps_reach_their_inputs(device: torch.device) -> None:
    """Without a graph, also where there is no GPU: results and gradients are finite, and not all zero."""
    values, vector, layout = inputs(device)
    step, _ = attend(device)
    for found in (*(run(STEPS[name], values, vector, layout) for name in STEPS), step()):
        assert all(x is None or (x.isfinite().all() and x.any()) for x in found)

"""What holds for each operator with a gradient but attention and matmul: derivatives of both orders, the same results
compiled, from a CUDA graph and when called again, and NaN from a layout that overflowed."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gossamer import blocksparse
from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense
from tests.blocksparse.blocks import random_blocks, random_index, random_layout, repeat_interleave
from tests.graphs import follows
from tests.strategies import seeded

BLOCK = (16, 16)


class Given(NamedTuple):
    """Two tensors of [2, M, N], a vector of columns, for each dimension an index with the layout of y, a dense mask,
    and a layout for x's matrices next to each other."""

    x: BlockSparseTensor
    y: BlockSparseTensor
    vector: Tensor
    index: Sequence[BlockSparseTensor]
    mask: Tensor
    merged: Layout


def given(values: Tensor, others: Tensor, vector: Tensor, layouts: Sequence[Layout]) -> Given:
    lead, m, n = layouts[0].dense_shape
    merged = Layout.full((-(-m // 16), -(-2 * n // 16)), BLOCK, size=(m, 2 * n), device=values.device)
    index = [random_index(layouts[1], bound) for bound in (lead, m, n)]
    mask = torch.rand(m, n, device=values.device, generator=seeded(7, values.device)) < 0.8
    x, y = (BlockSparseTensor(*pair) for pair in zip((values, others), layouts))
    return Given(x, y, vector, index, mask, merged)


class Operator(NamedTuple):
    call: Callable[[Given], Tensor | BlockSparseTensor]
    # Of which tensors a layout that overflowed spoils the result, and of which the gradient as well.
    read: str = "x"
    spoilt: str = ""


def scattered(dim: int, reduce: str | None = None, include_self: bool = True) -> Operator:
    options: dict[str, Any] = {} if reduce is None else {"reduce": reduce, "include_self": include_self}
    return Operator(lambda g: blocksparse.scatter(g.x, dim, g.index[dim], g.y, **options), "xy", "y" if reduce else "")


def reached(g: Given) -> BlockSparseTensor:
    layout = blocksparse.layout_of_indices(g.index[1], 1, g.x.shape[1], capacity=40)
    return blocksparse.scatter(layout, 1, g.index[1], g.y)


OPERATORS = {
    "to_dense": Operator(lambda g: g.x.to_dense(0.5), spoilt="x"),
    "from_dense": Operator(lambda g: from_dense(g.x.to_dense(), g.y.layout), "y"),
    "transposed": Operator(lambda g: g.x.mT, spoilt="x"),
    "arithmetic": Operator(lambda g: ((1 / (g.x * g.x + 1).sqrt() + 2**g.x) * 2 + g.x.exp()).to_dense()),
    "sum": Operator(lambda g: g.x.sum(-1) * g.x.mean(-1)),
    "maximum": Operator(lambda g: g.x.amax(-2).clamp(min=-9) * g.vector),
    "vectors": Operator(lambda g: (g.x + g.vector - 2 * g.vector) * g.vector),
    "broadcast": Operator(lambda g: ((g.x - g.x.mean(-1)[..., None] + g.vector) * (g.vector - g.x) * g.x).to_dense()),
    "layer_norm": Operator(lambda g: blocksparse.layer_norm(g.x, g.vector, 2 * g.vector, 0.1)),
    "rms_norm": Operator(lambda g: blocksparse.rms_norm(g.x, g.vector, 0.1)),
    "softmax": Operator(lambda g: blocksparse.softmax(g.x, scale=0.5), spoilt="x"),
    "softmax masked": Operator(lambda g: blocksparse.softmax(g.x, mask=g.mask).mT, spoilt="x"),
    "gather": Operator(lambda g: blocksparse.gather(g.x, 0, g.index[0]), "xy", "x"),
    "gather rows": Operator(lambda g: blocksparse.gather(g.x, 1, g.index[1]), "xy", "x"),
    "gather columns": Operator(lambda g: blocksparse.gather(g.x, -1, g.index[2]), "xy", "x"),
    **{f"scatter {dim}": scattered(dim) for dim in range(3)},
    "scatter reached": Operator(reached, "y"),
    **{f"scatter {dim} {reduce}": scattered(dim, reduce) for dim in range(3) for reduce in ("sum", "mean")},
    **{f"scatter {reduce}": scattered(1, reduce) for reduce in ("amax", "amin", "prod")},
    **{f"scatter {name} alone": scattered(2, name, False) for name in ("sum", "mean", "amax", "amin", "prod")},
    "repeat": Operator(lambda g: blocksparse.repeat(g.x, (2, 1, 3)), spoilt="x"),
    "repeat_interleave": Operator(lambda g: repeat_interleave(g.x, 2, 1), spoilt="x"),
    "cat": Operator(lambda g: blocksparse.cat([g.x, g.y, g.x], 1), "xy", "xy"),
    "stack": Operator(lambda g: blocksparse.stack([g.x, g.y], 1), "xy", "xy"),
    "split": Operator(lambda g: blocksparse.split(g.x, 9, 2, capacity=8)[0], spoilt="x"),
    "merge": Operator(lambda g: blocksparse.merge(g.x, 0, layout=g.merged), spoilt="x"),
    "adapt": Operator(lambda g: blocksparse.adapt(g.x, g.y.layout), "xy", "x"),
    "adapt blocks": Operator(
        lambda g: blocksparse.adapt(g.x, blocksparse.adapt(g.x.layout, 32, capacity=8)), spoilt="x"
    ),
}
EACH = pytest.mark.parametrize("name", OPERATORS)


def operands(
    size: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], tuple[Layout, Layout]]:
    """Values of x and of y, and the vector; room behind the last block, and blocks that the matrix cuts."""
    layouts = random_layout((2,), size, BLOCK, device), random_layout((2,), size, BLOCK, device, seed=1)
    leaves = [from_dense(random_blocks(at, dtype, seed=2 + k), at).values for k, at in enumerate(layouts)]
    leaves.append(torch.randn(size[1], device=device, generator=seeded(1, device)).to(dtype))
    return [leaf.requires_grad_() for leaf in leaves], layouts


def dense(out: Tensor | BlockSparseTensor) -> Tensor:
    return out.to_dense() if isinstance(out, BlockSparseTensor) else out


def called(name: str, layouts: Sequence[Layout]) -> Callable[..., Tensor]:
    """The dense result as a function of values and vector, with all else made before."""
    device = layouts[0].device
    zeros = [torch.zeros(at.capacity, *BLOCK, device=device) for at in layouts]
    made = given(*zeros, zeros[0], layouts)

    def call(values: Tensor, others: Tensor, vector: Tensor) -> Tensor:
        x, y = (BlockSparseTensor(*pair) for pair in zip((values, others), layouts))
        return dense(OPERATORS[name].call(made._replace(x=x, y=y, vector=vector)))

    return call


def run(call: Callable[..., Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The result and gradients."""
    out = call(*leaves)
    return out.detach(), *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)


@pytest.mark.native
@EACH
def test_derivatives(name: str) -> None:
    leaves, layouts = operands((17, 20), torch.float64, torch.device("cpu"))
    call = called(name, layouts)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    if "softmax" not in name and "prod" not in name:
        assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.native
@EACH
def test_compiled(name: str, device: torch.device, compiled: Any) -> None:
    leaves, layouts = operands((40, 50), torch.float32, device)
    call = called(name, layouts)
    # Inductor divides by multiplying, and sums in another order.
    torch.testing.assert_close(run(compiled(call), leaves), run(call, leaves), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@EACH
def test_captured(name: str, device: torch.device) -> None:
    leaves, layouts = operands((40, 70), torch.float32, device)
    call = called(name, layouts)
    follows(lambda: run(call, leaves), *leaves)


@pytest.mark.native
@EACH
def test_the_same_bits_again(name: str, device: torch.device) -> None:
    leaves, layouts = operands((40, 50), torch.float32, device)
    first, second = (run(called(name, layouts), leaves) for _ in range(2))
    assert first[0].isfinite().all() and first[0].any()
    for a, b in zip(first, second, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@EACH
def test_overflow_is_nan(name: str, device: torch.device) -> None:
    """In every block of the result, whichever layout has no room, and in gradients."""
    operator, mask = OPERATORS[name], torch.ones(2, 2, 2, device=device).bool()
    for lost in operator.read:
        layouts = [Layout.from_mask(mask, BLOCK, size=(20, 30), capacity=5 if at == lost else 8) for at in "xy"]
        leaves = [torch.ones(at.capacity, *BLOCK, device=device, requires_grad=True) for at in layouts]
        out = operator.call(given(*leaves, torch.ones(30, device=device), layouts))
        out = out.values if isinstance(out, BlockSparseTensor) else out
        assert out.isnan().all(), lost
        for at, grad in zip("xy", torch.autograd.grad(out.sum(), leaves, allow_unused=True)):
            assert at not in operator.spoilt or grad.isnan().all(), lost

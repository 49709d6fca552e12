"""Sums, maxima and vectors of rows and columns against dense PyTorch."""

import math
import re

import pytest
import torch
from torch import Tensor

from gossamer import blocksparse
from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense
from gossamer.testing import assert_close
from tests.strategies import seeded

SHAPES = [
    ((), (32, 48), (16, 16)),
    ((2,), (40, 70), (16, 32)),
    ((2, 2), (33, 20), (64, 16)),
    ((0,), (16, 16), (16, 16)),
]


VECTORS = {
    "x + v": lambda x, v: x + v,
    "v + x": lambda x, v: v + x,
    "x - v": lambda x, v: x - v,
    "v - x": lambda x, v: v - x,
    "x * v": lambda x, v: x * v,
    "v * x": lambda x, v: v * x,
}


def problem(lead, size, block, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, BlockSparseTensor, Tensor]:
    """(leaf, its blocks with NaN where they stand for no element, which elements are present)."""
    generator = seeded(0, device)
    mask = torch.rand(*lead, -(-size[0] // block[0]), -(-size[1] // block[1]), device=device, generator=generator) < 0.5
    layout = Layout.from_mask(mask, block, size=size, capacity=mask.numel() + 2)
    x = torch.randn(*lead, *size, device=device, generator=generator).to(dtype).requires_grad_()
    whole = from_dense(torch.ones_like(x), layout).values
    values = torch.where(whole == 0, math.nan, from_dense(x, layout).values)
    present = mask.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., : size[0], : size[1]]
    return x, BlockSparseTensor(values, layout), present


def dense(name: str, x: Tensor, present: Tensor, dim: int) -> Tensor:
    if name == "amax":
        return x.masked_fill(~present, -math.inf).amax(dim)
    return getattr(torch, name)(torch.where(present, x, 0), dim)


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("name", ["sum", "mean", "amax"])
@pytest.mark.parametrize("lead, size, block", SHAPES, ids=str)
def test_reductions(lead, size, block, name: str, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    x, blocks, present = problem(lead, size, block, dtype, device)
    got = getattr(blocks, name)(dim)
    results = []
    for leaf in (x.detach().double().requires_grad_(), x):
        want = dense(name, leaf, present, dim)
        kept = torch.where(want.isinf(), 0, want)
        results.append((want, torch.autograd.grad(kept, leaf, torch.ones_like(kept))[0]))
    (grad,) = torch.autograd.grad(torch.where(got.isinf(), 0, got), x, torch.ones_like(got))
    assert_close(got, reference64=results[0][0], plain=results[1][0], factor=3.0, name=name)
    assert_close(grad, reference64=results[0][1], plain=results[1][1], factor=3.0, name="gradient")


def test_equal_maxima_share_the_gradient(device: torch.device) -> None:
    layout = Layout.full((1, 2), 16, device=device)
    x = torch.ones(16, 32, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(from_dense(x, layout).amax(-1).sum(), x)
    assert torch.equal(grad, torch.full_like(x, 1 / 32))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("lead, size, block", SHAPES, ids=str)
def test_vectors(lead, size, block, name: str, axis: int, device: torch.device) -> None:
    x, blocks, present = problem(lead, size, block, torch.float32, device)
    shape = (*lead[1:], size[0], 1) if axis == -1 else (*lead[1:], 1, size[1])
    vector = torch.randn(shape, device=device, requires_grad=True)
    got = VECTORS[name](blocks, vector).to_dense()
    want = torch.where(present, VECTORS[name](x, vector), 0)
    torch.testing.assert_close(got, want)
    towards = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, (x, vector), towards), torch.autograd.grad(want, (x, vector), towards)):
        torch.testing.assert_close(a, b)


@pytest.mark.native
@pytest.mark.parametrize("name", VECTORS)
def test_vectors_compile(name: str, compiled, device: torch.device) -> None:
    x = from_dense(torch.randn(32, 32, device=device), Layout.full((2, 2), 16, device=device))
    vector = torch.randn(32, 1, device=device)
    assert torch.equal(compiled(VECTORS[name])(x, vector).to_dense(), VECTORS[name](x, vector).to_dense())


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda x: x.sum(0), ValueError, "BlockSparseTensor.sum: dim must be -1, .* -2, .* or None, .* got 0"),
        (
            lambda x: x + torch.ones(3),
            ValueError,
            r"BlockSparseTensor.__add__: other must have shape .*got \[3\]",
        ),
    ],
)
def test_errors(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(from_dense(torch.ones(32, 32), Layout.from_mask(torch.eye(2).bool(), 16)))


KINDS = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64]


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("lead, size, block", SHAPES, ids=str)
def test_integers_are_exact(lead, size, block, kind: torch.dtype, dim: int, device: torch.device) -> None:
    """As PyTorch has them: sums in int64, maxima of their own dtype. None of these numbers but bool is a float32."""
    _, blocks, present = problem(lead, size, block, torch.float32, device)
    least, most = (0, 1) if kind is torch.bool else (torch.iinfo(kind).min, torch.iinfo(kind).max)
    x = torch.randint(least, most, present.shape, device=device, generator=seeded(1, device)).to(kind)
    blocks = from_dense(x, blocks.layout)
    got = blocks.sum(dim)
    want = torch.where(present, x, torch.zeros((), dtype=kind, device=device)).sum(dim)
    assert got.dtype is torch.int64 and torch.equal(got, want)
    got = blocks.amax(dim)
    want = torch.where(present, x, torch.full((), least, dtype=kind, device=device)).amax(dim)
    assert got.dtype is kind and torch.equal(got, want)


def test_integers_that_overflow_a_layout_are_the_lowest(device: torch.device) -> None:
    layout = Layout.from_mask(torch.ones(3, 3, device=device).bool(), 16, capacity=8)
    x = BlockSparseTensor(torch.ones(8, 16, 16, device=device, dtype=torch.int32), layout)
    assert (x.sum() == torch.iinfo(torch.int64).min).all()
    assert (x.amax() == torch.iinfo(torch.int32).min).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    "name, call",
    [
        ("softmax", blocksparse.softmax),
        ("BlockSparseTensor.mean", lambda x: x.mean()),
        ("layer_norm", blocksparse.layer_norm),
        ("rms_norm", blocksparse.rms_norm),
        ("matmul", lambda x: blocksparse.matmul(x, x.to_dense())),
    ],
)
def test_what_computes_refuses_integers(name: str, call, kind: torch.dtype, device: torch.device) -> None:
    x = from_dense(torch.ones(16, 16, device=device).to(kind), Layout.full((1, 1), 16, device=device))
    given = "a" if name == "matmul" else "x"
    way = rf"Convert it with {given}\.to\(torch\.f"
    message = rf"blocksparse\.{re.escape(name)}: {given} must be float32.*got {str(kind)[6:]}\. {way}"
    with pytest.raises(TypeError, match=message):
        call(x)
    call(x.to(torch.float32))


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int64], ids=str)
@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("lead, size, block", SHAPES, ids=str)
def test_vectors_of_integers(lead, size, block, name: str, kind: torch.dtype, device: torch.device) -> None:
    _, blocks, present = problem(lead, size, block, torch.float32, device)
    x = torch.randint(0, 99, present.shape, device=device, generator=seeded(1, device)).to(kind)
    for vector in (torch.arange(size[0], device=device)[:, None], torch.arange(size[1], device=device)):
        got = VECTORS[name](from_dense(x, blocks.layout), vector.to(kind))
        want = torch.where(present, VECTORS[name](x, vector.to(kind)), torch.zeros((), dtype=kind, device=device))
        assert got.dtype is kind and torch.equal(got.to_dense(), want)
    # What a wider dtype holds would wrap around.
    for other in (torch.float32, torch.int64) if kind is not torch.int64 else (torch.float32,):
        message = rf"__: other must hold integers like x, {str(kind)[6:]} or narrower, got {str(other)[6:]}\. Convert x"
        with pytest.raises(TypeError, match=message):
            VECTORS[name](from_dense(x, blocks.layout), torch.ones(size[1], device=device, dtype=other))


@pytest.mark.parametrize("name", ["sum", "mean", "amax"])
@pytest.mark.parametrize("lead, size, block", SHAPES[:3], ids=str)
def test_reductions_of_all(lead, size, block, name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Absent blocks count as zeros in a sum, and take no part in a maximum; the block behind the last holds NaN."""
    x, blocks, present = problem(lead, size, block, dtype, device)
    results = []
    for leaf in (x.detach().double().requires_grad_(), x):
        masked = leaf.masked_fill(~present, -math.inf if name == "amax" else 0)
        want = getattr(masked, name)()
        results.append((want, *torch.autograd.grad(want, leaf)))
    got = getattr(torch, name)(blocks)
    for found, plain, exact in zip((got, *torch.autograd.grad(got, x)), results[1], results[0]):
        assert found.dtype is plain.dtype
        options = {"length": x.numel(), "magnitude": x.detach().double().abs().sum(), "factor": 3.0}
        assert_close(found, reference64=exact, plain=plain, **options)


@pytest.mark.parametrize("name", VECTORS)
def test_the_gradient_of_a_vector_is_summed_in_float32(name: str, device: torch.device) -> None:
    """Over all blocks, as PyTorch sums it: 256 + 1 in one block and -256 in another are 1."""
    layout = Layout.full((1, 12), 16, device=device)
    x = torch.ones(16, 192, device=device, dtype=torch.bfloat16)
    towards = torch.randn(16, 192, device=device, generator=seeded(3, device)).to(torch.bfloat16)
    towards[0] = 0
    towards[0, [0, 1, 40]] = torch.tensor([256.0, 1.0, -256.0], device=device, dtype=torch.bfloat16)
    vector = torch.randn(16, 1, device=device).to(torch.bfloat16).requires_grad_()
    out = VECTORS[name](from_dense(x, layout), vector)
    (got,) = torch.autograd.grad(out.to_dense(), vector, towards)
    want = towards.double().sum(1) * (-1 if name == "x - v" else 1)
    assert_close(got.flatten(), reference64=want, plain=want.float().to(torch.bfloat16))

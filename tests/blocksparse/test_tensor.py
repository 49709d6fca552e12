"""Dense to blocks and back against plain indexing."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense, softmax

CASES = [
    ((3, 4), (16, 16), None),
    ((2, 3, 2), (16, 32), (40, 50)),
    ((1, 2, 5, 3), (32, 16), None),
    ((2, 2), (64, 128), (65, 129)),
    ((2, 3, 21), (16, 16), (47, 330)),
    ((1, 2, 5), (32, 32), None),
    ((0, 2, 2), (16, 16), None),
]


def make(
    shape: tuple[int, ...],
    block: tuple[int, int],
    size: tuple[int, int] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Layout, Tensor]:
    """(x, layout, elements that it names)."""
    generator = torch.Generator(device).manual_seed(0)
    mask = torch.rand(shape, device=device, generator=generator) < 0.5
    layout = Layout.from_mask(mask, block, size=size, capacity=mask.numel() + 2)
    x = torch.randn(layout.dense_shape, device=device, generator=generator).to(dtype)
    named = mask.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return x, layout, named[..., : layout.size[0], : layout.size[1]]


@pytest.mark.parametrize("shape, block, size", CASES, ids=str)
def test_there_and_back(shape, block, size, dtype: torch.dtype, device: torch.device) -> None:
    x, layout, named = make(shape, block, size, dtype, device)
    for given in (x, x.transpose(-1, -2).contiguous().transpose(-1, -2)):
        blocks = from_dense(given, layout)
        for fill in (0.0, -2.0):
            assert torch.equal(blocks.to_dense(fill), torch.where(named, x, fill))
    nnz = int(layout.nnz)
    # Nothing but zeros beyond the matrix and behind the last block.
    assert not blocks.values[nnz:].any()
    assert torch.count_nonzero(blocks.values) == torch.count_nonzero(x * named)


def test_gradients(dtype: torch.dtype, device: torch.device) -> None:
    x, layout, named = make((2, 3, 2), (16, 32), (40, 50), dtype, device)
    x.requires_grad_()
    weight = torch.randn_like(x)
    (grad,) = torch.autograd.grad((from_dense(x, layout).to_dense(3.0) * weight).sum(), x)
    assert torch.equal(grad, torch.where(named, weight, 0))


def test_what_is_not_finite_stays(device: torch.device) -> None:
    x, layout, named = make((2, 2), (16, 16), (17, 20), torch.float32, device)
    x[0, 0], x[16, 19] = float("nan"), float("inf")
    got = from_dense(x, layout).to_dense()
    assert torch.equal(got.isnan(), torch.where(named, x, 0).isnan())
    assert torch.equal(got.isinf(), torch.where(named, x, 0).isinf())


@pytest.mark.native
def test_compile(compiled, device: torch.device) -> None:
    x, layout, named = make((2, 3, 2), (16, 32), (40, 50), torch.float32, device)
    blocks = compiled(from_dense)(x, layout)
    assert torch.equal(compiled(lambda blocks: blocks.to_dense())(blocks), x * named)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda x, layout: from_dense(x[:5], layout), ValueError, r"x must have shape \[..., M, N\] = \[32, 32\]"),
        (lambda x, layout: from_dense(x, x), TypeError, "layout must be a blocksparse.Layout, got Tensor"),
        (lambda x, layout: from_dense(x.cfloat(), layout), TypeError, "x must be float32.* got complex64"),
        (lambda x, layout: BlockSparseTensor(x, layout), ValueError, r"values must have shape .* = \[2, 16, 16\]"),
    ],
)
def test_errors(call, error: type[Exception], message: str) -> None:
    layout = Layout.from_mask(torch.eye(2).bool(), 16)
    with pytest.raises(error, match=message):
        call(torch.ones(32, 32), layout)


@pytest.mark.native
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_functions_of_values(compiled, device: torch.device) -> None:
    """An operator as a function of an ordinary tensor: the wrapper around it costs no copy, and no gradient."""
    x, layout, _ = make((2, 3, 2), (16, 32), (40, 50), torch.float32, device)
    leaf = from_dense(x, layout).values.requires_grad_()
    assert BlockSparseTensor(leaf, layout).values is leaf

    def energy(values: Tensor) -> Tensor:
        x = BlockSparseTensor(values, layout)
        return (softmax(x) * x.exp()).to_dense().square().sum()

    want = energy(leaf)
    (grad,) = torch.autograd.grad(want, leaf)
    for call in (compiled(energy), lambda values: checkpoint(energy, values, use_reentrant=False)):
        got = call(leaf)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, leaf)[0], grad)
    several = torch.stack([leaf.detach(), -leaf.detach()])
    torch.testing.assert_close(torch.func.vmap(energy)(several), torch.stack([energy(v) for v in several]))
    with pytest.raises(NotImplementedError, match=r"torch\.func\.grad.* not implemented\. Use torch\.autograd\.grad"):
        torch.func.grad(energy)(leaf)


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int8, torch.int64])
def test_integers(kind: torch.dtype, device: torch.device) -> None:
    """They are moved as they are; too many of them are the lowest there is."""
    x, layout, named = make((2, 3, 2), (16, 32), (40, 50), torch.float32, device)
    x = (100 * x).to(kind)
    for fill in (0, 1):
        assert torch.equal(from_dense(x, layout).to_dense(fill), torch.where(named, x, fill).to(kind))
    short = Layout.from_mask(layout.to_dense(), (16, 32), size=(40, 50), capacity=1)
    lowest = 0 if kind is torch.bool else torch.iinfo(kind).min
    blocks = from_dense(x, short)
    assert (blocks.values == lowest).all() and (blocks.to_dense() == lowest).all()

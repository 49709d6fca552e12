"""`nn.BlockSparseRowwise` against the module itself on dense tensors."""

import pytest
import torch
from torch import nn

from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense
from gossamer.nn import BlockSparseRowwise

pytestmark = pytest.mark.native


def operand(device: torch.device) -> tuple[torch.Tensor, BlockSparseTensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    layout = Layout.from_mask(torch.rand(2, 3, 2, device=device, generator=generator) < 0.6, (16, 32), size=(40, 50))
    x = from_dense(torch.randn(2, 40, 50, device=device, generator=generator), layout)
    return x.to_dense().requires_grad_(), x, from_dense(torch.ones_like(x.to_dense()), layout).to_dense()


@pytest.mark.parametrize(
    "module",
    [nn.ReLU(), nn.GELU(), nn.LayerNorm(50), nn.LayerNorm(50, elementwise_affine=False), nn.RMSNorm(50), nn.Softmax(-1),
     nn.Linear(50, 50), nn.Sequential(nn.LayerNorm(50), nn.Linear(50, 50))],
    ids=str,
)  # fmt: skip
def test_is_the_module(module: nn.Module, device: torch.device) -> None:
    module = module.to(device)
    dense, _, named = operand(device)
    _, x, _ = operand(device)
    x = BlockSparseTensor(x.values.requires_grad_(), x.layout)
    out = BlockSparseRowwise(module)(x)
    want = module(dense) * named
    torch.testing.assert_close(out.to_dense(), want)
    grad = torch.randn_like(want)
    parameters = list(module.parameters())
    ours = torch.autograd.grad(out.to_dense(), [x.values, *parameters], grad)
    theirs = torch.autograd.grad(want, [dense, *parameters], grad)
    torch.testing.assert_close(BlockSparseTensor(ours[0], x.layout).to_dense(), theirs[0] * named)
    for a, b in zip(ours[1:], theirs[1:]):
        torch.testing.assert_close(a, b)


def test_linear_of_another_size(device: torch.device) -> None:
    """The blocks of a result of other columns, with the bias there alone, and their gradients."""
    module = nn.Linear(50, 70).to(device)
    dense, x, _ = operand(device)
    layout = Layout.from_mask(torch.rand(2, 3, 5, device=device) < 0.5, 16, size=(40, 70))
    named = from_dense(torch.ones(2, 40, 70, device=device), layout).to_dense()
    x = BlockSparseTensor(x.values.requires_grad_(), x.layout)
    out, want = BlockSparseRowwise(module)(x, layout), module(dense) * named
    assert out.layout is layout
    torch.testing.assert_close(out.to_dense(), want)
    grad = torch.randn_like(want)
    ours = torch.autograd.grad(out.to_dense(), [x.values, *module.parameters()], grad)
    theirs = torch.autograd.grad(want, [dense, *module.parameters()], grad)
    for a, b in zip(ours[1:], theirs[1:]):
        torch.testing.assert_close(a, b)
    stored = from_dense(theirs[0], x.layout).values
    torch.testing.assert_close(
        BlockSparseTensor(ours[0], x.layout).to_dense(), BlockSparseTensor(stored, x.layout).to_dense()
    )


def test_dropout(device: torch.device) -> None:
    _, x, named = operand(device)
    module = BlockSparseRowwise(nn.Dropout(0.5))
    out, values = module(x).to_dense(), x.to_dense()
    kept = out != 0
    assert torch.equal(out[kept], 2 * values[kept]) and 0.4 < kept.sum() / named.sum() < 0.6
    assert torch.equal(module.eval()(x).to_dense(), values)


def test_hooks_are_called(device: torch.device) -> None:
    """They have to see rows, and so they do."""
    _, x, _ = operand(device)
    norm, seen = nn.LayerNorm(50).to(device), []
    norm.register_forward_hook(lambda module, given, result: seen.append(given[0].shape))
    BlockSparseRowwise(norm)(x)
    assert seen == [x.shape]


def test_errors(device: torch.device) -> None:
    _, x, _ = operand(device)
    with pytest.raises(TypeError, match=r"nn\.BlockSparseRowwise: x must be a BlockSparseTensor, got Tensor"):
        BlockSparseRowwise(nn.ReLU())(x.values)
    with pytest.raises(ValueError, match=r"the norm must be over rows of x, \(50,\), got \(40, 50\)"):
        BlockSparseRowwise(nn.LayerNorm((40, 50)))(x)
    with pytest.raises(ValueError, match=r"layout is for a plain nn\.Linear, which ReLU is not"):
        BlockSparseRowwise(nn.ReLU())(x, x.layout)
    with pytest.raises(ValueError, match=r"nn\.BlockSparseRowwise: layout must say .* 50 columns .* returns 70"):
        BlockSparseRowwise(nn.Linear(50, 70))(x)


def test_results_of_another_dtype(device: torch.device) -> None:
    """A module that returns whole numbers or bool: the places of a sorted row, for instance."""

    class Places(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.argsort(x, stable=True)

    class Signs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x < 0

    dense, x, named = operand(device)
    for module in (Places(), Signs()):
        out, want = BlockSparseRowwise(module)(x), module(dense)
        assert out.dtype is want.dtype and out.layout is x.layout
        assert torch.equal(out.to_dense(), torch.where(named != 0, want, torch.zeros_like(want)))

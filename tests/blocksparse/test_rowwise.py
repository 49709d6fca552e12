"""Norms, and any function of rows, of block-sparse tensors against PyTorch's on dense float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gossamer.blocksparse import (
    BlockSparseTensor,
    Layout,
    cat,
    from_dense,
    layer_norm,
    rms_norm,
    softmax,
)
from gossamer.testing import assert_close
from tests.blocksparse.blocks import elements, random_blocks, random_layout

pytestmark = pytest.mark.native
CASES = [((2,), (40, 50), (16, 32), 0.5), ((), (33, 64), (32, 16), 1.0), ((2, 2), (16, 20), (16, 16), 0.0)]


@pytest.mark.parametrize("lead, size, block, density", CASES, ids=str)
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("affine", [True, False])
def test_norms(lead, size, block, density, norm: str, affine: bool, dtype: torch.dtype, device: torch.device) -> None:
    layout = random_layout(lead, size, block, device, density=density)
    named = elements(layout)
    x = (random_blocks(layout, dtype) + 0.5 * named).to(dtype).requires_grad_()
    generator = torch.Generator(device).manual_seed(1)
    weight, bias = (torch.randn(size[1], device=device, generator=generator).to(dtype) for _ in range(2))
    leaves = [x, *([weight.requires_grad_(), bias.requires_grad_()][: 2 if norm == "layer" else 1] if affine else [])]

    def dense(x: Tensor, *given: Tensor) -> Tensor:
        if norm == "layer":
            return torch.where(named, functional.layer_norm(x * named, x.shape[-1:], *given, eps=1e-5), 0)
        return torch.where(named, functional.rms_norm(x * named, x.shape[-1:], *given, eps=1e-5), 0)

    # What takes no part is anything.
    blocks = from_dense(x, layout)
    inside = from_dense(torch.ones_like(x, dtype=torch.bool), layout).values
    blocks = BlockSparseTensor(torch.where(inside, blocks.values, torch.nan), layout)
    function = layer_norm if norm == "layer" else rms_norm
    out = function(blocks, *leaves[1:], eps=1e-5)
    assert out.layout is layout and out.dtype is dtype
    got = out.to_dense()
    grad = torch.randn(got.shape, device=device, generator=generator).to(dtype)
    ours = got, *torch.autograd.grad(got, leaves, grad)
    results = []
    for kind in (torch.float64, dtype):
        others = [t.detach().to(kind).requires_grad_() for t in leaves]
        want = dense(*others)
        results.append((want, *torch.autograd.grad(want, others, grad.to(kind))))
    for name, a, want, plain in zip(("out", "x", "weight", "bias"), ours, *results):
        assert_close(a, reference64=want, plain=plain, factor=4.0, name=name)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_autocast_leaves_dtypes(kind: torch.dtype, device: torch.device) -> None:
    """Norms take a module's float32 weights; products alone compute in autocast's dtype."""
    layout = random_layout((2,), (40, 50), (16, 32), device)
    x = from_dense(random_blocks(layout, kind), layout)
    weight, column = torch.full((50,), 0.5, device=device), torch.full((40, 1), 2.0, device=device)
    calls = [
        lambda: layer_norm(x, weight, weight),
        lambda: rms_norm(x, weight),
        lambda: softmax(x),
        lambda: x * column,
        lambda: x.gelu(),
        lambda: cat([x, x], -1),
    ]
    with torch.autocast(device.type, torch.bfloat16):
        found = [call().values for call in calls]
    for got, call in zip(found, calls):
        assert got.dtype is kind
        torch.testing.assert_close(got, call().values, rtol=0, atol=0)


def test_nan_spoils_its_row_alone(device: torch.device) -> None:
    x = torch.ones(32, 32, device=device)
    x[3, 4] = torch.nan
    out = rms_norm(from_dense(x, Layout.from_mask(torch.ones(2, 2, device=device).bool(), 16))).to_dense()
    assert torch.equal(out.isnan().any(1), torch.arange(32, device=device) == 3)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda x: layer_norm(x, torch.ones(3)), ValueError, r"layer_norm: weight must have shape \[N\] = \[32\]"),
        (lambda x: layer_norm(x, eps="a"), ValueError, "layer_norm: eps must be a finite number, got 'a'"),
        (lambda x: rms_norm(x, eps="a"), ValueError, "rms_norm: eps must be a finite number, got 'a'"),
        (lambda x: rms_norm(x.values), TypeError, "rms_norm: x must be a BlockSparseTensor"),
    ],
)
def test_errors(call, error: type[Exception], message: str) -> None:
    x = from_dense(torch.ones(32, 32), Layout.from_mask(torch.eye(2).bool(), 16))
    with pytest.raises(error, match=message):
        call(x)

"""What stands for no element takes no part: its gradient is 0, whatever it is and whatever is made of it."""

import math

import pytest
import torch
from torch import Tensor

from gossamer import blocksparse
from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense
from gossamer.blocksparse.lists import lost
from gossamer.blocksparse.rows import fill_outside
from tests.blocksparse.blocks import native

FUNCTIONS = {
    "sqrt": lambda x: x.sqrt(),
    "rsqrt": lambda x: x.rsqrt(),
    "log": lambda x: x.log(),
    "reciprocal": lambda x: x.reciprocal(),
    "pow": lambda x: x**0.5,
    "rpow": lambda x: 2**x,
    "exp": lambda x: x.exp(),
    "gelu": lambda x: x.gelu(),
    "x / y": lambda x: x / (x - 0.5),
    "1 / x": lambda x: 1 / x,
    "log of a difference": lambda x: (x - 0.5).log(),
    "apply": lambda x: x.apply(lambda values: (values - 1).abs().sqrt()),
    "transpose": lambda x: x.mT,
    "softmax": lambda x: blocksparse.softmax(x),
    "add": lambda x: x + torch.ones(x.shape[1], device=x.device),
    "mul": lambda x: x * torch.ones(x.shape[0], 1, device=x.device),
    "layer_norm": lambda x: blocksparse.layer_norm(x),
    "rms_norm": lambda x: blocksparse.rms_norm(x),
    "matmul": lambda x: blocksparse.matmul(x, x, x.layout, transpose_b=True) if x.shape[0] == x.shape[1] else x,
    "cat": lambda x: blocksparse.cat([x, x], 1),
    "repeat": lambda x: blocksparse.repeat(x, (2, 1)),
    "adapt": lambda x: blocksparse.adapt(x, blocksparse.adapt(x.layout, 32)),
    "sum": lambda x: x.sum(-2),
    "max": lambda x: x.amax(-1),
    "product with dense": lambda x: blocksparse.matmul(x, torch.ones(x.shape[1], 3, device=x.device)),
}


def leaf(size: tuple[int, int], fill: float, device: torch.device) -> tuple[BlockSparseTensor, Tensor]:
    """A tensor whose values are the leaf, with `fill` where they stand for no element, and where they do."""
    layout = Layout.from_mask(torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 1]], device=device), 16, size=size, capacity=7)
    inside = from_dense(torch.ones(size, device=device, dtype=torch.bool), layout).values
    generator = torch.Generator(device).manual_seed(0)
    values = torch.rand(7, 16, 16, device=device, generator=generator) + 0.75
    return BlockSparseTensor(torch.where(inside, values, fill).requires_grad_(), layout), inside


@pytest.mark.parametrize("fill", [0.0, native(math.nan)])
@pytest.mark.parametrize("size", [(48, 48), native((40, 44))], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_its_gradient_is_zero(name: str, size: tuple[int, int], fill: float, device: torch.device) -> None:
    x, inside = leaf(size, fill, device)
    out = FUNCTIONS[name](x)
    (grad,) = torch.autograd.grad((out if isinstance(out, Tensor) else out.to_dense()).square().sum(), x.values)
    assert grad.isfinite().all() and not grad[~inside].any() and grad[inside].any()


@pytest.mark.native
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", ["sqrt", "log", "x / y"])
def test_gradients_are_those_of_elements(name: str, device: torch.device) -> None:
    """Against the same function of dense elements; once more differentiated, and in anomaly mode."""
    x, inside = leaf((40, 44), 0.0, device)
    elements = x.values.detach()[inside].requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        found = []
        for values, of in ((x.values, x), (elements, _Elements(elements))):
            out = FUNCTIONS[name](of)
            total = (out.to_dense() if isinstance(out, BlockSparseTensor) else out.values).square().sum()
            (grad,) = torch.autograd.grad(total, values, create_graph=True)
            (second,) = torch.autograd.grad(grad.square().sum(), values)
            found.append((grad, second))
    for got, want in zip(*found):
        torch.testing.assert_close(got[inside], want)
        assert not got[~inside].any()


class _Elements:
    """Elements that know the arithmetic of `FUNCTIONS`, from PyTorch."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def sqrt(self) -> "_Elements":
        return _Elements(self.values.sqrt())

    def log(self) -> "_Elements":
        return _Elements(self.values.log())

    def __sub__(self, other: float) -> "_Elements":
        return _Elements(self.values - other)

    def __truediv__(self, other: "_Elements") -> "_Elements":
        return _Elements(self.values / other.values)


@pytest.mark.native
def test_gradients_of_what_stands_beside(device: torch.device) -> None:
    """A number that is learned, and a function's own parameters, get nothing from what stands for no element."""
    x, inside = leaf((40, 44), math.nan, device)
    x = x.detach()
    number = torch.tensor(2.0, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad((x * number).to_dense().sum(), number)
    torch.testing.assert_close(grad, x.values[inside].sum())
    (grad,) = torch.autograd.grad(x.apply(lambda values: values * number).to_dense().sum(), number)
    torch.testing.assert_close(grad, x.values[inside].sum())


@pytest.mark.native
def test_compile(compiled, device: torch.device) -> None:
    x, inside = leaf((40, 44), 0.0, device)

    def call(values: Tensor) -> Tensor:
        return (1 / BlockSparseTensor(values, x.layout).sqrt()).to_dense().sum()

    grads = [torch.autograd.grad(run(x.values), x.values)[0] for run in (compiled(call), call)]
    torch.testing.assert_close(*grads)
    assert not grads[0][~inside].any()


def test_values_outside_are_filled(device: torch.device) -> None:
    """Nothing is written where the host knows that every value stands for an element."""
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]], device=device)
    counted, roomy = Layout.from_mask(mask, 16), Layout.from_mask(mask, 16, capacity=6)
    for layout in (counted, counted.transpose(), Layout.full((2, 3), 16, device=device)):
        values = torch.ones(layout.capacity, 16, 16, device=device)
        assert layout.filled and fill_outside(values, layout, 2) is values
    cut = Layout.from_mask(mask, 16, size=(30, 40))
    for layout in (roomy, roomy.transpose(), cut, Layout.from_mask(mask, 16, size=(30, 40), capacity=6)):
        inside = from_dense(torch.ones(layout.size, device=device, dtype=torch.bool), layout).values
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool):
            least = lost(dtype)
            values = torch.ones(layout.capacity, 16, 16, device=device, dtype=dtype)
            got = fill_outside(values, layout, least)
            assert torch.equal(got.nan_to_num() if dtype.is_floating_point else got, torch.where(
                inside, values, 0 if dtype.is_floating_point else least))  # fmt: skip
    values = torch.ones(6, 16, 16, device=device)
    assert fill_outside(values, roomy, 0, behind=False) is values
    assert fill_outside(values[:3], cut, 0, behind=False).sum() == inside.sum()


def test_no_gradient_no_mask(device: torch.device) -> None:
    x, _ = leaf((40, 44), 0.0, device)
    with torch.no_grad():
        assert torch.equal(x.sqrt().values, x.values.sqrt())
    assert torch.equal((x.detach() * 2).values, x.values * 2)

"""Element-wise functions of block-sparse tensors."""

import io
import operator
from dataclasses import replace

import pytest
import torch

from gossamer.blocksparse import BlockSparseTensor, Layout, adapt, from_dense, softmax
from tests.strategies import seeded


@pytest.fixture
def pair(dtype: torch.dtype, device: torch.device) -> tuple[BlockSparseTensor, BlockSparseTensor]:
    generator = seeded(0, device)
    layout = Layout.from_mask(torch.rand(2, 3, 4, device=device, generator=generator) < 0.5, 16, size=(40, 64))
    a, b = torch.rand(2, 2, 40, 64, device=device, generator=generator).to(dtype) + 0.5
    return from_dense(a, layout), from_dense(b, layout)


def test_operators(pair) -> None:
    a, b = pair
    x, y = a.values, b.values
    one = torch.tensor(2.0, device=x.device)
    for got, want in (
        (a + b, x + y), (a - b, x - y), (a * b, x * y), (a / b, x / y), (a + 2, x + 2), (2 - a, 2 - x), (3 * a, 3 * x),
        (1 / a, 1 / x), (a**2, x**2), (2**a, 2**x), (a % 0.3, x % 0.3), (a // 0.3, x // 0.3), (2 % a, 2 % x),
        (2 // a, 2 // x), (-a, -x), (abs(-a), x), (a * one, x * one), (a - 1.5, x - 1.5), (a / 3, x / 3),
    ):  # fmt: skip
        torch.testing.assert_close(got.values, want, equal_nan=True)
        assert got.layout is a.layout


@pytest.mark.parametrize(
    "name",
    ["abs", "cos", "exp", "log", "neg", "reciprocal", "relu", "rsqrt", "sigmoid", "sin", "sqrt", "square", "tanh"],
)
def test_functions(name: str, pair) -> None:
    got = getattr(pair[0], name)()
    torch.testing.assert_close(got.values, getattr(torch, name)(pair[0].values), equal_nan=True)


def test_functions_with_arguments(pair) -> None:
    a, _ = pair
    assert torch.equal(a.clamp(max=0.7).values, a.values.clamp(max=0.7))
    assert torch.equal(a.gelu(approximate="tanh").values, torch.nn.functional.gelu(a.values, approximate="tanh"))
    assert torch.equal(a.silu().values, torch.nn.functional.silu(a.values))
    assert torch.equal(a.apply(torch.erf).to_dense(), a.to_dense().erf())
    with torch.no_grad():
        assert torch.equal(a.apply(torch.erf).values, a.values.erf())


def test_absent_blocks_stay_absent(pair) -> None:
    a, _ = pair
    assert torch.equal(a.exp().to_dense() != 0, from_dense(torch.ones_like(a.to_dense()), a.layout).to_dense() != 0)


def test_layouts_must_be_shared(pair) -> None:
    a, b = pair
    other = replace(b, layout=Layout.from_mask(a.layout.to_dense(), 16, size=(40, 64)))
    way = r"compared as objects.*union = a\.layout\.union\(b\.layout\), with adapt\(x, union\)"
    with pytest.raises(ValueError, match=rf"__add__: both operands must share one Layout, got .*{way}"):
        a + other
    # The ways out that it names.
    union = a.layout.union(other.layout)
    here, there = adapt(a, union), adapt(other, union)
    assert torch.equal((here + there).to_dense(), a.to_dense() + b.to_dense())
    assert torch.equal((a + adapt(other, a.layout)).to_dense(), a.to_dense() + b.to_dense())
    # A copy of the container shares the metadata.
    copied = replace(a.layout)
    assert torch.equal((a + replace(b, layout=copied)).values, a.values + b.values)
    with pytest.raises(TypeError, match="unsupported operand"):
        a + "x"
    with pytest.raises(TypeError, match="unsupported operand"):
        a / torch.ones(3, 3, device=a.device)
    with pytest.raises(ValueError, match=r"__add__: other must have shape .* got \[3, 3\]"):
        a + torch.ones(3, 3, device=a.device)


def test_comparisons(pair) -> None:
    a, b = pair
    one = torch.tensor(1.0, device=a.device)
    for compare in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
        for other, operand in ((b, b.values), (1.0, 1.0), (one, one), (a, a.values)):
            got = compare(a, other)
            assert got.dtype is torch.bool and got.layout is a.layout
            assert torch.equal(got.values, compare(a.values, operand))
    assert torch.equal((one < a).values, a.values > 1)
    weights = softmax(a, mask=a > 1)
    assert torch.equal(weights.to_dense() > 0, (a > 1).to_dense())
    # What is no number compares as objects do, and a tensor is a key.
    assert (a != None) and a != "x" and {a: 1, b: 2}[a] == 1  # noqa: E711
    with pytest.raises(TypeError, match=r"__eq__: the other operand must be a number.*got a tensor \[2, 40, 64\]"):
        a == a.to_dense()  # noqa: B015
    with pytest.raises(TypeError, match=r"neither true nor false.*to_dense\(\)\.any\(\)"):
        bool(a == b)
    with pytest.raises(TypeError, match="not supported between instances"):
        a < "x"  # noqa: B015
    with pytest.raises(ValueError, match=r"__ge__: both operands must share one Layout"):
        a >= replace(b, layout=Layout.from_mask(a.layout.to_dense(), 16, size=(40, 64)))  # noqa: B015


def test_gradients_and_leaves(pair) -> None:
    a, b = (replace(x, values=x.values.float()) for x in pair)
    a.requires_grad_()
    assert a.requires_grad and a.values.requires_grad and not a.detach().requires_grad
    (grad,) = torch.autograd.grad((a * b + a).exp().to_dense().sum(), a.values)
    want = replace(a, values=(a.values * b.values + a.values).exp() * (b.values + 1))
    torch.testing.assert_close(replace(a, values=grad).to_dense(), want.to_dense())


def test_to(pair, device: torch.device) -> None:
    a, _ = pair
    half = a.to(torch.float16)
    assert half.dtype is torch.float16 and half.layout is a.layout
    meta = a.to("meta")
    assert meta.device.type == meta.layout.device.type == "meta"


def test_save_and_load(pair) -> None:
    a, _ = pair
    a.layout.transpose()
    file = io.BytesIO()
    torch.save(a, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded.to_dense(), a.to_dense()) and loaded.layout.size == (40, 64)
    assert "BlockSparseTensor(shape=(2, 40, 64)" in repr(loaded)


def test_transposes_and_products(device: torch.device) -> None:
    """`.mT` and `@`, with a dense tensor on either side, leading dimensions and gradients."""
    generator = seeded(1, device)
    layout = Layout.from_mask(torch.rand(2, 2, 3, device=device, generator=generator) < 0.6, 16, size=(20, 40))
    # Small integers, whose sums are exact.
    x, left, right = (
        torch.randint(-3, 4, (2, *size), device=device, generator=generator).float()
        for size in ((20, 40), (5, 20), (40, 3))
    )
    x = from_dense(x, layout).to_dense().requires_grad_()
    blocks = from_dense(x, layout)
    for got, want in (
        (blocks.mT.to_dense(), x.mT), (blocks @ right, x @ right), (left @ blocks, left @ x),
        (blocks @ blocks.mT, x @ x.mT),
    ):  # fmt: skip
        assert torch.equal(got, want)
        grads = [torch.autograd.grad(t.square().sum(), x, retain_graph=True)[0] for t in (got, want)]
        assert torch.equal(grads[0], from_dense(grads[1], layout).to_dense())
    with pytest.raises(TypeError, match="unsupported operand"):
        blocks @ 2.0


def test_pytorchs_functions_of_one_element(device: torch.device) -> None:
    x = from_dense(torch.rand(32, 32, device=device) + 1, Layout.from_mask(torch.eye(2, device=device).bool(), 16))
    for function in (torch.exp, torch.sqrt, torch.neg, torch.nn.functional.relu, torch.nn.functional.gelu):
        assert torch.equal(function(x).values, function(x.values))
    assert torch.equal(torch.clamp(x, min=1.5).values, x.values.clamp(min=1.5))
    assert torch.equal((torch.tensor(2.0, device=device) - x).values, 2 - x.values)


def test_the_way_out_is_named() -> None:
    x = from_dense(torch.ones(32, 32), Layout.from_mask(torch.eye(2).bool(), 16))
    with pytest.raises(TypeError, match=r"BlockSparseTensor has no elements to be indexed. Use blocksparse.split"):
        x[0]
    with pytest.raises(AttributeError, match=r"no attribute 'cumsum'. Use x.to_dense\(\).cumsum"):
        x.cumsum  # noqa: B018
    with pytest.raises(TypeError, match=r"torch.cumsum: no argument may be a BlockSparseTensor. .* x.to_dense\(\)"):
        torch.cumsum(x, 0)
    assert not hasattr(x, "no_such_thing")


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "pow", "remainder", "floor_divide"])
def test_pytorchs_functions_of_two_elements(name: str, device: torch.device) -> None:
    """Against the same of the values, with numbers, tensors of one element and block-sparse operands on either side."""
    function = getattr(torch, name)
    x = from_dense(torch.rand(32, 32, device=device) + 1, Layout.from_mask(torch.eye(2, device=device).bool(), 16))
    y, number = x * 2, torch.tensor(1.5, device=device)
    for got, want in (
        (function(x, 2), function(x.values, 2)), (function(x, y), function(x.values, y.values)),
        (function(x, number), function(x.values, number)), (function(number, x), function(number, x.values)),
    ):  # fmt: skip
        assert got.layout is x.layout and torch.equal(got.values, want)
    if name == "add":
        with pytest.raises(TypeError, match=r"torch\.add: no argument may be a BlockSparseTensor"):
            torch.add(x, 1, alpha=2)
        with pytest.raises(TypeError, match=r"torch\.sum: no argument may be a BlockSparseTensor.*x\.sum\(dim\)"):
            torch.sum(x, dim=-1, keepdim=True)
        assert torch.equal(torch.sum(x, dim=-1), x.sum(-1))
    assert torch.equal(torch.matmul(x, y.to_dense()), x @ y.to_dense())


def test_dtypes_and_copies(device: torch.device) -> None:
    values = torch.randn(2, 16, 16, device=device, requires_grad=True)
    x = BlockSparseTensor(values, Layout.from_mask(torch.eye(2, device=device).bool(), 16))
    for name in ("float", "double", "half", "bfloat16", "int", "long", "bool", "clone", "cpu"):
        got, want = getattr(x, name)(), getattr(values, name)()
        assert got.dtype is want.dtype and torch.equal(got.values, want) and got.device == want.device
        assert got.layout is x.layout if name != "cpu" else got.layout.device.type == "cpu"
    copied = torch.clone(x)
    assert copied.values.data_ptr() != values.data_ptr()
    # float64 runs on the CPU only.
    (grad,) = torch.autograd.grad((copied.half().float() * 2).sum(), values)
    assert torch.equal(grad, torch.full_like(values, 2))

"""gemm.linear_pack, against the same in dense float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer import gemm, rowsparse
from gossamer.rowsparse.linear_source import LinearSource
from gossamer.testing import assert_close, assert_exact, dense64, random_rows
from tests import strategies
from tests.paths import matrix

FORMATS: list[dict[str, Any]] = [
    {},
    {"capacity": 5},
    {"capacity": 1000},
]
EACH = pytest.mark.parametrize("options", FORMATS, ids=str)


def activated(x: Tensor, weight: Tensor, bias: Tensor | None = None, threshold: Tensor | None = None) -> Tensor:
    """What a model computes without gossamer."""
    z = torch.nn.functional.linear(x, weight, None if bias is None else bias.to(weight.dtype))
    return torch.where(z <= (0 if threshold is None else threshold.clamp(min=0)), 0, z)


def value(threshold: Tensor | None) -> str | gemm.JumpReLU:
    return "relu" if threshold is None else gemm.JumpReLU(threshold)


def doubled(*operands: Tensor | None) -> list[Tensor | None]:
    return [None if operand is None else operand.double() for operand in operands]


@given(data=st.data())
def test_any_shape(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    """Small integers, which no dtype rounds: results are compared for equality."""
    leading, n, k = data.draw(strategies.LEADING), data.draw(strategies.COLUMNS), data.draw(st.integers(0, 40))
    generator = strategies.seeded(data.draw(strategies.SEEDS), device)
    draw = lambda *size: torch.randint(-2, 3, size, device=device, generator=generator)  # noqa: E731
    x, weight = draw(*leading, k).to(dtype), draw(n, k).to(dtype)
    bias = draw(n).to(data.draw(st.sampled_from([dtype, torch.float32]))) if data.draw(st.booleans()) else None
    threshold = None
    if data.draw(st.booleans()):
        threshold = 2 * (draw(n) if data.draw(st.booleans()) else draw(1).squeeze()).to(torch.float32)
    operands = [x, weight, bias, threshold]
    operands = [None if t is None else strategies.laid_out(t, data.draw(strategies.LAYOUTS)) for t in operands]
    x, weight, bias, threshold = operands
    options = data.draw(st.sampled_from(FORMATS))
    rows = gemm.linear_pack(x, weight, bias, value(threshold), **options)
    wanted = activated(*doubled(*operands))
    assert rows.dtype is dtype and rows.shape == (*leading, n)
    assert torch.equal(rows.counts, (wanted != 0).sum(-1).flatten())
    assert_exact(dense64(rows), wanted)
    assert_exact(rows.to_dense(), wanted)
    assert rows.validate() is rows


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    "m, n, k, library",
    [
        # Few rows: microseconds of the fused kernel on an H200, and of a dense layer, 16 and 6, 13 and 7.
        (15, 2616, 368, True),
        (2, 685, 240, True),
        # 20 and 44; 29 and 48; 46 and 53, with rows that begin off 16 bytes.
        (140, 6877, 720, False),
        (302, 22599, 120, False),
        (196, 979, 3520, False),
        # 603 and 389, 346 and 144, 149 and 114: tiles that are half empty, or a last turn that is.
        (144, 50368, 12208, True),
        (143, 20048, 12136, True),
        (1000, 4544, 6792, True),
        # An autoencoder, and a block's layer.
        (4096, 65536, 2304, False),
        (16384, 5632, 2048, False),
    ],
)
def test_the_library_multiplies_where_it_is_faster(
    m: int, n: int, k: int, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gossamer._core import tuning
    from gossamer.gemm import linear_pack_path

    monkeypatch.setattr(linear_pack_path, "INTERPRET", False)
    monkeypatch.setattr(tuning, "hopper", lambda _: True)
    assert linear_pack_path.library_is_faster(matrix(m, k), matrix(n, k)) == library


def test_programs_that_share_a_row_add_up_its_entries(device: torch.device, generator: torch.Generator) -> None:
    """Few long rows, and rows of several blocks."""
    x, weight = (torch.randn(size, device=device, generator=generator) for size in ((3, 4), (2100, 4)))
    assert torch.equal(gemm.linear_pack(x, weight).counts, (x @ weight.t() > 0).sum(1))


@pytest.mark.parametrize("m", [1, 3, 16])
@pytest.mark.parametrize("capacity", [8, None], ids=["overflowed", "all fit"])
def test_few_rows_in_float32(m: int, capacity: int | None, device: torch.device, scale: int) -> None:
    """A long sum in one chain would be ten times less exact than the library's, which has few rows in several."""
    generator = strategies.seeded(0, device)
    k, n = 256 * scale, 256 * scale
    x, weight = (torch.randn(*size, device=device, generator=generator) for size in ((m, k), (n, k)))
    rows = gemm.linear_pack(x, weight, capacity=capacity or n)
    wanted = activated(x.double(), weight.double())
    magnitude = (x.double().square() @ weight.double().square().t()).sqrt()
    plain = activated(x, weight)
    assert_close(rows.to_dense(), reference64=wanted, plain=plain, length=k, magnitude=magnitude)


@EACH
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bound", [False, True])
def test_products(
    options: dict[str, Any],
    transposed: bool,
    bound: bool,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    scale: int,
) -> None:
    """Of numbers as activations are, with rows that overflow."""
    m, k, n, d = 3 * scale, 17 * scale, 41 * scale, 20
    draw = lambda *size: torch.randn(*size, device=device, generator=generator)  # noqa: E731
    x, weight = draw(m, k).to(dtype), (draw(k, n).t() if transposed else draw(n, k)).to(dtype) / k**0.5
    bias, threshold = draw(n) / 2 if bound else None, None
    right = draw(n, d).to(dtype)
    if bound:
        # Where no pre-activation is near, for what lies at the threshold may be kept or not.
        z, tried = torch.nn.functional.linear(*doubled(x, weight, bias)), torch.linspace(-0.5, 2, 64, device=device)
        near = (z[..., None] - tried).abs().amin(0)
        assert near.amax(1).min() > 0.02
        threshold = tried[near.argmax(1)]
    with torch.no_grad():
        rows = gemm.linear_pack(x, weight, bias, value(threshold), **options)
        usual, wanted = activated(x, weight, bias, threshold), activated(*doubled(x, weight, bias, threshold))
        # A GPU's library sums in several chains; a row that is computed again, in float32 in one.
        factor = 4.0 if device.type == "cuda" else 2.0
        assert_close(rows.to_dense(), reference64=wanted, plain=usual, factor=factor)
        product = rowsparse.matmul(rows, right)
        assert_close(product, reference64=wanted @ right.double(), plain=usual @ right, factor=max(factor, 3.0))
    # There a product in bfloat16 may be summed in parts that are rounded, further than a threshold is from an entry.
    exact = bound and (device.type == "cpu" or dtype is not torch.bfloat16)
    assert ((rows.counts - (wanted != 0).sum(1)).abs() <= (0 if exact else n // 50 + 1)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_tiles(transposed: bool, odd: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """More than programs, so that buffers and barriers come round; the last ones are not full. Integers again. Odd
    operands are copied."""
    m, k, n = 1000, 200 + odd, 5000 + odd
    draw = lambda *size: torch.randint(-2, 3, size, device="cuda", generator=generator).to(dtype)  # noqa: E731
    x, weight = draw(m, k), draw(k, n).t() if transposed else draw(n, k)
    bias, threshold = draw(n), torch.randint(0, 60, (n,), device="cuda", generator=generator).float()
    wanted = activated(*doubled(x, weight, bias, threshold))
    rows = gemm.linear_pack(x, weight, bias, activation=gemm.JumpReLU(threshold))
    assert torch.equal(rows.counts, (wanted != 0).sum(1))
    assert rows.overflowed.any()
    assert_exact(rows.to_dense(), wanted)


@EACH
def test_special_values(options: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    x, weight = torch.eye(4, 8, dtype=dtype, device=device), torch.zeros(40, 8, dtype=dtype, device=device)
    weight[:, 0] = torch.arange(40) % 7 - 3
    weight[5, 1] = float("nan")
    weight[7, 2], weight[8, 2] = float("inf"), -float("inf")
    threshold = torch.zeros(40, device=device)
    threshold[3], threshold[4] = -2.0, float("nan")
    for limit in (None, threshold):
        rows = gemm.linear_pack(x, weight, activation=value(limit), **options)
        assert_exact(rows.to_dense(), activated(*doubled(x, weight, None, limit)))


@EACH
@pytest.mark.parametrize("needed", ["all", "x", "weight", "bias"])
def test_gradients(
    options: dict[str, Any], needed: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Integers again: in rows that overflowed and in others."""
    draw = lambda *size: torch.randint(-2, 3, size, device=device, generator=generator).to(dtype)  # noqa: E731
    leaves = {"x": draw(2, 3, 12), "weight": draw(60, 12), "bias": draw(60)}
    leaves["x"][0, 0] = 0
    leaves["bias"] -= 4
    right, grad = draw(60, 8), draw(2, 3, 8)
    threshold = torch.randint(-1, 4, (60,), device=device, generator=generator).float()

    def gradients(function: Callable[..., Tensor], wide: bool) -> dict[str, Tensor | None]:
        given = {name: leaf.double() if wide else leaf.clone() for name, leaf in leaves.items()}
        for name, leaf in given.items():
            leaf.requires_grad_(needed in (name, "all"))
        matrix = (right.double() if wide else right.clone()).requires_grad_()
        function(*given.values(), matrix).backward(grad.to(matrix.dtype))
        return {**{name: leaf.grad for name, leaf in given.items()}, "right": matrix.grad}

    def ours(x: Tensor, weight: Tensor, bias: Tensor, right: Tensor) -> Tensor:
        rows = gemm.linear_pack(x, weight, bias, activation=gemm.JumpReLU(threshold), **options)
        return rowsparse.matmul(rows, right)

    found = gradients(ours, False)
    wanted = gradients(lambda x, weight, bias, right: activated(x, weight, bias, threshold) @ right, True)
    for name, grad_ in wanted.items():
        if grad_ is None:
            assert found[name] is None
        else:
            assert_exact(found[name], grad_, name=name)


@pytest.mark.native
def test_gradcheck() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(size, dtype=torch.float64).requires_grad_() for size in ((3, 5), (12, 5), (12,), (12, 4))]

    def product(x: Tensor, weight: Tensor, bias: Tensor, right: Tensor, **options: Any) -> Tensor:
        return rowsparse.matmul(gemm.linear_pack(x, weight, bias, **options), right)

    for options in ({"capacity": 40}, {"capacity": 5}):
        torch.autograd.gradcheck(lambda *given, o=options: product(*given, **o), leaves)
        torch.autograd.gradgradcheck(lambda *given, o=options: product(*given, **o), leaves)


@pytest.mark.native
def test_rows_come_in_blocks(device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr("gossamer.gemm._torch.linear_pack._BLOCK", 1 << 10)
    m, k, n = (150, 9, 60) if device.type == "cpu" else (2500, 9, 6000)
    x, weight = (
        random_rows(size, l0=4, device=device, generator=generator, integers=True) for size in ((m, k), (n, k))
    )
    rows = gemm.linear_pack(x, weight)
    wanted = activated(x, weight)
    assert torch.equal(rows.to_dense(), wanted) and torch.equal(rows.counts, (wanted != 0).sum(1))
    alone = gemm.linear_pack(x[-30:], weight)
    assert torch.equal(alone.counts, rows.counts[-30:])


@pytest.mark.kernels
@pytest.mark.parametrize("capacity", [3, 60])
def test_blocks_of_rows_fill_one_container(
    capacity: int, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same container, whether the library multiplies all rows at once or block by block."""
    from gossamer.gemm._triton import linear_pack as kernels

    x, weight = (random_rows(s, l0=5, device=device, generator=generator, integers=True) for s in ((8, 9), (60, 9)))
    whole = gemm.linear_pack(x, weight, capacity=capacity)
    monkeypatch.setattr(kernels, "rows_of_block", lambda *_: 3)
    parts = gemm.linear_pack(x, weight, capacity=capacity)
    for one, other in zip(whole.packed[:3], parts.packed[:3]):
        assert torch.equal(one, other)
    assert bool(whole.overflowed) == (capacity == 3)
    assert torch.equal(parts.to_dense(), activated(x, weight))


def test_autocast(device: torch.device, generator: torch.Generator) -> None:
    x, weight, bias = (torch.randn(size, device=device, generator=generator) for size in ((3, 8), (40, 8), (40,)))
    with torch.autocast(device.type, torch.float16):
        rows = gemm.linear_pack(x, weight, bias)
    assert rows.dtype is torch.float16 and rows.source.dtype is torch.float16
    with torch.no_grad():
        plain = activated(x.half(), weight.half(), bias)
    assert_close(
        rows.to_dense(), reference64=activated(*doubled(x.half(), weight.half(), bias)), plain=plain, factor=3.0
    )


def test_the_dense_matrix_is_not_kept(device: torch.device) -> None:
    x, weight = torch.randn(3, 8, device=device), torch.randn(40, 8, device=device)
    rows = gemm.linear_pack(x, weight)
    assert isinstance(rows.source, LinearSource) and rows.source.x is x and rows.source.weight is weight
    assert gemm.linear_pack(x, weight[:16]).source is None
    assert gemm.linear_pack(x, weight[:16], capacity=15).source is not None
    # A tile of a Hopper GPU has 16 slots.
    assert gemm.linear_pack(x, weight[:17], capacity=17).source is not None


@pytest.mark.native
def test_compile(device: torch.device, compiled: Callable[..., Any]) -> None:
    leaves = [torch.randn(size, device=device).requires_grad_() for size in ((2, 3, 8), (40, 8), (40,), (40, 5))]

    def product(x: Tensor, weight: Tensor, bias: Tensor, right: Tensor) -> tuple[Tensor, Any]:
        rows = gemm.linear_pack(x, weight, bias, capacity=8)
        return rowsparse.matmul(rows, right), gemm.linear_pack(x, weight, bias, capacity=20)

    out, rows = product(*leaves)
    fast, fast_rows = compiled(product)(*leaves)
    torch.testing.assert_close(fast, out)
    torch.testing.assert_close(fast_rows.to_dense(), rows.to_dense())
    assert torch.equal(fast_rows.counts, rows.counts) and isinstance(fast_rows.source, LinearSource)
    grads = (torch.autograd.grad(value.square().sum(), leaves) for value in (out, fast))
    for ours, theirs in zip(*grads):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"x": [1.0]}, TypeError, "gemm.linear_pack: x must be a torch.Tensor, got list"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x must have shape \[..., K\], got a scalar"),
        (
            {"weight": torch.ones(40, 7)},
            ValueError,
            r"weight must have shape \[N, K\] with K = 8 like x, got \[40, 7\]",
        ),
        ({"weight": torch.ones(40, 8).half()}, TypeError, "x and weight must have one dtype, got float32 and float16"),
        ({"weight": torch.ones(40, 8, device="meta")}, ValueError, "weight must be on cpu like x, got meta"),
        ({"bias": torch.ones(39)}, ValueError, r"bias must have shape \[N\] = \[40\] like weight, got \[39\]"),
        ({"activation": "jumprelu"}, ValueError, 'activation must be "relu", "relu2" or .*, got \'jumprelu\''),
        ({"activation": gemm.JumpReLU(torch.ones(3))}, ValueError, r"threshold must have shape \[N\] or \[\]"),
        ({"activation": gemm.JumpReLU(torch.ones(40), 0.5)}, ValueError, "JumpReLU without a bandwidth, .* got 0.5"),
        ({"activation": gemm.TopK(3)}, ValueError, r"activation must be .*, got TopK\(k=3, scale=None\)"),
        ({"activation": ["relu"]}, TypeError, r"activation must be .*, got \['relu'\]"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1, got 0"),
        ({"capacity": 2.0}, TypeError, "capacity must be an int, got float"),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"x": torch.ones(2, 8), "weight": torch.ones(40, 8), **change}
    with pytest.raises(error, match=message):
        gemm.linear_pack(given.pop("x"), given.pop("weight"), **given)


@EACH
def test_without_gradients(options: dict[str, Any], device: torch.device, generator: torch.Generator) -> None:
    """What was packed without gradients has none later either, in no row; a threshold never has one."""
    draw = lambda *size: torch.randn(*size, device=device, generator=generator).requires_grad_()  # noqa: E731
    x, weight, bias, threshold, right = draw(4, 12), draw(60, 12), draw(60), draw(60), draw(60, 8)
    jump = {"activation": gemm.JumpReLU(threshold)}
    with torch.no_grad():
        rows = gemm.linear_pack(x, weight, bias, **jump, **options)
    assert not rows.requires_grad
    assert not rowsparse.matmul(rows, right.detach()).requires_grad
    rowsparse.matmul(rows, right).sum().backward()
    assert right.grad is not None and x.grad is weight.grad is bias.grad is threshold.grad is None
    rows = gemm.linear_pack(x.detach(), weight.detach(), **jump, **options)
    assert not rows.requires_grad
    torch.testing.assert_close(
        rowsparse.matmul(rows, right.detach()), rows.to_dense() @ right.detach(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("options", [{"capacity": 4}, {"capacity": 64}])
def test_squares(options: dict[str, Any], dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """Of what fits its slots, and of rows that overflow."""
    x, weight = (torch.randn(s, 20, device=device, generator=generator).to(dtype) for s in (9, 64))
    x = x - 0.2
    down = torch.randn(64, 7, device=device, generator=generator).to(dtype)
    z = x @ weight.t()
    plain = torch.relu(z).square()
    wide = torch.relu(x.double() @ weight.double().t()).square()
    rows = gemm.linear_pack(x, weight, activation="relu2", **options)
    assert (rows.counts - (z > 0).sum(1)).abs().max() <= 1
    assert_close(rows.to_dense(), reference64=wide, plain=plain)
    assert_close(rowsparse.matmul(rows, down), reference64=wide @ down.double(), plain=plain @ down)


@pytest.mark.native
def test_gradient_of_squares() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, 5, generator=generator, dtype=torch.float64).requires_grad_() for s in (4, 24))
    down = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    for capacity in (1, 24):

        def product(x: Tensor, weight: Tensor, capacity: int = capacity) -> Tensor:
            return rowsparse.matmul(gemm.linear_pack(x, weight, activation="relu2", capacity=capacity), down)

        assert torch.autograd.gradcheck(product, (x, weight))

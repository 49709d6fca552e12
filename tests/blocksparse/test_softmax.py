"""`blocksparse.softmax` against dense float64."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense, sliding_window, softmax
from gossamer.testing import assert_close
from tests.strategies import SEEDS, seeded

SHAPES = [
    # leading dimensions, size, block
    ((), (32, 48), (16, 16)),
    ((2,), (40, 70), (16, 32)),
    ((2, 1), (33, 20), (64, 16)),
    ((0,), (32, 32), (16, 16)),
]


def elements(layout: Layout) -> Tensor:
    wide = layout.to_dense().repeat_interleave(layout.block_size[0], -2).repeat_interleave(layout.block_size[1], -1)
    return wide[..., : layout.size[0], : layout.size[1]]


def dense(x: Tensor, part: Tensor, scale: float) -> Tensor:
    # Plain PyTorch takes the softmax of 16-bit numbers in float32.
    wide = (x.to(torch.promote_types(x.dtype, torch.float32)) * scale).masked_fill(~part, -math.inf)
    return torch.where(part, wide.softmax(-1), 0).to(x.dtype)


def problem(lead, size, block, density: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Layout]:
    generator = seeded(0, device)
    mask = torch.rand(*lead, -(-size[0] // block[0]), -(-size[1] // block[1]), device=device, generator=generator)
    mask = mask < density
    mask[..., :1, :] = density == 1
    layout = Layout.from_mask(mask, block, size=size, capacity=mask.numel() + 2)
    return 3 * torch.randn(*lead, *size, device=device, generator=generator).to(dtype), layout


def check(
    x: Tensor, layout: Layout, mask: Tensor | None = None, scale: float = 1.0, given: Tensor | None = None
) -> None:
    """`given` is the mask in another form."""
    part = elements(layout) if mask is None else elements(layout) & mask
    towards = torch.randn(x.shape, device=x.device, generator=seeded(5, x.device)).to(x.dtype)
    blocks = from_dense(x, layout)
    # What stands for no element takes no part.
    whole = from_dense(torch.ones_like(x), layout).values
    values = torch.where(whole == 0, math.nan, blocks.values).requires_grad_()
    out = softmax(replace(blocks, values=values), mask=mask if given is None else given, scale=scale)
    assert torch.count_nonzero(out.values) == torch.count_nonzero(out.to_dense())
    (grad,) = torch.autograd.grad(out.to_dense(), values, towards)
    results = []
    for dtype in (torch.float64, x.dtype):
        leaf = x.to(dtype).requires_grad_()
        want = dense(leaf, part, scale)
        (back,) = torch.autograd.grad(want, leaf, towards.to(dtype))
        results.append((want, from_dense(back, layout).values))
    assert_close(out.to_dense(), reference64=results[0][0], plain=results[1][0], factor=3.0, name="out")
    # A difference of sums, in which plain PyTorch's may all be nearly exact by luck.
    assert_close(grad, reference64=results[0][1], plain=results[1][1], factor=8.0, name="gradient")


@pytest.mark.parametrize("lead, size, block", SHAPES, ids=str)
def test_error_budget(lead, size, block, dtype: torch.dtype, device: torch.device) -> None:
    check(*problem(lead, size, block, 0.6, dtype, device), scale=0.7)


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_empty_and_full_layouts(density: float, device: torch.device) -> None:
    check(*problem((2,), (20, 40), (16, 16), density, torch.float32, device))


@pytest.mark.full
@pytest.mark.parametrize("density", [0.02, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("block", [(16, 16), (32, 64), (64, 64), (128, 32), (128, 128)], ids=str)
@pytest.mark.parametrize("size", [(256, 256), (100, 700), (1, 1000), (513, 130)], ids=str)
def test_wide_grid(size, block, density: float, dtype: torch.dtype, device: torch.device) -> None:
    check(*problem((3,), size, block, density, dtype, device), scale=-0.2)


@pytest.mark.parametrize("shape", [(40, 70), (2, 40, 1), (1, 1, 70)], ids=str)
def test_masks(shape: tuple[int, ...], device: torch.device) -> None:
    x, layout = problem((2,), (40, 70), (16, 32), 0.6, torch.float32, device)
    mask = torch.rand(shape, device=device, generator=seeded(1, device)) < 0.6
    check(x, layout, mask, given=mask.mT.contiguous().mT)


def test_a_mask_of_blocks(device: torch.device) -> None:
    x, layout = problem((2,), (40, 70), (16, 32), 0.6, torch.float32, device)
    mask = torch.rand(2, 40, 70, device=device, generator=seeded(1, device)) < 0.6
    check(x, layout, mask, given=from_dense(mask.float(), layout) != 0)


@pytest.mark.kernels
@pytest.mark.parametrize("mask", [None, True])
def test_long_rows_are_walked_twice(mask, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    from gossamer.blocksparse._triton import softmax as kernels

    monkeypatch.setattr(kernels, "LONGEST", 16)
    monkeypatch.setattr(kernels, "STEP", 32)
    monkeypatch.setattr(kernels.tuning, "programs", lambda _: 0)
    x, layout = problem((2,), (33, 100), (16, 32), 0.6, torch.float32, device)
    # The first step holds nothing but -inf.
    x[:, :, :32] = -math.inf
    blocks = from_dense(x, layout)
    want = dense(x, elements(layout), 1.0)
    torch.testing.assert_close(softmax(blocks).to_dense(), want, equal_nan=True)
    x = x.nan_to_num(neginf=1.0)
    check(x, layout, None if mask is None else torch.rand(33, 100, device=device) < 0.5)


@pytest.mark.parametrize("held", [0, 3, 7, 16])
def test_steps_are_as_long_as_rows(held: int, device: torch.device, generator: torch.Generator) -> None:
    mask = torch.zeros(1, 16, dtype=torch.bool, device=device)
    mask[0, torch.randperm(16, generator=torch.Generator().manual_seed(0))[:held]] = 1
    layout = Layout.from_mask(mask, (16, 64), size=(3, 1010), capacity=17)
    check(torch.randn(3, 1010, device=device, generator=generator), layout)


def test_rows_longer_than_most(device: torch.device, generator: torch.Generator) -> None:
    """Steps are some two average rows long, which the longest ones exceed."""
    mask = torch.eye(40, device=device).bool()
    mask[3], mask[7, :30], mask[9] = True, True, False
    check(torch.randn(640, 640, device=device, generator=generator), Layout.from_mask(mask, 16))


@pytest.mark.kernels
def test_steps_follow_the_average(device: torch.device) -> None:
    from gossamer.blocksparse._triton.softmax import LONGEST, SHORT, STEP, tile_of

    meta, warps = tile_of(64, 64, 8192, 8192, 512, 132, 2)
    assert (meta["TILE"], meta["LINES"], meta["ONCE"], warps) == ((2, 8192), 8, True, 8)
    meta, warps = tile_of(64, 64, 8192, 8192, 512, 132, 4)
    assert (meta["TILE"][0], meta["LINES"], warps) == (1, 8, 8)
    meta, warps = tile_of(64, 64, 8192, 2048, 8, 132, 2)
    assert (meta["TILE"], meta["LINES"], meta["ONCE"], warps) == ((1, 4096), 1, False, 4)
    assert tile_of(16, 16, 8192, 0, 4, 1, 2)[0]["TILE"][1] == SHORT
    assert tile_of(16, 16, 64, 0, 4, 1, 2)[0]["TILE"][1] == 64
    assert tile_of(64, 64, 4 * LONGEST, LONGEST, 4, 1, 2)[0]["TILE"][1] == STEP


@pytest.mark.gpu
def test_a_row_of_a_million(device: torch.device) -> None:
    layout = Layout.full((1, 1 << 14), (16, 64), device=device)
    check(torch.randn(layout.dense_shape, device=device), layout)


@pytest.mark.gpu
@pytest.mark.full
def test_more_than_2_to_the_31_elements() -> None:
    n = 48 * 1024
    layout = Layout.full((n // 128, n // 128), 128, device="cuda")
    values = torch.zeros(layout.capacity, 128, 128, device="cuda", dtype=torch.bfloat16)
    values[-1, -1, -1] = 20.0
    assert BlockSparseTensor(values, layout).to_dense()[-1, -1] == 20
    out = softmax(BlockSparseTensor(values, layout))
    assert out.values[-1, -1, -1] > 0.99 and out.values[0].float().mean().item() * n == pytest.approx(1, rel=1e-2)
    assert out.mT.values[-1, -1, -1] == out.values[-1, -1, -1]


def test_what_is_not_finite_stays(device: torch.device) -> None:
    layout = Layout.from_mask(torch.eye(2, device=device).bool(), 16)
    x = torch.zeros(32, 32, device=device)
    x[0, 3], x[1, 3], x[2, :16], x[20, 20], x[3, 20] = math.nan, math.inf, -math.inf, -math.inf, math.nan
    want = dense(x, elements(layout), 1.0)
    assert want[0, :16].isnan().all() and want[2, :16].isnan().all() and not want[3].isnan().any()
    torch.testing.assert_close(softmax(from_dense(x, layout)).to_dense(), want, equal_nan=True)


@given(
    st.integers(0, 3), st.integers(0, 70), st.integers(0, 200), st.tuples(*[st.sampled_from([16, 32, 64])] * 2),
    st.sampled_from([0.0, 0.2, 0.8, 1.0]), st.booleans(), SEEDS,
)  # fmt: skip
@pytest.mark.native
def test_any_sizes(device, batch: int, m: int, n: int, block, density: float, masked: bool, seed: int) -> None:
    generator = seeded(seed, device)
    shape = (batch, -(-m // block[0]), -(-n // block[1]))
    present = torch.rand(shape, device=device, generator=generator) < density
    layout = Layout.from_mask(present, block, size=(m, n))
    x = torch.randn(batch, m, n, device=device, generator=generator)
    mask = torch.rand(m, n, device=device, generator=generator) < 0.7 if masked else None
    part = elements(layout) if mask is None else elements(layout) & mask
    out = softmax(from_dense(x, layout), mask=mask, scale=1.5)
    torch.testing.assert_close(out.to_dense(), dense(x, part, 1.5))
    assert torch.equal(out.mT.to_dense(), out.to_dense().mT)


def test_the_same_bits(dtype: torch.dtype, device: torch.device) -> None:
    x, layout = problem((2,), (40, 70), (16, 32), 0.6, dtype, device)
    first, second = (softmax(from_dense(x, layout)).values for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"mask": torch.ones(32, 32)}, TypeError, "mask must be bool, True takes part, got float32"),
        ({"mask": torch.ones(3, 32, dtype=torch.bool)}, ValueError, r"mask must broadcast to .* = \[32, 32\]"),
        ({"scale": math.inf}, ValueError, "scale must be a finite number, got inf"),
        ({"x": torch.ones(3)}, TypeError, "x must be a BlockSparseTensor, got Tensor"),
    ],
)
def test_errors(options, error: type[Exception], message: str) -> None:
    x = from_dense(torch.ones(32, 32), Layout.from_mask(torch.eye(2).bool(), 16))
    with pytest.raises(error, match=f"blocksparse.softmax: {message}"):
        softmax(**{"x": x, **options})


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block", [(16, 16), (32, 64)], ids=str)
def test_elements_that_a_pattern_leaves_out(block, masked: bool, dtype: torch.dtype, device: torch.device) -> None:
    size = 90, 130
    layout = sliding_window(size, block, (40, 5), device=device)
    x = torch.randn(size, device=device, generator=seeded(0, device)).to(dtype).requires_grad_()
    mask = torch.rand(size, device=device, generator=seeded(1, device)) < 0.7 if masked else None
    seen = layout.element_mask() if mask is None else layout.element_mask() & mask
    got = softmax(from_dense(x, layout), mask=mask).to_dense()
    towards = torch.randn(size, device=device, generator=seeded(2, device)).to(dtype)
    results = []
    for leaf in (x.detach().double().requires_grad_(), x):
        wide = leaf.to(torch.promote_types(leaf.dtype, torch.float32)).masked_fill(~seen, -torch.inf)
        want = torch.where(seen, wide.softmax(-1), 0).to(leaf.dtype)
        results.append((want, torch.autograd.grad(want, leaf, towards.to(leaf.dtype))[0]))
    assert not got[~seen].any()
    grads = torch.autograd.grad(got, x, towards)
    for name, ours, exact, plain in zip(("softmax", "gradient"), (got, *grads), *results, strict=True):
        assert_close(ours, reference64=exact, plain=plain, factor=3.0, name=name)

"""`blocksparse.matmul` against dense float64, for every mix of dense and block-sparse."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer import blocksparse
from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense, matmul
from gossamer.blocksparse._torch import matmul as _torch_matmul
from tests.blocksparse.products import MIXES, TURNED, Operand, dense_of, draw, layout_of, run
from tests.graphs import follows
from tests.strategies import SEEDS, laid_out, seeded


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "".join("DS"[sparse] for sparse in mix))
@pytest.mark.parametrize("turned", [(False, False), (True, True)], ids=str)
def test_error_budget(mix, turned, dtype: torch.dtype, device: torch.device) -> None:
    run(mix, turned, (20, 33, 17), (16, 16, 16), dtype, device, lead=(1,))


@pytest.mark.full
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "".join("DS"[sparse] for sparse in mix))
@pytest.mark.parametrize("turned", TURNED, ids=str)
@pytest.mark.parametrize("sizes, block", [
    ((40, 100, 70), (32, 16, 64)), ((130, 70, 200), (64, 64, 64)), ((16, 300, 16), (16, 128, 16)),
    ((140, 90, 33), (128, 32, 16)), ((64, 64, 64), (16, 16, 16)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 1.0])
def test_wide_grid(mix, turned, sizes, block, density: float, dtype: torch.dtype, device: torch.device) -> None:
    run(mix, turned, sizes, block, dtype, device, lead=(2, 2), density=density)


@pytest.mark.native
@pytest.mark.parametrize("block, density", [(16, 0.8), (32, 0.9)])
def test_most_small_blocks_are_taken_from_the_whole(
    block: int, density: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU no pair of their blocks is multiplied, which took up to five times as long."""
    pairs = _torch_matmul._pairs

    def of_gradients(left: Tensor, right: Tensor, out: Tensor | None, *sizes: int) -> tuple[Tensor, Tensor, Tensor]:
        assert out is None
        return pairs(left, right, out, *sizes)

    monkeypatch.setattr(_torch_matmul, "_pairs", of_gradients)
    sizes = (9 * block, 33, 8 * block + 7)
    run((False, False, True), (True, False), sizes, (block,) * 3, dtype, torch.device("cpu"), density=density)


@pytest.mark.gpu
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "".join("DS"[sparse] for sparse in mix))
@pytest.mark.parametrize("turned", TURNED, ids=str)
@pytest.mark.parametrize("sizes, block", [((320, 192, 576), (64, 64, 64)), ((256, 384, 128), (128, 128, 128)),
                                          ((192, 128, 384), (64, 128, 64))], ids=str)  # fmt: skip
@pytest.mark.parametrize("density", [0.0, 0.6, 1.0])
def test_whole_boxes(mix, turned, sizes, block, density: float, device: torch.device) -> None:
    """What Hopper's copy engine can move, in 16 bits: few present blocks, and all of them."""
    run(mix, turned, sizes, block, torch.bfloat16, device, density=density)


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "".join("DS"[sparse] for sparse in mix))
@pytest.mark.parametrize("turned", [(False, True), (True, False)], ids=str)
@pytest.mark.kernels
def test_through_dense(mix, turned, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.blocksparse.matmul_path.dense_is_faster", lambda *_: True)
    run(mix, turned, (40, 33, 50), (16, 32, 16), dtype, device, lead=(1,), density=0.7)


@pytest.mark.kernels
def test_turned_values_through_dense(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are no contiguous tensor, and the expanded gradient of a sum."""
    layout = Layout.from_mask(torch.tensor([[True, False], [True, True]], device=device), 16)
    x, y = torch.randn(3, 16, 16, device=device).requires_grad_(), torch.randn(32, 48, device=device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        out = matmul(BlockSparseTensor(x.mT, layout), y)
        return out, torch.autograd.grad(out.sum(), x)[0]

    wanted = step()
    monkeypatch.setattr("gossamer.blocksparse.matmul_path.dense_is_faster", lambda *_: True)
    for got, want in zip(step(), wanted):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("left", [True, False], ids=["sparse @ dense", "dense @ sparse"])
@pytest.mark.kernels
def test_lost_or_not_finite_through_dense(left: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All NaN where blocks are lost; what is not finite of the dense operand shows where it does in a dense product."""
    monkeypatch.setattr("gossamer.blocksparse.matmul_path.dense_is_faster", lambda *_: True)
    mask = torch.tensor([[[True, False, False], [False, True, True]]], device=device)
    x, y = torch.randn(1, 32, 48, device=device), torch.randn(1, 48, 20, device=device)
    y[0, 3, 4], y[0, 40, 0] = math.nan, math.inf
    for capacity in (3, 2):
        blocks = from_dense(x, Layout.from_mask(mask, 16, capacity=capacity))
        got = matmul(blocks, y) if left else matmul(y.mT, blocks, transpose_b=True).mT
        if capacity == 2:
            assert bool(blocks.layout.overflowed) and got.isnan().all()
        else:
            want = blocks.to_dense() @ y
            assert want.isnan().sum() == 48
            torch.testing.assert_close(got, want, equal_nan=True)


@pytest.fixture(params=[(128, False, False, 16), (64, True, False, 64), (64, True, True, 64), (64, False, True, 16)],
                ids=str)  # fmt: skip
def walks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each way of Hopper's kernel to go about a product, whatever would be chosen; those that were taken."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper's kernel")
    from gossamer.blocksparse import matmul_path

    taken: list[Any] = []
    tile_m, listed, strips, band = request.param

    def chosen(block, densities, *_):
        # No list to follow where a matrix is dense.
        sparse = [density is not None for density in densities]
        taken.append(matmul_path.Walk(tile_m, listed and sparse[0], strips and sparse[2], band))
        return taken[-1]

    monkeypatch.setattr(matmul_path, "choose_walk", chosen)
    monkeypatch.setattr(matmul_path, "is_small", lambda *_: False)
    return taken


@pytest.mark.gpu
@pytest.mark.parametrize("turned", TURNED, ids=str)
@pytest.mark.parametrize("mix", [(True, True, True), (False, True, True), (True, True, False)], ids=str)
@pytest.mark.parametrize("kind", [torch.float16, torch.float32], ids=str)
def test_walks(walks, turned, mix, kind, device: torch.device) -> None:
    sizes, block = (320, 192, 576), (64, 64, 64)
    if kind is torch.float16:
        run(mix, turned, sizes, block, kind, device, density=0.5)
    else:
        near(mix, turned, sizes, block, device)
    assert walks


@pytest.mark.gpu
@pytest.mark.parametrize("lost", ["a", "b", "out"])
def test_walks_that_lost_blocks(walks, lost: str, device: torch.device) -> None:
    """All NaN, behind the last block too."""
    generator = seeded(0, device)
    mask = torch.rand(2, 5, 5, device=device, generator=generator) < 0.5
    a, b, out = (
        Layout.from_mask(mask, 64, capacity=int(mask.sum()) + (-1 if name == lost else 7)) for name in ("a", "b", "out")
    )
    x, y = (
        BlockSparseTensor(torch.ones(of.capacity, 64, 64, device=device, dtype=torch.bfloat16), of) for of in (a, b)
    )
    got = matmul(x, y, out)
    assert walks and got.values.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "".join("DS"[sparse] for sparse in mix))
@pytest.mark.parametrize("turned", TURNED, ids=str)
@pytest.mark.parametrize("sizes, block", [((70, 96, 130), (32, 32, 64)), ((320, 192, 576), (64, 64, 64)),
                                          ((256, 384, 128), (128, 128, 128))], ids=str)  # fmt: skip
@pytest.mark.parametrize("density, small", [(0.6, False), (1.0, False), (0.6, True)])
def test_tf32(
    mix, turned, sizes, block, density: float, small: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the copy engine can move and what it cannot, from operands stored either way, and what is too small."""
    monkeypatch.setattr("gossamer.blocksparse.matmul_path.is_small", lambda *_: small)
    near(mix, turned, sizes, block, device, density)


def near(mix, turned, sizes, block, device: torch.device, density: float = 0.5) -> None:
    """Where TF32 is allowed, an error of 2^-11 of a product's size."""
    (m, k, n), (bm, bk, bn) = sizes, block
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        generator = seeded(1, device)
        a, _ = draw((2,), (m, k), (bm, bk), mix[0], turned[0], density, torch.float32, generator)
        b, _ = draw((2,), (k, n), (bk, bn), mix[1], turned[1], density, torch.float32, generator)
        out_layout = layout_of((2,), (m, n), (bm, bn), density, generator) if mix[2] else None
        got = matmul(a, b, out_layout, transpose_a=turned[0], transpose_b=turned[1])
    finally:
        torch.set_float32_matmul_precision(before)
    got = got if out_layout is None else got.to_dense()
    x, y = (
        dense_of(operand, operand.values if sparse else operand, torch.float64, flip)[0]
        for operand, sparse, flip in ((a, mix[0], turned[0]), (b, mix[1], turned[1]))
    )
    want = x @ y if out_layout is None else from_dense(x @ y, out_layout).to_dense()
    assert (got - want).norm() < 1e-3 * want.norm()


@pytest.mark.parametrize("block", [(16, 32, 16), (64, 16, 32), (32, 64, 128)], ids=str)
def test_blocks_that_are_no_squares(block, device: torch.device) -> None:
    sizes = tuple(b + b // 2 for b in block)
    run((True, True, True), (False, True), sizes, block, torch.float32, device, lead=(1,))


@pytest.mark.parametrize("density", [0.0, 1.0])
@pytest.mark.parametrize("mix", [(True, False, False), (True, True, True)], ids=str)
def test_empty_and_full(mix, density: float, device: torch.device) -> None:
    run(mix, (False, False), (32, 32, 32), (16, 16, 16), torch.float32, device, lead=(1,), density=density)


@pytest.mark.parametrize("sizes, lead", [((0, 16, 16), (2,)), ((16, 0, 16), (2,)), ((16, 16, 0), (2,)),
                                         ((16, 16, 16), (0,)), ((16, 16, 16), (2, 0))], ids=str)  # fmt: skip
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "".join("DS"[sparse] for sparse in mix))
def test_nothing(mix, sizes, lead, device: torch.device) -> None:
    run(mix, (False, False), sizes, (16, 16, 16), torch.float32, device, lead=lead)


@pytest.mark.kernels
def test_programs_walk_many_tiles(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Each keeps a list, which the next tile overwrites."""
    from gossamer.blocksparse._triton import matmul as kernels

    monkeypatch.setattr(kernels, "WAVES", 1)
    run((True, True, False), (True, False), (80, 32, 16), (16, 16, 16), torch.float32, device, lead=(1,))


@pytest.mark.kernels
def test_a_list_longer_than_one_step_looks_at(device: torch.device) -> None:
    generator = seeded(0, device)
    present = torch.zeros(132, 1, dtype=torch.bool, device=device)
    present[[1, 127, 128, 131]] = 1
    x, y = (
        torch.randint(-3, 4, size, device=device, generator=generator).float()
        for size in ((16, 16 * 132), (16 * 132, 16))
    )
    a, b = from_dense(x, Layout.full((1, 132), 16, device=device)), from_dense(y, Layout.from_mask(present, 16))
    assert torch.equal(matmul(a, b), x @ b.to_dense())


def test_one_sparse_matrix_and_many_dense_ones(device: torch.device) -> None:
    generator = seeded(0, device)
    weight = from_dense(
        torch.randn(40, 24, device=device, generator=generator), layout_of((), (40, 24), (16, 16), 0.5, generator)
    )
    x = torch.randn(2, 3, 24, device=device, generator=generator)
    dense = weight.to_dense()
    torch.testing.assert_close(matmul(x, weight, transpose_b=True), x @ dense.mT)
    torch.testing.assert_close(matmul(weight, x, transpose_b=True), dense @ x.mT)
    torch.testing.assert_close(matmul(weight, x.mT[0]), dense @ x.mT[0])
    batch = from_dense(x, layout_of((2,), (3, 24), (16, 16), 0.5, generator))
    torch.testing.assert_close(matmul(batch, dense.mT), batch.to_dense() @ dense.mT)


@pytest.mark.parametrize("memory", ["transposed", "strided", "misaligned"])
def test_memory_of_dense_operands(memory: str, device: torch.device) -> None:
    generator = seeded(0, device)
    a, _ = draw((2,), (20, 40), (16, 16), True, False, 0.5, torch.float32, generator)
    a = replace(a, values=laid_out(a.values.detach().nan_to_num(), "strided"))
    b = torch.randn(2, 40, 33, device=device, generator=generator)
    torch.testing.assert_close(matmul(a, laid_out(b, memory)), a.to_dense() @ b)
    torch.testing.assert_close(matmul(laid_out(b.mT, memory), a, transpose_b=True), b.mT @ a.to_dense().mT)


@pytest.mark.parametrize("lost", ["a", "b", "out"])
@pytest.mark.parametrize("turned", [False, True])
def test_overflow_is_nan(lost: str, turned: bool, device: torch.device) -> None:
    def layout(name: str) -> Layout:
        return Layout.from_mask(torch.ones(1, 3, 3, device=device).bool(), 16, capacity=4 if name == lost else 9)

    a, b = (BlockSparseTensor(torch.ones(x.capacity, 16, 16, device=device), x) for x in (layout("a"), layout("b")))
    out = matmul(a, b, layout("out"), transpose_a=turned, transpose_b=turned)
    assert out.values.isnan().all()
    if lost != "out":
        assert matmul(a, b, transpose_a=turned, transpose_b=turned).isnan().all()
    else:
        dense = torch.ones(1, 48, 48, device=device)
        assert matmul(dense, b, layout("out"), transpose_b=turned).values.isnan().all()


def test_what_is_not_finite_stays(device: torch.device) -> None:
    layout = Layout.from_mask(torch.eye(2, device=device).bool(), 16)
    a = from_dense(torch.ones(32, 32, device=device), layout)
    b = torch.ones(32, 32, device=device)
    b[0, 0], b[20, 3], a.values[1, 0, 0] = math.nan, math.inf, -math.inf
    got = matmul(a, b)
    want = torch.full((32, 32), 16.0, device=device)
    want[:16, 0] = math.nan
    want[16] = -math.inf
    want[16:, 3] = math.inf
    # -inf of a meets inf of b.
    want[16, 3] = math.nan
    torch.testing.assert_close(got, want, equal_nan=True)


def test_nothing_reaches_beyond_the_matrix(device: torch.device) -> None:
    x = torch.full((20, 20), math.nan, device=device)
    layout = Layout.full((2, 2), 16, size=(20, 20), device=device)
    for out in (matmul(x, x, layout), matmul(from_dense(x, layout), x, layout)):
        assert out.to_dense().isnan().all() and int(out.values.isnan().sum()) == 400


def test_the_same_bits(dtype: torch.dtype, device: torch.device) -> None:
    generator = seeded(0, device)
    a, _ = draw((1,), (32, 48), (16, 16), True, False, 0.7, dtype, generator)
    b, _ = draw((1,), (48, 16), (16, 16), True, False, 0.7, dtype, generator)
    layout = Layout.product(a.layout, b.layout)
    first, dense = matmul(a, b, layout).values, matmul(a, b)
    assert torch.equal(first, matmul(a, b, layout).values) and torch.equal(dense, matmul(a, b))
    assert torch.equal(dense, BlockSparseTensor(first, layout).to_dense())


@given(
    st.sampled_from(MIXES), st.sampled_from(TURNED), st.tuples(*[st.integers(0, 70)] * 3),
    st.tuples(*[st.sampled_from([16, 32, 64])] * 3), st.sampled_from([1, 2, 3, 16]),
    st.sampled_from([0.0, 0.2, 0.8, 1.0]), SEEDS,
)  # fmt: skip
@pytest.mark.native
def test_any_sizes(device: torch.device, mix, turned, sizes, block, batch: int, density: float, seed: int) -> None:
    """Small integers, so that every order of addition gives the same."""
    generator = seeded(seed, device)
    (m, k, n), (bm, bk, bn) = sizes, block
    operands = []
    for size, b, sparse, flag in (((m, k), (bm, bk), mix[0], turned[0]), ((k, n), (bk, bn), mix[1], turned[1])):
        size, b = (size[::-1], b[::-1]) if flag else (size, b)
        x = torch.randint(-3, 4, (batch, *size), device=device, generator=generator).float()
        operands.append(from_dense(x, layout_of((batch,), size, b, density, generator)) if sparse else x)
    out_layout = layout_of((batch,), (m, n), (bm, bn), density, generator, room=1) if mix[2] else None
    got = matmul(*operands, out_layout, transpose_a=turned[0], transpose_b=turned[1])
    a, b = (x.to_dense() if isinstance(x, BlockSparseTensor) else x for x in operands)
    want = (a.mT if turned[0] else a) @ (b.mT if turned[1] else b)
    if out_layout is None:
        assert torch.equal(got, want)
    else:
        assert torch.equal(got.values, from_dense(want, out_layout).values)


@pytest.mark.native
def test_gradcheck_twice(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("float64 runs on the CPU only")
    generator = seeded(0, device)
    a, x = draw((1,), (17, 20), (16, 16), True, True, 0.8, torch.float64, generator)
    _b, y = draw((1,), (20, 3), (16, 16), False, False, 0.8, torch.float64, generator)
    x = x.detach().nan_to_num()[:, :4, :4].requires_grad_()

    def product(x: Tensor, y: Tensor) -> Tensor:
        values = torch.nn.functional.pad(x, (0, 12, 0, 12))
        return matmul(replace(a, values=values), y, transpose_a=True)

    y = y.detach().requires_grad_()
    assert torch.autograd.gradcheck(product, (x, y)) and torch.autograd.gradgradcheck(product, (x, y))


@pytest.mark.native
def test_autocast(device: torch.device) -> None:
    layout = Layout.from_mask(torch.eye(2, device=device).bool(), 16)
    a = from_dense(torch.rand(32, 32, device=device), layout)
    with torch.autocast(device.type, torch.bfloat16):
        out = matmul(a, torch.rand(32, 8, device=device, dtype=torch.float16))
    assert out.dtype is torch.bfloat16


@pytest.mark.native
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "".join("DS"[sparse] for sparse in mix))
def test_compile(mix, compiled, device: torch.device) -> None:
    generator = seeded(0, device)
    a, x = draw((2,), (20, 40), (16, 16), mix[0], False, 0.6, torch.float32, generator)
    b, y = draw((2,), (40, 33), (16, 16), mix[1], False, 0.6, torch.float32, generator)
    layout = layout_of((2,), (20, 33), (16, 16), 0.6, generator) if mix[2] else None

    def loss(a: Operand, b: Operand) -> Tensor:
        out = matmul(a, b, layout)
        return (out if layout is None else out.values).square().sum()

    want = torch.autograd.grad(loss(a, b), [x, y])
    for got, expected in zip(torch.autograd.grad(compiled(loss)(a, b), [x, y]), want):
        torch.testing.assert_close(got, expected)


@pytest.mark.gpu
def test_capture() -> None:
    device = torch.device("cuda")
    generator = seeded(0, device)
    mask = torch.rand(2, 8, 8, device=device, generator=generator) < 0.5
    x = torch.randn(2, 512, 512, device=device, generator=generator)

    def product() -> BlockSparseTensor:
        layout = Layout.from_mask(mask, 64, capacity=mask.numel())
        blocks = from_dense(x, layout)
        return matmul(blocks, blocks, layout, transpose_b=True)

    follows(lambda: [product().to_dense()], mask, x)


@pytest.mark.gpu
@pytest.mark.full
def test_more_than_2_to_the_31_elements() -> None:
    device = torch.device("cuda")
    n = 48 * 1024
    mask = torch.zeros(n // 64, n // 64, dtype=torch.bool, device=device)
    mask[-1, -1] = mask[0, 0] = True
    a = from_dense(torch.ones(n, n, device=device, dtype=torch.bfloat16), Layout.from_mask(mask, 64))
    b = torch.ones(n, n, device=device, dtype=torch.bfloat16)
    out = matmul(a, b)
    assert out[-1, -1] == 64 and out[0, 0] == 64 and out[64:-64].count_nonzero() == 0


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda a, x: matmul(a, x[:20]), ValueError, "b must have K = 32 like a, got 20"),
        (lambda a, x: matmul(a, "x"), TypeError, "b must be a torch.Tensor or a BlockSparseTensor, got str"),
        (lambda a, x: matmul(a, x.double()), TypeError, "b must have the dtype of a, float32, got float64"),
        (lambda a, x: matmul(a, x[0]), ValueError, r"b must have two dimensions or more, got shape \[32\]"),
        (
            lambda a, x: matmul(a, from_dense(x, Layout.from_mask(torch.eye(1).bool(), 32))),
            ValueError,
            "b must have blocks of 16 along K like a, got 32",
        ),
        (
            lambda a, x: matmul(a, a, Layout.full((3, 3), 16)),
            ValueError,
            "out_layout must have M = 32 like a, got 48",
        ),
        (
            lambda a, x: matmul(a, x, Layout.full((2, 2, 2), 16)),
            ValueError,
            r"block-sparse operands and out_layout must have equal leading dimensions, got \[\] and \[2\]",
        ),
        (
            lambda a, x: matmul(x.expand(3, 32, 32), x, Layout.full((2, 2, 2), 16)),
            ValueError,
            r"a's leading dimensions must broadcast to those of the layouts, \[2\], got \[3\]",
        ),
    ],
)
def test_errors(call, error: type[Exception], message: str) -> None:
    x = torch.ones(32, 32)
    with pytest.raises(error, match=f"blocksparse.matmul: {message}"):
        call(from_dense(x, Layout.from_mask(torch.eye(2).bool(), 16)), x)


def test_dense_operands_are_multiplied_as_ever(device: torch.device) -> None:
    x = torch.randn(3, 4, 5, device=device)
    assert torch.equal(blocksparse.matmul(x, x, transpose_b=True), x @ x.mT)


@pytest.mark.native
def test_small_products_have_narrow_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer._core import tuning
    from gossamer.blocksparse.matmul_path import is_small, narrowed

    device = torch.device("cuda", 0)
    monkeypatch.setattr(tuning, "programs", lambda _: 132)
    assert is_small((4, 448, 448, 448), device) and is_small((1, 0, 8, 8), device)
    assert not is_small((4, 1024, 1024, 1024), device) and not is_small((1, 128, 64, 1 << 20), device)
    assert narrowed(256, 64, 28, 448, device) == 64 and narrowed(256, 64, 512, 8192, device) == 256
    assert narrowed(256, 128, 8, 256, device) == 128 and narrowed(96, 64, 1, 96, device) == 96


@pytest.mark.native
@pytest.mark.parametrize("tile_m, listed", [(64, True), (128, False)])
def test_tf32_compiles_for_hopper(tile_m: int, listed: bool) -> None:
    """In registers and shared memory of one multiprocessor; the result turned and tiles of 128 ask for most."""
    pytest.importorskip("triton")
    from gossamer.blocksparse import matmul_path as walks
    from gossamer.blocksparse._gluon import matmul as hopper
    from tests import aot

    ((kernel, given),) = hopper.EXAMPLES.items()
    example = aot.complete(kernel, given)
    signature = example["signature"] | {"a_order_ptr": "*i32", "out_order_ptr": "*i32"}
    for name, width in (("a_desc", 32), ("b_desc", 32), ("zeros_desc", 32), ("out_desc", 64)):
        signature[name] = (
            signature[name].replace("bf16[64, 64]", f"fp32[64, {width}]").replace("bitwidth=16", "bitwidth=32")
        )
    constexprs = example["constexprs"] | {"BLOCK": (tile_m,) * 3 + (32,), "TRANS": (True, True, True, False, True)}
    constexprs |= {"TILE": (tile_m, walks.BAND[tile_m], True), "LIST": listed}
    compiled = aot.compile_kernel(kernel, example | {"signature": signature, "constexprs": constexprs}, "sm_90")
    used = aot.resources(compiled)
    assert compiled.metadata.shared <= aot.SHARED_MEMORY_LIMIT["sm_90"]
    assert used["LOCAL"] == used["STACK"] == 0 and "m64n" in compiled.asm["ptx"] and ".tf32" in compiled.asm["ptx"]


@pytest.mark.parametrize("sides", [((2, 5, 0), (0, 20)), ((2, 0, 20), (20, 40)), ((0, 5, 20), (20, 20))], ids=str)
def test_an_empty_batch_beside_one_matrix(sides, device: torch.device) -> None:
    """Nothing to add up is zeros, with the dense product's shape and gradients."""
    left, (k, n) = torch.randn(*sides[0], device=device, requires_grad=True), sides[1]
    right = torch.randn(k, n, device=device)
    blocks = from_dense(right, Layout.full((-(-k // 16), -(-n // 16)), 16, size=(k, n), device=device))
    out = blocksparse.matmul(left, blocks)
    torch.testing.assert_close(out, left @ right)
    (grad,) = torch.autograd.grad(out.sum(), left)
    assert grad.shape == left.shape
    turned = blocksparse.matmul(blocks, left.mT, transpose_a=True)
    torch.testing.assert_close(turned, right.mT @ left.mT)

"""sae.encode's TopK where the pre-activations are never in memory: above a bound from a sample, on Hopper."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gossamer import gemm
from gossamer.rowsparse import Rows
from gossamer.sae import encode, encode_path
from gossamer.testing import assert_exact, dense64
from tests.sae.dense import encode_with_l0, selected, whole

NAN, INF = math.nan, math.inf
Packs = Callable[[bool], None]
M, D, N, K = 5, 16, 4 * 256 + 40, 7  # what the copy engine can read


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch, mode: str) -> Packs:
    """Chooses the way, whichever GPU this is."""
    if mode == "cpu":
        pytest.skip("about the kernels, which run on a GPU or in the interpreter")
    return lambda choice: monkeypatch.setattr(encode_path, "has_bound", lambda m, k, weight: choice)


@pytest.fixture(params=[8, 16])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Columns of a tile that are a sample."""
    monkeypatch.setattr(encode_path, "topk_run", lambda d_in: request.param)
    return request.param


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Which rows each call computes again."""
    from gossamer.sae._triton import topk

    found: list[Tensor] = []
    settle = topk._settle
    monkeypatch.setattr(topk, "_settle", lambda *a: (found.append(a[5][0].bool()), settle(*a)))
    return found


def check_same(packs: Packs, *operands: Tensor | None, k: int = K, scale: Tensor | None = None) -> Rows:
    rows = []
    for choice in (False, True):
        packs(choice)
        rows.append(encode(*operands, activation=gemm.TopK(k, scale)))  # type: ignore[arg-type]
    wanted, got = rows
    assert got.spans.tolist() == wanted.spans.tolist()
    assert got.indices.tolist() == wanted.indices.tolist()
    assert torch.equal(got.values.nan_to_num(77), wanted.values.nan_to_num(77))
    return got


@pytest.mark.parametrize("k", [1, 100])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_k_largest(
    k: int, transposed: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator, packs: Packs
) -> None:
    """Whole numbers, many of which tie; k of 100 is more than the sample's bound leaves in a row."""
    packs(True)
    x, W = whole((2, 3, D), 2, generator, dtype), whole((N, D) if transposed else (D, N), 2, generator, dtype)
    W = W.t() if transposed else W
    for b_enc in (None, whole((N,), 3, generator, dtype), whole((2 * N,), 3, generator, torch.float32)[::2]):
        b_dec = whole((D,), 1, generator, dtype)
        rows, l0 = encode_with_l0(x, W, b_enc, activation=gemm.TopK(k), b_dec=b_dec)
        z = (x.double() - b_dec.double()) @ W.double() + (0 if b_enc is None else b_enc.double())
        acts = torch.where(selected(z, "topk", k), z, 0)
        assert rows.source is None and len(rows.values) == k * rows.num_rows
        assert l0.dtype is torch.float32 and torch.equal(l0, (acts != 0).sum(-1).float())
        assert_exact(dense64(rows), acts)


def test_rows_that_have_to_be_computed_again(
    run: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator, packs: Packs
) -> None:
    """Whatever a sample may say: too much in one tile, nothing but what is sampled, a bound that too few exceed."""
    x = torch.eye(8, D, device=device, dtype=dtype)
    W = torch.zeros(D, N, device=device, dtype=dtype)
    W[0, 300:400] = torch.arange(100, device=device).to(dtype)  # one tile
    W[1, 256 : 256 + run] = 2  # two runs of the sample
    W[1, :run] = 3
    W[2, : 4 * 256].view(4, 256)[:, :run] = 5  # all that is sampled and no more
    W[3] = 1  # everything, and all ties
    W[4] = -1  # nothing
    W[5, 100] = 4  # fewer than k, and not in the sample
    W[6] = whole((N,), 9, generator, dtype)
    W[7, 4 * 256 :] = 1  # beyond the last whole tile
    for k in (1, 40):
        check_same(packs, x, W, None, k=k)


@pytest.mark.usefixtures("run")
def test_what_is_ranked_by_a_scale(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator, packs: Packs, again: list[Tensor]
) -> None:
    """Of all sizes, in tiles enough to settle most rows."""
    n = 24 * 256 + 40
    x, W, b_enc = (
        whole((2, D), 2, generator, dtype),
        whole((D, n), 2, generator, dtype),
        whole((n,), 3, generator, dtype),
    )
    for scale in (
        None,
        torch.rand(n, device=device, generator=generator) + 0.5,
        torch.rand(n, device=device, generator=generator).to(dtype) + 0.5,
        torch.exp2(torch.randint(-6, 7, (n,), device=device, generator=generator).float()).to(dtype),
        torch.full((n,), 1 / 3, device=device, dtype=dtype),
        torch.full((n,), 1e-30, device=device),  # below what float16 holds
        torch.rand(2 * n, device=device, generator=generator)[::2] ** 8 + 1e-3,
    ):
        check_same(packs, x, W, b_enc, k=20, scale=scale)
    assert torch.stack(again).float().mean() < 0.5


def test_what_ties_at_the_bound_by_a_scale(
    run: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator, packs: Packs
) -> None:
    """Numbers that a scale makes the same, up to rounding: none that equals the k-th largest is lost."""
    n = 24 * 256 + 40
    scale = torch.rand(n, device=device, generator=generator) + 0.5
    sampled = torch.arange(n, device=device) % 256 < run
    for _ in range(4):
        kept = torch.rand(n, device=device, generator=generator) < torch.where(sampled, 0.3, 0.03)
        x, W = torch.eye(1, D, device=device, dtype=dtype), torch.zeros(D, n, device=device, dtype=dtype)
        W[0] = torch.where(kept, 3 / scale, 0).to(dtype)
        check_same(packs, x, W, None, k=20, scale=scale)


def test_not_a_number_and_infinity(dtype: torch.dtype, device: torch.device, packs: Packs) -> None:
    x, W = torch.zeros(2, D, device=device, dtype=dtype), torch.zeros(D, N, device=device, dtype=dtype)
    for columns in (slice(3, 5), slice(250, 260), slice(0, N)):
        for value in (NAN, INF):
            bias = torch.arange(N, device=device).remainder(50).to(torch.float32) - 40
            bias[columns] = value
            bias[columns.stop - 1] *= -1
            check_same(packs, x, W, bias)


@pytest.mark.usefixtures("run")
def test_infinity_by_a_tiny_scale(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator, packs: Packs, again: list[Tensor]
) -> None:
    """It is kept where the bound over the scale is more than float32 holds, in rows that have enough without it."""
    n = 24 * 256 + 40
    x, W = whole((2, D), 2, generator, dtype), whole((D, n), 2, generator, dtype)
    b_enc, scale = torch.zeros(n, device=device, dtype=dtype), torch.ones(n, device=device)
    b_enc[200] = INF
    for tiny in (1e-37, 1e-38, 1e-39):
        scale[200] = tiny
        got = check_same(packs, x, W, b_enc, k=20, scale=scale)
        assert got.values.isinf().sum() == len(x)
    assert not torch.stack(again).all()


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("transposed", [False, True])
def test_bounds_of_rows(transposed: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """What lies above its row's bound is packed, in every tile; everything where the bound is NaN."""
    from gossamer.gemm._triton.linear_pack import launch_linear_pack

    bounds = torch.tensor([0, 2.5, 3, torch.finfo(dtype).max, INF, NAN, 3.4e38, 2**-24], device=device)
    x, W = whole((8, D), 2, generator, dtype), whole((N, D), 2, generator, dtype)
    x[:, 0], W[:100, 0], W[100:103, 0] = 1, 0, INF
    x[7, 1] = NAN
    tiles = -(-N // 256)
    values = torch.zeros(8, tiles, 64, device=device, dtype=dtype)
    indices, counts = values.to(torch.uint8), torch.zeros(8, tiles, device=device, dtype=torch.int16)
    weight = W if transposed else W.t().contiguous().t()
    launch_linear_pack(x, weight, None, None, 256, (values, indices, counts), bounds)
    z = (x.double() @ W.double().t()).to(dtype)
    keep = ~(z.double() <= bounds.double()[:, None])
    keep = torch.nn.functional.pad(keep, (0, tiles * 256 - N)).view(8, tiles, 256)
    assert counts.tolist() == keep.sum(2).tolist()
    for row in range(8):
        for tile in range(tiles):
            columns = keep[row, tile].nonzero().squeeze(1)[:64]
            assert indices[row, tile, : len(columns)].tolist() == columns.tolist()
            wanted = z[row, tile * 256 + columns]
            assert torch.equal(values[row, tile, : len(columns)].nan_to_num(77), wanted.nan_to_num(77))


@pytest.mark.native
def test_it_has_the_same_gradients(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator, packs: Packs
) -> None:
    operands = [whole(shape, 2, generator, dtype) for shape in ((M, D), (D, N), (N,), (M, K))]
    found = []
    for choice in (False, True):
        packs(choice)
        leaves = [operand.clone().requires_grad_() for operand in operands[:3]]
        rows = encode(*leaves, activation=gemm.TopK(K))
        found.append(torch.autograd.grad(rows.values, leaves, operands[3].flatten()))
    for wanted, got in zip(*found):
        assert torch.equal(wanted, got)


@pytest.mark.parametrize("d_in", [768, 4096])
@pytest.mark.parametrize("k", [8, 32, 64, 128, 256, 600])
def test_how_often_rows_are_computed_again(k: int, d_in: int) -> None:
    """Where the largest lie anywhere, the rank leaves fewer than k, and the list has not room enough, hardly ever."""
    run = encode_path.topk_run(d_in)
    share = run / encode_path.TOPK_TILE

    def below(count: int, mean: float) -> float:
        """Of Poisson's distribution: fewer than `count`."""
        return sum(math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(count))

    rank = encode_path.topk_rank(k, run)
    assert 1 - below(rank, k * share) < 2e-5
    assert below(rank, encode_path.topk_list(k, run) * share) < 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize("m, d, n, k", [(600, 512, 65536, 64), (4000, 768, 24576, 32), (1030, 256, 131072 + 8, 256)])
def test_of_real_sizes(
    m: int, d: int, n: int, k: int, generator: torch.Generator, packs: Packs, again: list[Tensor]
) -> None:
    """And which rows are computed again: none of columns in no order, all of what fires side by side."""
    for dtype in (torch.bfloat16, torch.float16):
        x, W = whole((m, d), 1, generator, dtype), whole((d, n), 1, generator, dtype)
        check_same(packs, x, W, None, k=k)
        check_same(packs, x, W, whole((n,), 4, generator, torch.float32) / 4, k=k)
        check_same(packs, x, W, None, k=k, scale=torch.rand(n, device=W.device, generator=generator) + 0.5)
        assert not torch.stack(again).any()
        x[::7, :] = 0
        check_same(packs, x, W, torch.arange(n, device=W.device).div(n).to(dtype), k=k)
        assert again[-1].nonzero().squeeze(1).tolist() == list(range(0, m, 7))
        again.clear()

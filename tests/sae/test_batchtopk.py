"""The k * M largest of a batch, launch by launch; `test_encode` tests what comes of it."""

import math

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from gossamer._core import tuning  # noqa: E402
from gossamer.sae._triton import batchtopk  # noqa: E402
from tests.sae.test_select import definition, keys_of  # noqa: E402

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def kernels_run(mode: str) -> None:
    if mode == "cpu":
        pytest.skip("about the kernels, which run on a GPU or in the interpreter")


def check(z: Tensor, k: int, bias: Tensor | None = None, scale: Tensor | None = None) -> batchtopk.Found:
    """kth and need by definition, and the entries of the rows that have lists."""
    before = z.clone()
    found = batchtopk.find(z, bias, k, scale)
    pre = z if bias is None else (z.float() + bias.float()).to(z.dtype)
    keys = keys_of(pre if scale is None else (pre.float() * scale.float()).to(z.dtype))
    m, (wanted, room) = z.shape[0], definition(keys.view(1, -1), k * z.shape[0])
    equal = keys == wanted
    ties = equal.sum(1)
    assert found.kth.tolist() == wanted.expand(m).tolist()
    # How many ties a row takes; what it could take beyond those does not matter.
    taken = (room - (ties.cumsum(0) - ties)).clamp(min=0).minimum(ties)
    assert found.need.minimum(ties).tolist() == taken.tolist()
    listed = found.reach <= found.length
    kept = (keys > wanted) | (equal & (equal.cumsum(1) <= taken[:, None]))
    capacity = 2 * k
    values, indices = (
        torch.full((m, capacity), NAN, device=z.device, dtype=z.dtype),
        found.columns.new_empty(m, capacity),
    )
    nnz, l0 = torch.full_like(found.kth, -7), torch.full((m,), NAN, device=z.device)
    batchtopk.emit(z, bias, scale, found, (values, indices, nnz, l0), True)
    assert torch.equal(z.nan_to_num(77), before.nan_to_num(77))
    for row in range(0, m, -(-m // 64)):
        if not listed[row]:
            assert nnz[row] == -7
            continue
        columns = kept[row].nonzero().squeeze(1)
        assert nnz[row] == l0[row] == len(columns)
        assert (found.reach[row] > found.length) == (len(columns) > capacity)
        columns = columns[:capacity]
        assert indices[row].tolist() == columns.tolist() + [-1] * (capacity - len(columns))
        assert torch.equal(values[row, : len(columns)].nan_to_num(77), pre[row, columns].nan_to_num(77))
        assert not values[row, len(columns) :].any()
    return found


@pytest.mark.parametrize("m, n, k", [(3, 1, 1), (1, 50, 1), (2, 37, 37), (3, 1000, 1), (12, 300, 20), (5, 5000, 30)])
def test_random_rows(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    z = torch.randn(m, n, device=device, generator=generator).to(dtype)
    check(z, k)
    check(z, k, scale=torch.rand(n, device=device, generator=generator) + 0.5)


def test_bias_is_added_and_rounded(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    z, bias, scale = (torch.randn(shape, device=device, generator=generator) for shape in ((3, 400), (400,), (400,)))
    check(z.to(dtype), 9, bias)
    check(z.to(dtype), 9, bias.to(dtype), scale.abs().to(dtype))


def test_ties_and_what_is_not_a_number(dtype: torch.dtype, device: torch.device) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    z = torch.tensor([0.0, -0.0, tiny, 1, 1, 1, -1, INF, -INF, NAN, -NAN, 2, 1, -2], device=device).to(dtype)
    rows = torch.stack([z, z.flip(0), torch.zeros_like(z), torch.ones_like(z), -torch.ones_like(z)])
    for k in (1, 2, 3, 4, 5, 8, 9, 14):
        check(rows, k)


def test_what_a_sample_may_say(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """All that is large is in the sample, and the bound too high, or nothing is, and everything is listed."""
    sampled = torch.arange(4100, device=device) % 2048 < 16
    noise = torch.rand(6, 4100, device=device, generator=generator)
    found = check(torch.where(sampled, 100 + noise, noise).to(dtype), 50)
    assert (found.reach > found.length).all()
    found = check(torch.where(sampled, -noise, noise).to(dtype), 50)
    assert (found.reach > found.length).all()
    found = check(torch.where(noise > 0.9, noise, -noise).to(dtype), 50)
    assert (found.reach <= found.length).all()


def test_what_a_sample_of_rows_may_say(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """Of many rows some are sampled, and what is large may be in those alone."""
    sampled = torch.arange(600, device=device) % 3 == 0
    noise = torch.rand(600, 64, device=device, generator=generator)
    assert tuning.batch_sample(600, 64, 22) == tuning.batch_sample(600, 64, 12) == (3, 16)
    found = check((noise + 100 * sampled[:, None]).to(dtype), 22)
    assert (found.reach > found.length).all()
    found = check((noise - 0.8).to(dtype), 12)
    assert (found.reach <= found.length).all()


def test_a_row_with_more_than_its_list(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    z = torch.rand(40, 2500, device=device, generator=generator) - 0.9
    z[7] += 2
    found = check(z.to(dtype), 32)
    assert (found.reach > found.length).nonzero().squeeze(1).tolist() == [7]


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", [(700, 65536, 64), (32, 131_072, 100), (4096, 16_384, 32), (3, 1 << 20, 5000)])
def test_large(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    check(torch.randn(m, n, device=device, generator=generator).to(dtype), k)

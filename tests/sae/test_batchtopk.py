"""The k * M largest of a batch, launch by launch; `test_encode` tests what comes of it."""

import math

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from gossamer.sae._triton import batchtopk  # noqa: E402
from tests.sae.test_select import definition, keys_of  # noqa: E402

pytestmark = pytest.mark.kernels
NAN, INF = math.nan, math.inf


def check(z: Tensor, k: int, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """kth, need and entries by definition; which rows have lists."""
    before = z.clone()
    spans = torch.empty(2, z.shape[0], dtype=torch.int64, device=z.device)
    found = batchtopk.find(z, bias, k, scale, spans)
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
    values, indices, again, l0 = batchtopk.batch_topk(z, bias, k, scale)
    counts = kept.sum(1)
    assert torch.equal(spans[1], counts) and torch.equal(spans[0], counts.cumsum(0) - counts)
    assert torch.equal(again, spans) and torch.equal(l0.long(), counts)
    assert torch.equal(z.nan_to_num(77), before.nan_to_num(77))
    columns, total = kept.nonzero()[:, 1], int(counts.sum())
    assert torch.equal(indices[:total].long(), columns)
    assert torch.equal(values[:total].nan_to_num(77), pre[kept].nan_to_num(77))
    assert (indices[total:] == -1).all() and not values[total:].any() and len(values) == k * m
    return listed


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


def test_the_smallest_and_nothing(dtype: torch.dtype, device: torch.device) -> None:
    """Fewer numbers above 0 than wanted, down to the smallest there is: none is lost, and no 0 is listed."""
    smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    z = torch.zeros(2, 2000, device=device, dtype=dtype)
    z[:, 3:11] = smallest
    z[1, 1999] = 3 * smallest
    assert (z > 0).sum() == 17
    for k in (1, 5, 8, 9, 1000):
        assert check(z, k).all()


def test_what_a_sample_may_say(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """All that is large is in the sample, and the bound too high, or nothing is, and everything is listed."""
    sampled = torch.arange(4100, device=device) % 2048 < 16
    assert batchtopk.batch_sample(16, 4100, 512) == (1, 32, 2048)
    noise = torch.rand(16, 4100, device=device, generator=generator)
    assert not check(torch.where(sampled, 100 + noise, noise).to(dtype), 512).any()
    assert not check(torch.where(sampled, -noise, noise).to(dtype), 512).any()
    assert check(torch.where(noise > 0.8, noise, -noise).to(dtype), 512).all()
    # NaN, which no bound can be: what is not listed for it is counted.
    assert not check(torch.where(sampled, NAN, noise - 0.5).to(dtype), 512).any()
    # Too high, and exceeded by more than a list holds: what lies above is counted once.
    z = torch.where(sampled, 100 + noise, noise)
    z[0, :4099] = 200 + noise[0, :4099]
    assert not check(z.to(dtype), 512).any()


@pytest.mark.parametrize("large", [True, False])
def test_what_a_sample_of_rows_may_say(
    large: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Of many rows some are sampled, and what is large may be in those alone."""
    sampled = torch.arange(384, device=device) % 3 == 0
    noise = torch.rand(384, 64, device=device, generator=generator)
    assert [batchtopk.batch_sample(m, 65536, 16)[0] for m in (1, 255, 4096, 16384)] == [1, 1, 3, 9]
    assert batchtopk.batch_sample(384, 64, 22) == (3, 16, 2048) and batchtopk.batch_sample(384, 64, 12) == (3, 16, 1024)
    if large:
        assert not check((noise + 100 * sampled[:, None]).to(dtype), 22).any()
    else:
        assert check((noise - 0.8).to(dtype), 12).all()


def test_a_row_with_more_than_its_list(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """It alone is read again, though without it fewer than wanted would be listed."""
    z = torch.rand(40, 2500, device=device, generator=generator) - 0.9
    z[7] += 2
    assert (~check(z.to(dtype), 32)).nonzero().squeeze(1).tolist() == [7]


@pytest.mark.parametrize("m", [4096, 4097, 9000])
def test_ties_of_many_rows(m: int, device: torch.device, generator: torch.Generator) -> None:
    ties = torch.randint(0, 3, (m,), device=device, generator=generator, dtype=torch.int32)
    before = ties.cumsum(0) - ties
    above = torch.randint(0, 3, (m,), device=device, generator=generator, dtype=torch.int32)
    for left in (0, 1, 5000, 5_000_000_000):
        words = torch.tensor([1, 0, 7, left], device=device)
        kth, need = torch.full((2, m), -1, device=device, dtype=torch.int32)
        spans = torch.full((2, m), -1, device=device)
        args = (words, ties, above, kth, need, spans, m, 2)
        batchtopk._share_ties_kernel((1, 1, 1), args, {"BLOCK": 4096}, num_warps=8)
        assert (kth == 7).all()
        assert torch.equal(need, (left - before).clamp(0, 2).to(torch.int32))
        counts = (above + need.minimum(ties)).long()
        assert torch.equal(spans, torch.stack([counts.cumsum(0) - counts, counts]))


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", [(700, 65536, 64), (32, 131_072, 100), (4096, 16_384, 32), (3, 1 << 20, 5000)])
def test_large(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    check(torch.randn(m, n, device=device, generator=generator).to(dtype), k)

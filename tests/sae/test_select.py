"""The k largest pre-activations of each row, kernel by kernel; `test_encode` tests the latents."""

import math

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from gossamer.sae._triton import select  # noqa: E402

pytestmark = pytest.mark.kernels
NAN, INF = math.nan, math.inf


def keys_of(z: Tensor) -> Tensor:
    """int64 keys by definition: bit patterns of positive numbers, low zeros dropped; 0 below, the largest for NaN."""
    bits = z.float().clamp(min=0).view(torch.int32).long() >> select.SHIFT[z.dtype]
    return torch.where(z.isnan(), 0x7FFFFFFF >> select.SHIFT[z.dtype], torch.where(z > 0, bits, 0))


def definition(keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(kth, need) of every row of keys [M, N]."""
    kth = keys.sort(dim=1, descending=True).values[:, k - 1].clamp(min=1)
    return kth, k - (keys > kth[:, None]).sum(1)


def check_rows(z: Tensor, k: int, bias: Tensor | None = None) -> None:
    keys = keys_of(z if bias is None else (z.float() + bias.float()).to(z.dtype))
    check_entries(z, k, bias, keys, *definition(keys, k))


def check_entries(z: Tensor, k: int, bias: Tensor | None, keys: Tensor, kth: Tensor, need: Tensor) -> None:
    """`row_topk` writes what is above kth and the first `need` ties, by column, and marks the other slots."""
    values, indices, spans, l0 = select.row_topk(z, bias, k)
    values, indices = values.view(-1, k), indices.view(-1, k)
    assert spans[0].tolist() == list(range(0, z.shape[0] * k, k))
    tie = keys == kth[:, None]
    kept = (keys > kth[:, None]) | (tie & (tie.cumsum(1) <= need[:, None]))
    assert spans[1].tolist() == l0.tolist() == kept.sum(1).tolist()
    for row in range(0, z.shape[0], -(-z.shape[0] // 64)):
        columns = kept[row].nonzero().squeeze(1)
        assert indices[row].tolist() == columns.tolist() + [-1] * (k - columns.numel())
        assert keys_of(values[row])[: columns.numel()].tolist() == keys[row, columns].tolist()
        assert not values[row, columns.numel() :].any()


@pytest.mark.parametrize("m, n, k", [(3, 1, 1), (2, 37, 5), (2, 37, 37), (3, 1000, 1), (12, 300, 20), (2, 2500, 300)])
def test_random_rows(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    check_rows(torch.randn(m, n, device=device, generator=generator).to(dtype), k)


def test_bias_is_added_and_rounded(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    z, bias = (torch.randn(shape, device=device, generator=generator) for shape in ((3, 400), (400,)))
    check_rows(z.to(dtype), 9, bias)


def test_ties_and_what_is_not_a_number(dtype: torch.dtype, device: torch.device) -> None:
    tiny = torch.finfo(dtype).smallest_normal
    z = torch.tensor([0.0, -0.0, tiny, 1, 1, 1, -1, INF, -INF, NAN, -NAN, 2, 1, -2], device=device).to(dtype)
    rows = torch.stack([z, z.flip(0), torch.zeros_like(z), torch.ones_like(z), -torch.ones_like(z)])
    for k in (1, 2, 3, 4, 5, 8, 9, 14):
        check_rows(rows, k)


@pytest.mark.parametrize("k", [200, 700])
def test_everything_large_lies_in_few_groups(k: int, device: torch.device) -> None:
    """A group of columns counts once towards the bound however many large elements it holds."""
    groups, n = 8192, 20_000
    z = torch.arange(n, device=device).remainder(7).float().repeat(2, 1)
    inside = torch.arange(n, device=device) % groups < 100
    z[:, inside] += 100 + torch.arange(int(inside.sum()), device=device)
    check_rows(z, k)


def test_more_than_groups(device: torch.device, generator: torch.Generator, mode: str) -> None:
    """With k above the number of groups there is no bound, and the list takes every positive element."""
    n, k = 12_000, 9_000
    z = torch.randn(1 if mode == "interpreter" else 5, n, device=device, generator=generator)
    check_rows(z, k)
    check_rows(z.abs(), k)


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", [(700, 65536, 64), (32, 131_072, 100), (4096, 16_384, 32), (3, 1 << 20, 5000)])
def test_large(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    check_rows(torch.randn(m, n, device=device, generator=generator).to(dtype), k)

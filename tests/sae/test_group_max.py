"""gemm.GroupMax in sae.encode, beside the rule of EleutherAI's sparsify: ReLU, and a maximum of each group."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import gemm, sae
from gossamer.sae import group_max
from gossamer.sae.encode_dense import encode_dense
from gossamer.testing import assert_close, assert_exact
from tests.sae.dense import in_slots, whole

SIZES = [(5, 7, 45, 9), (3, 4, 64, 1), (4, 3, 33, 33), (1, 5, 2061, 229), (37, 2, 30, 6)]


def published(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, columns) `[..., k]` of pre-activations; the first of equal ones."""
    groups = z.relu().unflatten(-1, (k, -1))
    places = torch.argsort(groups, dim=-1, descending=True, stable=True)[..., :1]
    offsets = torch.arange(k, device=z.device) * groups.shape[-1]
    return groups.gather(-1, places).squeeze(-1), places.squeeze(-1) + offsets


@pytest.mark.parametrize("m, d, n, k", SIZES)
def test_slots(
    m: int, d: int, n: int, k: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Whole numbers tie, and a bias leaves many groups without a positive one."""
    x, W = whole((m, d), 2, generator, dtype), whole((d, n), 1, generator, dtype)
    b, b_dec = whole((n,), 3, generator, torch.float32) - 2, whole((d,), 1, generator, torch.float32)
    rows = sae.encode(x, W, b, gemm.GroupMax(k), b_dec=b_dec)
    rows.validate()
    values, columns = published((x.double() - b_dec.double()) @ W.double() + b.double(), k)
    assert rows.source is None and rows.dtype is dtype
    assert rows.packed.spans[0].tolist() == [k * row for row in range(m)]
    for row, (value, column) in enumerate(zip(values, columns)):
        kept = value > 0
        count = int(kept.sum())
        assert int(rows.counts[row]) == count == rows.l0[row]
        assert in_slots(rows, "indices")[row].tolist() == column[kept].tolist() + [-1] * (k - count)
        assert in_slots(rows, "values")[row].tolist() == value[kept].tolist() + [0] * (k - count)


def test_ties_and_groups_below_zero(dtype: torch.dtype, device: torch.device) -> None:
    W = torch.tensor([[1, 3, 3, -1, -2, -1, 0, 0, 0, 2, 2, 2]], device=device).to(dtype)
    rows = sae.encode(torch.ones(1, 1, device=device, dtype=dtype), W, None, gemm.GroupMax(4))
    assert rows.indices.tolist() == [1, 9, -1, -1] and rows.values.tolist() == [3, 2, 0, 0]
    assert rows.counts.tolist() == [2]


@pytest.mark.parametrize("k", [1, 6, 90])
def test_gradients(k: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """Of x, W_enc, b_enc and b_dec, through the entries that are kept."""
    m, d, n = 11, 20, 90
    leaves = [torch.randn(shape, device=device, generator=generator) for shape in ((m, d), (d, n), (n,), (d,))]
    leaves[:2] = [leaf.to(dtype) for leaf in leaves[:2]]
    weights = torch.randn(m, n, device=device, generator=generator)
    found: list[list[Tensor]] = []
    kept = None
    for wide in (None, torch.float64, torch.float32):
        x, W, b, b_dec = own = [(leaf if wide is None else leaf.to(wide)).detach().requires_grad_() for leaf in leaves]
        if wide is None:
            acts = sae.encode(x, W, b, gemm.GroupMax(k), b_dec=b_dec).to_dense()
            kept = acts.detach() != 0
        else:
            narrow = wide if wide is torch.float64 else dtype
            z = (((x - b_dec).to(narrow) @ W.to(narrow)) + b).to(narrow)
            acts = torch.where(kept, z, 0)
            if wide is torch.float64:
                values, columns = published(z.detach(), k)
                wanted = torch.zeros_like(z).scatter(1, columns, values)
                # Rounding may choose another of two that are nearly equal.
                assert ((wanted != 0) == kept).double().mean() > (0.99 if dtype is torch.float32 else 0.9)
        found.append(list(torch.autograd.grad((acts * weights).sum(), own)))
    for got, exact, plain in zip(*found):
        assert_close(got, reference64=exact, plain=plain)


def test_blocks_of_rows(device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows, two at a time, are those of one product."""
    x, W = whole((7, 4), 3, generator, torch.float32), whole((4, 48), 2, generator, torch.float32)
    once = sae.encode(x, W, None, gemm.GroupMax(8))
    sizes = []
    linear = group_max.linear
    monkeypatch.setattr(group_max, "linear", lambda rows, *others: sizes.append(len(rows)) or linear(rows, *others))
    for block, wanted in ((100, [2, 2, 2, 1]), (1, [1] * 7)):
        monkeypatch.setattr(group_max, "BLOCK", block)
        rows = sae.encode(x, W, None, gemm.GroupMax(8))
        assert sizes == wanted
        sizes.clear()
        assert all(torch.equal(a, b) for a, b in zip(rows.packed[:3], once.packed[:3]))


@pytest.mark.native
def test_autocast_keeps_float32_biases(device: torch.device) -> None:
    x, W = torch.ones(1, 1, device=device), torch.tensor([[1.0, -1.0]], device=device)
    step = torch.finfo(torch.bfloat16).eps / 2
    with torch.autocast(device.type, torch.bfloat16):
        rows = sae.encode(x, W, torch.tensor([0.0, 1 + step], device=device), gemm.GroupMax(2))
    assert rows.dtype is torch.bfloat16 and rows.values.tolist() == [1.0, step]


@pytest.mark.native
def test_a_decoder_takes_its_rows(device: torch.device, generator: torch.Generator, compiled: Any) -> None:
    """In one graph with it, and leading dimensions."""
    x, W = (torch.randn(shape, device=device, generator=generator) for shape in ((2, 3, 8), (8, 60)))

    def reconstruct(x: Tensor, W: Tensor) -> Tensor:
        return sae.decode(sae.encode(x, W, None, gemm.GroupMax(12)), W.t().contiguous())

    values, columns = published(x.double() @ W.double(), 12)
    acts = torch.zeros(2, 3, 60, dtype=torch.float64, device=device).scatter(-1, columns, values)
    got = compiled(reconstruct)(x, W)
    assert_close(got, reference64=acts @ W.double().t(), plain=acts.float() @ W.t())
    torch.testing.assert_close(got, reconstruct(x, W))


def test_dense_latents_are_of_other_activations(device: torch.device) -> None:
    """A pass that thresholds at 0 would drop what AbsTopK keeps below."""
    x, W = torch.ones(2, 3, device=device), torch.ones(3, 8, device=device)
    for activation in (gemm.AbsTopK(2), gemm.GroupMax(2)):
        with pytest.raises(ValueError, match="activation must be"):
            encode_dense(x, W, None, activation)


def test_as_many_groups_as_latents_are_relu(device: torch.device) -> None:
    x = torch.arange(-6.0, 6.0, device=device).view(3, 4)
    assert_exact(sae.encode(x, torch.eye(4, device=device), None, gemm.GroupMax(4)).to_dense(), x.double().relu())

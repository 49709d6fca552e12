"""A block's products along columns under gradients, against dense ones."""

import pytest
import torch
from torch import Tensor

from tests.ffn.trained import pattern

pytestmark = pytest.mark.kernels

M, N, K, ROOM = 40, 13, 600, 400


def lists(device: torch.device, generator: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(active `[M, N]`, (rows, places in the lists of rows, offsets of neurons))"""
    active = pattern(M, N, device, generator)
    places = torch.zeros(M, N, dtype=torch.int32, device=device)
    count = int(active.sum())
    places[active] = torch.arange(count, dtype=torch.int32, device=device)
    offsets = torch.zeros(N + 1, dtype=torch.int32, device=device)
    offsets[1:] = active.sum(0).cumsum(0)
    more = (0, ROOM - count)
    rows = torch.nn.functional.pad(active.t().nonzero()[:, 1].int(), more)
    return active, (rows, torch.nn.functional.pad(places.t()[active.t()], more), offsets)


def by_column(dense: Tensor, active: Tensor) -> Tensor:
    return torch.nn.functional.pad(dense.t()[active.t()], (0, ROOM - int(active.sum())))


def test_weight_gradients(device: torch.device, generator: torch.Generator) -> None:
    """Of two sets of values with their sums, and of one with the products of rows; neurons without rows have zeros."""
    from gossamer.ffn._triton.entry_lists import ColumnLists
    from gossamer.ffn._triton.train_columns import DOWN, weight_gradients

    active, (rows, places, offsets) = lists(device, generator)
    x, weight = (torch.randn(size, K, device=device, generator=generator) for size in (M, N))
    first, second = (torch.where(active, torch.randn(M, N, device=device, generator=generator), 0) for _ in range(2))
    listed = ColumnLists(rows, places, by_column(first, active), offsets)
    sums = torch.full((2, N), 7.0, device=device)
    pair = by_column(first, active), by_column(second, active)
    one, other, none = weight_gradients(listed, pair, x, weight, sums=sums)
    assert none is None and other is not None
    torch.testing.assert_close(one, first.t() @ x)
    torch.testing.assert_close(other, second.t() @ x)
    torch.testing.assert_close(sums, torch.stack((first.sum(0), second.sum(0))))
    one, none, dots = weight_gradients(listed, (listed.hidden, None), x, weight, product=True, tile=DOWN)
    assert none is None and dots is not None and dots.shape[0] == -(-K * 4 // DOWN.width)
    torch.testing.assert_close(one, first.t() @ x)
    count = int(offsets[-1])
    torch.testing.assert_close(dots.sum(0)[:count], by_column(x @ weight.t(), active)[:count], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_hidden_gradients(gated: bool, squared: bool, device: torch.device, generator: torch.Generator) -> None:
    """By rows and by columns, with the share of the L1 penalty."""
    from gossamer.ffn._triton.entry_lists import ColumnLists
    from gossamer.ffn._triton.train_columns import hidden_gradients

    active, (rows, places, offsets) = lists(device, generator)
    gate = torch.where(active, torch.rand(M, N, device=device, generator=generator) + 0.1, 0).requires_grad_()
    up, grad = (torch.randn(M, N, device=device, generator=generator) for _ in range(2))
    up.requires_grad_()
    penalty, count = torch.tensor([0.3], device=device), int(active.sum())
    dots = torch.stack((by_column(grad, active) * 0.25, by_column(grad, active) * 0.75))
    stored = [torch.nn.functional.pad(t.detach()[active], (0, ROOM - count)) for t in (gate, up)]
    listed = ColumnLists(rows, places, stored[0], offsets)
    found = hidden_gradients(listed, dots, stored[0], stored[1] if gated else None, penalty, squared)
    hidden = gate.square() if squared else gate
    hidden = hidden * up if gated else hidden
    hidden = torch.where(active, hidden, 0)
    leaves = [gate, up] if gated else [gate]
    want = torch.autograd.grad((hidden * grad).sum() + 0.3 * hidden.abs().sum(), leaves)
    for at, wanted in enumerate(want):
        torch.testing.assert_close(found[0][at, :count], wanted[active])
        torch.testing.assert_close(found[1][at, :count], by_column(wanted, active)[:count])

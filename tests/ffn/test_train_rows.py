"""A block's products along rows under gradients, against dense ones."""

import pytest
import torch
from torch import Tensor

from tests.ffn.trained import pattern

pytestmark = pytest.mark.kernels

M, N, K, D = 13, 40, 24, 20


def lists(device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(values `[M, N]`, zeros where there is no entry; columns and offsets of the lists of rows)"""
    active = pattern(M, N, device, generator)
    columns, offsets = active.nonzero()[:, 1], torch.zeros(M + 1, dtype=torch.int32, device=device)
    offsets[1:] = active.sum(1).cumsum(0)
    values = torch.where(active, torch.rand(M, N, device=device, generator=generator) + 0.1, 0)
    return values, torch.nn.functional.pad(columns.to(torch.int16), (0, 7)), offsets


@pytest.mark.parametrize("both", [False, True])
def test_multiply_rows(both: bool, device: torch.device, generator: torch.Generator) -> None:
    """One set of values and a bias, or two sets; rows without entries become the bias."""
    from gossamer.ffn._triton.train_rows import multiply_rows

    values, columns, offsets = lists(device, generator)
    first, second = (torch.randn(N, D, device=device, generator=generator) for _ in range(2))
    listed = values[values != 0]
    bias = None if both else torch.randn(D, device=device, generator=generator)
    out = torch.empty(M, D, device=device)
    multiply_rows(columns, offsets, (listed, first), (-listed, second) if both else None, bias, out)
    want = values @ (first - second) if both else values @ first + bias
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_forward(gated: bool, squared: bool, device: torch.device, generator: torch.Generator) -> None:
    """The result, the up projection at the entries, and the sums of |hidden| of rows."""
    from gossamer.ffn._triton.entry_lists import RowLists, Weights
    from gossamer.ffn._triton.train_rows import forward

    values, columns, offsets = lists(device, generator)
    x, gate, up = (torch.randn(rows, K, device=device, generator=generator) for rows in (M, N, N))
    up_bias, down = (torch.randn(*shape, device=device, generator=generator) for shape in ((N,), (N, D)))
    listed = torch.nn.functional.pad(values[values != 0], (0, 7)).repeat(2 if gated else 1, 1)
    rows, none = offsets.int().repeat(2, 1), torch.empty(M, dtype=torch.int32, device=device)
    weights = Weights(gate, None, None, up if gated else None, up_bias if gated else None, down)
    out, l1 = forward(RowLists(listed, columns, rows, none, none), x, weights, None, squared)
    hidden, factor = values.square() if squared else values, x @ up.t() + up_bias
    hidden = hidden * factor if gated else hidden
    torch.testing.assert_close(out, hidden @ down)
    torch.testing.assert_close(l1, hidden.abs().sum(1))
    if gated:
        torch.testing.assert_close(listed[1, : int(offsets[-1])], factor[values != 0])

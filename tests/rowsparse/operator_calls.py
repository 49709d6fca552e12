"""Calls of the room's operators with every kind of argument, for `tests/recorded.py`."""

import torch
from torch import Tensor

from gossamer import rowsparse
from gossamer.testing import random_rows

N, D = 90, 12


def leaves(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with 2, 20 and 0 entries, a weight and a bias, with gradients."""
    acts = random_rows((3, N), l0=[2, 20, 0], device=device).requires_grad_()
    W, b = (torch.randn(shape, device=device).requires_grad_() for shape in ((N, D), (D,)))
    return acts, W, b


def calls(device: torch.device) -> None:
    acts, W, _ = leaves(device)
    for options in ({"capacity": 8}, {"capacity": N}, {"capacity": "exact"}):
        rows = rowsparse.pack(acts, **options)
        rows.to_dense().sum().backward()
        rowsparse.matmul(rowsparse.pack(acts, **options), W).sum().backward()
        rowsparse.matmul(rowsparse.pack(acts.detach(), **options), W).sum().backward()
        rowsparse.matmul(rowsparse.pack(acts, **options), W.detach()).sum().backward()
        rowsparse.transpose(rows)
        x = torch.randn(3, D, device=device, requires_grad=True)
        # Every row overflows or none, for the source of one that does not is left unwritten.
        pattern = rows.detach() if options.get("capacity") == N else rowsparse.pack(acts.detach().abs() + 1, **options)
        rowsparse.sampled_matmul(x, W, pattern).packed.values.sum().backward()

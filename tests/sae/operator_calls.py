"""Calls of the room's operators with every kind of argument, for `tests/recorded.py`."""

import torch

from gossamer import gemm, sae
from gossamer.sae.encode_dense import encode_dense
from gossamer.sae.smallest import smallest
from tests.rowsparse.operator_calls import D, N, leaves


def calls(device: torch.device) -> None:
    _decode(device)
    _encode(device)
    _encode_dense(device)


def _decode(device: torch.device) -> None:
    for options in ({"capacity": 8}, {"capacity": N}):
        for bias in (True, False):
            acts, W, b = leaves(device)
            sae.decode(acts, W, b if bias else None, **options).sum().backward()
        sae.decode(acts, W.detach(), **options).sum().backward()
        sae.decode(acts.detach(), W, **options).sum().backward()
        sae.decode(acts.detach(), W.detach(), b.detach(), out_dtype=torch.float16, **options)


def _encode(device: torch.device) -> None:
    x, W, b = (torch.randn(shape, device=device).requires_grad_() for shape in ((3, D), (D, N), (N,)))
    threshold = torch.full((N,), 0.5, device=device, requires_grad=True)
    for options in (
        {},
        {"activation": gemm.JumpReLU(threshold, 0.5), "capacity": 3},
        {"activation": gemm.JumpReLU(threshold, 0.5), "capacity": N},
        {"activation": gemm.JumpReLU(threshold, 0.5, ste_to_input=True), "capacity": 3},
        {"activation": gemm.TopK(4)},
        {"activation": gemm.BatchTopK(4)},
        {"activation": gemm.GroupMax(3)},
        {"activation": gemm.TopK(4, torch.rand(N, device=device))},
    ):
        rows = sae.encode(x, W, b, **options)
        scale = torch.rand(N, device=device, requires_grad=True)
        (rows.to_dense().sum() + rows.l0.sum() + sae.tanh_l0(rows, scale).sum()).backward()
        sae.count_fired(rows)
        smallest(rows, torch.ones(rows.num_columns, device=device))
    sae.encode(x.detach(), W, activation="relu", capacity=3).to_dense().sum().backward()
    sae.encode(x, W, b, capacity="exact").to_dense().sum().backward()


def _encode_dense(device: torch.device) -> None:
    x, W, b = (torch.randn(shape, device=device).requires_grad_() for shape in ((3, 12), (12, 90), (90,)))
    threshold = torch.full((90,), 0.5, device=device, requires_grad=True)
    for activation in (
        "relu",
        gemm.JumpReLU(threshold, 0.5, ste_to_input=True),
        gemm.TopK(4, torch.rand(90, device=device)),
        gemm.BatchTopK(4),
    ):
        acts, l0, *_ = encode_dense(x, W, b, activation)
        (acts.sum() + l0.sum()).backward()

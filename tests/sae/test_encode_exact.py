"""Entries side by side in as many slots, against `encode` with slots for all of d_sae: no row can overflow."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import nn
from gossamer.gemm import BatchTopK, JumpReLU
from gossamer.sae import encode
from tests.graphs import captured
from tests.sae.dense import encode_with_l0, whole
from tests.syncs import without_a_sync


def operands(m: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Small integers, so that sums are exact and ties abound."""
    x, W, b = (whole(shape, 2, generator, dtype) for shape in ((m, 4), (4, n), (n,)))
    return x, W, b


def check(x: Tensor, W: Tensor, b: Tensor | None, activation: Any) -> None:
    want, l0 = encode_with_l0(x, W, b, activation, capacity=max(W.shape[1], 1))
    got, found = encode_with_l0(x, W, b, activation, capacity="exact")
    held = torch.arange(W.shape[1], device=x.device) < want.counts[:, None]
    n = W.shape[1]
    assert got.source is None and got.shape == want.shape and torch.equal(found, l0)
    assert torch.equal(got.counts, want.counts) and torch.equal(got.starts, want.counts.cumsum(0) - want.counts)
    assert torch.equal(got.indices, want.indices.view(-1, n)[held] if n else want.indices)
    assert torch.equal(got.values.nan_to_num(77), (want.values.view(-1, n)[held] if n else want.values).nan_to_num(77))


@pytest.mark.parametrize("m, n", [(1, 1), (2, 700), (1, 2500), (20, 90), (0, 40), (3, 0)])
def test_thresholds(m: int, n: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """By any threshold: also elements that lie in a window, as 0, and NaN."""
    x, W, b = operands(m, n, dtype, generator)
    if m:
        x[-1, 0] = torch.nan
    threshold = torch.rand(n, device=device, generator=generator).requires_grad_()
    for activation in ("relu", JumpReLU(threshold.detach()), JumpReLU(threshold[:1].sum()), JumpReLU(threshold, 2.0)):
        check(x, W, b.float(), activation)


@pytest.mark.parametrize("shift", [0.0, 99.0])
def test_gradients(shift: float, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    x, W, b = operands(6, 300, dtype, generator)
    for bandwidth in (None, 0.5):
        grads = []
        for capacity in ("exact", 300):
            leaves = [t.clone().requires_grad_() for t in (x, W)]
            activation: Any = "relu"
            if bandwidth:
                leaves.append(torch.linspace(0, 2, 300, device=device).requires_grad_())
                activation = JumpReLU(leaves[2], bandwidth)
            rows, l0 = encode_with_l0(leaves[0], leaves[1], b.float() + shift, activation, capacity=capacity)
            rows.validate()
            grads.append(
                (rows.to_dense().detach(), l0.detach(), *torch.autograd.grad((rows.to_dense() ** 2).sum(), leaves))
            )
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.native
@pytest.mark.parametrize("m, n", [(600, 4096), (33, 30001), (9000, 1024)])
def test_large(m: int, n: int, device: torch.device, generator: torch.Generator, mode: str) -> None:
    m = m if mode == "gpu" else m // 16
    x = torch.randn(m, 64, device=device, generator=generator).bfloat16()
    W = torch.randn(64, n, device=device, generator=generator).bfloat16()
    for threshold in (0.0, 30.0):
        # With a gradient the slots are filled from a plain product, too.
        check(x, W.requires_grad_(), None, JumpReLU(torch.full((n,), threshold, device=device)))


@pytest.mark.parametrize("through_l0", [False, True])
def test_estimates(through_l0: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """Straight through thresholds to them and to x, from values and from l0."""
    x, W, b = operands(6, 300, dtype, generator)
    grads = []
    for capacity in ("exact", 300):
        leaves = [t.clone().requires_grad_() for t in (x, W)]
        threshold = torch.linspace(0, 2, 300, device=device).requires_grad_()
        activation = JumpReLU(threshold, 1.5, ste_to_input=True)
        rows, l0 = encode_with_l0(*leaves, b.float(), activation, capacity=capacity)
        target = (l0 * torch.arange(6, device=device)).sum() if through_l0 else (rows.to_dense() ** 2).sum()
        grads.append(torch.autograd.grad(target, [*leaves, threshold]))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("m, n, k", [(1, 300, 7), (12, 300, 20), (5, 2500, 30), (70, 90, 2)])
def test_a_batch_has_room_for_k_entries_a_row(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Slots behind the last entry hold 0 at index -1: an operator that asks for no row may read all slots."""
    x, W, b = operands(m, n, dtype, generator)
    for shift in (0.0, -20.0):
        rows = encode(x, W, b.float() + shift, BatchTopK(k))
        total = int(rows.counts.sum())
        assert len(rows.values) == k * m and rows.source is None and total <= k * m
        assert torch.equal(rows.starts, rows.counts.cumsum(0) - rows.counts)
        assert (rows.indices[total:] == -1).all() and not rows.values[total:].any()


def test_rows_with_more_than_a_list(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """One row takes nearly everything, and is read again; the last rows have nothing."""
    x, W = torch.zeros(40, 1, device=device, dtype=dtype), torch.rand(1, 2500, device=device, generator=generator)
    x[7] = 1
    W = (W + 1).to(dtype)
    for k in (60, 65):
        z = x @ W
        kept = z.flatten().sort(descending=True, stable=True).indices[: 40 * k]
        wanted = torch.zeros_like(z.flatten()).index_copy_(0, kept, z.flatten()[kept]).view_as(z)
        rows = encode(x, W, None, BatchTopK(k))
        assert torch.equal(rows.to_dense(), wanted) and rows.counts[7] == min(40 * k, 2500)


@pytest.mark.native
def test_training_keeps_no_pre_activations(device: torch.device, generator: torch.Generator) -> None:
    """Tensors that live between the passes are of the size of the entries or the weights."""
    torch.manual_seed(0)
    model = nn.BatchTopKSAE(16, 3000, 8, device=device)
    x = torch.randn(50, 16, device=device, generator=generator)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(x)
        encode(x, model.W_enc, capacity="exact").to_dense()
    assert max(saved) <= 50 * 3000 and saved.count(50 * 3000) <= 2
    loss.loss.backward()


@pytest.mark.gpu
def test_capture_without_a_sync(device: torch.device, generator: torch.Generator) -> None:
    x, W, b = operands(600, 4096, torch.bfloat16, generator)
    W.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        # A kept tensor must not hold on to the gradient of W, which belongs to the stream it was first wanted on.
        rows = encode(x, W, b, BatchTopK(20))
        grads = torch.autograd.grad(rows.values.float().square().sum(), W)
        return rows.spans, rows.indices, rows.values.detach(), *grads

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        with without_a_sync():
            want = run()
    torch.cuda.current_stream().wait_stream(stream)
    graph, got = captured(run)
    graph.replay()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)

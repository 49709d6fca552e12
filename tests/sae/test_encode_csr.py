"""CSRs, against `encode` with slots for all of d_sae: no row can overflow, and no order differs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import nn
from gossamer.gemm import BatchTopK, JumpReLU
from gossamer.rowsparse import CSR
from gossamer.sae import decode, encode, encode_with_l0
from gossamer.testing import assert_close
from tests.sae.dense import valued
from tests.sae.test_encode import gradients, jumprelu_case, whole


def operands(m: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Small integers, so that sums are exact and ties abound."""
    x, W, b = (whole(shape, 2, generator, dtype) for shape in ((m, 4), (4, n), (n,)))
    return x, W, b


def check(x: Tensor, W: Tensor, b: Tensor | None, k: int, scale: Tensor | None = None) -> CSR:
    got, l0 = encode_with_l0(x, W, b, BatchTopK(k, scale), format="csr")
    want = encode(x, W, b, BatchTopK(k, scale), capacity=W.shape[1])
    assert isinstance(got, CSR) and got.shape == want.shape and got.source is None
    assert torch.equal(got.row_offsets.diff(), want.nnz_per_row) and got.row_offsets[0] == 0
    assert torch.equal(l0.flatten(), want.nnz_per_row.to(l0.dtype)) and l0.shape == x.shape[:-1]
    held = torch.arange(W.shape[1], device=x.device) < want.nnz_per_row[:, None]
    total = int(got.row_offsets[-1])
    assert got.max_nnz == k * want.num_rows
    assert torch.equal(got.indices[:total], want.indices[held])
    assert torch.equal(got.values[:total].nan_to_num(77), want.values[held].nan_to_num(77))
    # What is padding says so: those who do not ask for rows may read all slots.
    assert (got.indices[total:] == -1).all() and not got.values[total:].any()
    return got


@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (1, 300, 7), (3, 37, 37), (12, 300, 20), (5, 2500, 30), (70, 90, 2)])
def test_rows(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    x, W, b = operands(m, n, dtype, generator)
    check(x, W, b, k)
    check(x, W, b.float() - 20, k)
    check(x, W, None, k, torch.linspace(0.5, 2, n, device=device, dtype=dtype))


def test_rows_with_more_than_a_list(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """One row takes nearly everything, and is read again; the last rows have nothing."""
    x, W = torch.zeros(40, 1, device=device, dtype=dtype), torch.rand(1, 2500, device=device, generator=generator)
    x[7] = 1
    rows = check(x, (W + 1).to(dtype), None, 60)
    assert rows.nnz_per_row[7] == 2400
    # Fewer than wanted are above 0: a hundred slots are padding.
    check(x, (W + 1).to(dtype), None, 65)
    x[7, 0] = torch.nan
    check(x, (W + 1).to(dtype), None, 60)


def test_nothing(dtype: torch.dtype, device: torch.device) -> None:
    W = torch.ones(4, 50, device=device, dtype=dtype)
    for shape in ((3, 4), (0, 4), (2, 0, 4), (2, 3, 4)):
        rows = check(torch.zeros(shape, device=device, dtype=dtype), W, None, 5)
        assert not rows.to_dense().any() and rows.to_dense().shape == (*shape[:-1], 50)


@pytest.mark.native
@pytest.mark.parametrize("m, n, k", [(512, 4096, 32), (4096, 16384, 64)])
def test_large(m: int, n: int, k: int, device: torch.device, generator: torch.Generator, mode: str) -> None:
    m = m if mode == "gpu" else m // 16
    x = torch.randn(m, 64, device=device, generator=generator).bfloat16()
    check(x, torch.randn(64, n, device=device, generator=generator).bfloat16(), None, k)


@pytest.mark.parametrize("linear", [False, True])
def test_gradients(linear: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """Of x, both weights and biases, against float64."""
    leaves, weights, _ = jumprelu_case((2, 3), 20, 90, dtype, generator)
    del leaves["threshold"]
    leaves["W_dec"] = (torch.randn(90, 16, device=device, generator=generator) / 4).to(dtype)
    if linear:
        leaves["W_enc"] = leaves["W_enc"].t().contiguous().t()
    masks = []

    def ours(x: Tensor, W_enc: Tensor, b_enc: Tensor, b_dec: Tensor, W_dec: Tensor) -> Tensor:
        rows = encode(x.to(dtype), W_enc.to(dtype), b_enc, BatchTopK(5), b_dec=b_dec, format="csr")
        masks.append(rows.to_dense().detach() != 0)
        return (decode(rows, W_dec.to(dtype)).float() * weights[..., :16]).sum()

    def dense(x: Tensor, W_enc: Tensor, b_enc: Tensor, b_dec: Tensor, W_dec: Tensor) -> Tensor:
        narrow = x.dtype if x.dtype is torch.float64 else dtype
        z = ((x - b_dec).to(narrow) @ W_enc.to(narrow) + b_enc).to(narrow)
        out = torch.where(masks[0], z, 0) @ W_dec.to(narrow)
        return (out.to(x.dtype) * weights[..., :16].to(x.dtype)).sum()

    got = gradients(leaves, torch.float32, ours)
    exact, plain = gradients(leaves, torch.float64, dense), gradients(leaves, torch.float32, dense)
    for name in leaves:
        assert_close(got[name], reference64=exact[name], plain=plain[name], name=name)


@pytest.mark.parametrize(
    "activation, k, shift",
    [("relu", 0, 0.0), ("relu", 0, 99.0), ("jumprelu", 0, 0.0), ("topk", 7, 0.0), ("topk", 90, -99.0)],
)
def test_any_activation(
    activation: str, k: int, shift: float, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """All entries and nothing else, also of rows that an ELL would have no slots for, and their gradients."""
    x, W, b = operands(6, 300, dtype, generator)
    threshold = torch.rand(300, device=device, generator=generator) if activation == "jumprelu" else None
    given = valued(activation, k=k, threshold=threshold, bandwidth=None if threshold is None else 0.5)
    grads = []
    for options in ({"format": "csr"}, {"capacity": 300} if activation != "topk" else {}):
        leaves = [t.clone().requires_grad_() for t in (x, W)]
        if threshold is not None:
            leaves.append(threshold.clone().requires_grad_())
            given["activation"] = JumpReLU(leaves[2], 0.5)
        rows, l0 = encode_with_l0(*leaves[:2], b.float() + shift, **given, **options)
        grads.append(
            (rows.to_dense().detach(), l0.detach(), *torch.autograd.grad((rows.to_dense() ** 2).sum(), leaves))
        )
        if "format" in options:
            assert isinstance(rows, CSR) and rows.source is None and rows.max_nnz == int(rows.row_offsets[-1])
            assert isinstance(encode(x, W, b.float() + shift, **given, **options), CSR)
            rows.validate()
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("m, n", [(1, 1), (2, 700), (1, 2500), (20, 90), (0, 40), (3, 0)])
def test_thresholds(m: int, n: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """Entry by entry what an ELL holds, by any threshold: also what lies in a window, as 0, and NaN."""
    x, W, b = operands(m, n, dtype, generator)
    if m:
        x[-1, 0] = torch.nan
    threshold = torch.rand(n, device=device, generator=generator).requires_grad_()
    for activation in ("relu", JumpReLU(threshold.detach()), JumpReLU(threshold[:1].sum()), JumpReLU(threshold, 2.0)):
        want, l0 = encode_with_l0(x, W, b.float(), activation, capacity=max(n, 1))
        got, found = encode_with_l0(x, W, b.float(), activation, format="csr")
        held = torch.arange(want.capacity, device=device) < want.nnz_per_row[:, None]
        assert isinstance(got, CSR) and got.source is None and torch.equal(got.row_offsets.diff(), want.nnz_per_row)
        assert torch.equal(got.indices, want.indices[held]) and torch.equal(found, l0)
        assert torch.equal(got.values.nan_to_num(77), want.values[held].nan_to_num(77))


@pytest.mark.native
@pytest.mark.parametrize("m, n", [(600, 4096), (33, 30001), (9000, 1024)])
def test_large_by_thresholds(m: int, n: int, device: torch.device, generator: torch.Generator, mode: str) -> None:
    m = m if mode == "gpu" else m // 16
    x = torch.randn(m, 64, device=device, generator=generator).bfloat16()
    W = torch.randn(64, n, device=device, generator=generator).bfloat16()
    for threshold in (0.0, 30.0):
        activation = JumpReLU(torch.full((n,), threshold, device=device))
        # With a gradient the ELL is made from a plain product, too.
        want = encode(x, W.clone().requires_grad_(), None, activation, capacity=n)
        got = encode(x, W, None, activation, format="csr")
        held = torch.arange(n, device=device) < want.nnz_per_row[:, None]
        assert torch.equal(got.row_offsets.diff(), want.nnz_per_row)
        assert torch.equal(got.indices, want.indices[held]) and torch.equal(got.values, want.values[held])


@pytest.mark.parametrize("through_l0", [False, True])
def test_estimates(through_l0: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """Straight through thresholds to them and to x, as with an ELL: from values and from l0."""
    x, W, b = operands(6, 300, dtype, generator)
    grads = []
    for options in ({"format": "csr"}, {"capacity": 300}):
        leaves = [t.clone().requires_grad_() for t in (x, W)]
        threshold = torch.linspace(0, 2, 300, device=device).requires_grad_()
        activation = JumpReLU(threshold, 1.5, ste_to_input=True)
        rows, l0 = encode_with_l0(*leaves, b.float(), activation, **options)  # type: ignore[arg-type]
        target = (l0 * torch.arange(6, device=device)).sum() if through_l0 else (rows.to_dense() ** 2).sum()
        grads.append(torch.autograd.grad(target, [*leaves, threshold]))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


def test_waits_are_refused(device: torch.device, compiled: Callable[[Any], Any]) -> None:
    x, W = torch.ones(2, 3, device=device), torch.ones(3, 5, device=device)
    with pytest.raises(Exception, match=r'format="csr" with another activation than gemm.BatchTopK waits'):
        compiled(lambda x: encode(x, W, format="csr").to_dense())(x)


@pytest.mark.parametrize("wanted", ["x", "W_enc", "b_enc", "b_dec"])
def test_each_gradient_alone(wanted: str, device: torch.device, generator: torch.Generator) -> None:
    leaves, weights, _ = jumprelu_case((6,), 20, 90, torch.float32, generator)
    del leaves["threshold"]

    def loss(**leaves: Tensor) -> Tensor:
        return (encode(activation=BatchTopK(4), format="csr", **leaves).to_dense() * weights).sum()

    together = gradients(leaves, torch.float32, loss)
    leaves[wanted].requires_grad_()
    (alone,) = torch.autograd.grad(loss(**leaves), leaves[wanted])
    torch.testing.assert_close(alone, together[wanted].to(alone.dtype))


@pytest.mark.native
def test_training_keeps_no_pre_activations(device: torch.device, generator: torch.Generator) -> None:
    """What lives between the passes is of the size of the entries, and the loss and gradients are those of ELL."""
    torch.manual_seed(0)
    model = nn.BatchTopKSAE(16, 3000, 8, device=device)
    x = torch.randn(50, 16, device=device, generator=generator)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(x)
    assert max(saved) == 16 * 3000
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss.loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.threshold.zero_()
    model.firing_counts.zero_()
    model.steps_since_fired.zero_()
    reconstruction = model(x)
    assert torch.equal(loss.reconstruction, reconstruction)
    (x - reconstruction).square().sum(-1).mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name])
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_compile(device: torch.device, generator: torch.Generator, compiled: Callable[[Any], Any]) -> None:
    x, W, b = operands(6, 90, torch.float32, generator)
    W.requires_grad_()

    def run(x: Tensor) -> Tensor:
        return encode(x, W, b, BatchTopK(4), format="csr").to_dense().square().sum()

    (want,) = torch.autograd.grad(run(x), W)
    (got,) = torch.autograd.grad(compiled(run)(x), W)
    torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_capture_without_a_sync(device: torch.device, generator: torch.Generator) -> None:
    x, W, b = operands(600, 4096, torch.bfloat16, generator)
    W.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        # Nothing that is kept may hold on to the gradient of W, which belongs to the stream it was first wanted on.
        rows = encode(x, W, b, BatchTopK(20), format="csr")
        grads = torch.autograd.grad(rows.values.float().square().sum(), W)
        return rows.row_offsets, rows.indices, rows.values.detach(), *grads

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            want = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    graph.replay()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_errors(device: torch.device) -> None:
    x, W = torch.ones(2, 3, device=device), torch.ones(3, 5, device=device)
    with pytest.raises(ValueError, match=r"sae.encode: k must be at most d_sae = 5, got 6"):
        encode(x, W, activation=BatchTopK(6), format="csr")
    with pytest.raises(ValueError, match=r"sae.encode_with_l0: x must have shape"):
        encode_with_l0(x, W[:2], activation=BatchTopK(1), format="csr")

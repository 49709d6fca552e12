"""Gradients of sae.encode, against dense autograd, and JumpReLU's against the published estimator."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import gemm
from gossamer.sae import count_fired, decode, encode
from gossamer.testing import assert_close, assert_exact
from tests.sae.dense import BANDWIDTH, SCALED, capacities, encode_with_l0, gradients, jumprelu_case, options_for, valued


class DenseJumpReLU(torch.autograd.Function):
    """(acts, l0) and the straight-through estimates of their gradients, with a rectangle as kernel, as published."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, threshold: Tensor, bandwidth: float, to_input: bool = False
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(z, threshold)
        ctx.bandwidth, ctx.to_input = bandwidth, to_input
        active = (z > threshold) & (z > 0)
        return torch.where(active, z, 0), active.sum(-1).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, grad_acts: Tensor, grad_l0: Tensor) -> tuple[Tensor, Tensor, None, None]:
        z, threshold = ctx.saved_tensors
        near = ((z - threshold).abs() < ctx.bandwidth / 2) & (threshold >= 0)
        slope = (threshold * grad_acts + grad_l0[..., None]) * near / -ctx.bandwidth
        grad_z = grad_acts * ((z > threshold) & (z > 0)) - (slope if ctx.to_input else 0)
        return grad_z, slope.flatten(0, -2).sum(0), None, None


@pytest.mark.parametrize("n, capacity", [(90, None), (90, 90), (90, 4), (2100, None), (2100, 4)])
@pytest.mark.parametrize("consumer", ["to_dense", "decode", "decode, ste to input", "l0 alone, ste to input"])
def test_jumprelu_gradients(
    n: int, capacity: int | None, consumer: str, device: torch.device, generator: torch.Generator, mode: str
) -> None:
    """Against dense autograd with the published estimator; entries below the threshold carry much of it."""
    if mode == "interpreter" and n > 1000 and consumer != "decode":
        pytest.skip("large for the interpreter")
    to_input = consumer.endswith("ste to input")
    consumed = 0.0 if consumer.startswith("l0 alone") else 1.0
    dtype = torch.float64 if mode == "cpu" else torch.float32
    leaves, weights, l0_weights = jumprelu_case((2, 3) if n < 1000 else (2,), 20, n, torch.float32, generator)
    W_dec = torch.randn(n, 12, device=device, generator=generator) / 4
    out_weights = weights[..., :12]

    def ours(x: Tensor, W_enc: Tensor, b_enc: Tensor, b_dec: Tensor, threshold: Tensor) -> Tensor:
        rows, l0 = encode_with_l0(
            x, W_enc, b_enc, gemm.JumpReLU(threshold, BANDWIDTH, to_input), b_dec=b_dec, capacity=capacity
        )  # fmt: skip
        z = (x - b_dec).double() @ W_enc.double() + b_enc.double()
        assert rows.counts.tolist() == (z > threshold - BANDWIDTH / 2).flatten(0, -2).sum(-1).tolist()
        assert l0.tolist() == (z > threshold).sum(-1).tolist()
        assert bool(rows.overflowed) or capacity != 4
        if consumer == "to_dense":
            out = rows.to_dense() * weights.to(x.dtype)
        else:
            out = decode(rows, W_dec.to(x.dtype)) * out_weights.to(x.dtype)
        return (out.sum() if consumed else 0) + (l0 * l0_weights.to(l0.dtype)).sum()

    def dense(x: Tensor, W_enc: Tensor, b_enc: Tensor, b_dec: Tensor, threshold: Tensor, below: float = 1) -> Tensor:
        acts, l0 = DenseJumpReLU.apply((x - b_dec) @ W_enc + b_enc, threshold, BANDWIDTH, to_input)
        if consumer == "to_dense":
            out = acts * weights.to(x.dtype)
        else:
            out = (acts @ W_dec.to(x.dtype)) * out_weights.to(x.dtype)
        return out.sum() * consumed + (l0 * l0_weights.to(x.dtype)).sum()

    got, exact = gradients(leaves, dtype, ours), gradients(leaves, torch.float64, dense)
    plain = gradients(leaves, torch.float32, dense)
    for name in leaves:
        assert_close(got[name], reference64=exact[name], plain=plain[name], name=name)


def test_the_window_below_the_threshold_matters(device: torch.device, generator: torch.Generator) -> None:
    """What the test above demands is far from what nonzero values alone would give."""
    leaves, weights, _ = jumprelu_case((40,), 20, 90, torch.float32, generator)
    z = (leaves["x"] - leaves["b_dec"]) @ leaves["W_enc"] + leaves["b_enc"]
    distance = z - leaves["threshold"]
    slope = -leaves["threshold"] / BANDWIDTH * weights
    full = (slope * (distance.abs() < BANDWIDTH / 2)).sum(0)
    above = (slope * ((distance.abs() < BANDWIDTH / 2) & (distance > 0))).sum(0)
    assert (full - above).norm() > 0.3 * full.norm()
    leaves["threshold"].requires_grad_()
    rows = encode(**valued("jumprelu", bandwidth=BANDWIDTH, capacity=90, **leaves))
    (grad,) = torch.autograd.grad((rows.to_dense() * weights).sum(), leaves["threshold"])
    torch.testing.assert_close(grad, full.float(), rtol=1e-4, atol=1e-4)


def test_the_window_is_stored_in_training_alone(device: torch.device) -> None:
    x = torch.tensor([[1.0]], device=device)
    W = torch.tensor([[0.70, 0.76, 0.99, 1.0, 1.01, 1.2, 1.3]], device=device)
    threshold = torch.tensor(1.0, device=device, requires_grad=True)
    options = {"activation": "jumprelu", "threshold": threshold, "bandwidth": 0.5}
    rows, l0 = encode_with_l0(x, W, **valued(**options))
    assert rows.indices[:6].tolist() == [1, 2, 3, 4, 5, 6] and rows.counts.tolist() == [6]
    assert (rows.values[:3] == 0).all() and (rows.values[3:6] > 1).all() and l0.tolist() == [3]
    assert count_fired(rows).tolist() == [0, 0, 0, 0, 1, 1, 1]
    with torch.no_grad():
        assert encode(x, W, **valued(**options)).counts.tolist() == [3]
    assert encode(x, W, activation=gemm.JumpReLU(threshold)).counts.tolist() == [3]
    # A threshold that takes no gradient needs none, but for the estimate that reaches z.
    fixed = threshold.detach()
    assert encode(x, W, activation=gemm.JumpReLU(fixed, 0.5)).counts.tolist() == [3]
    assert encode(x, W, activation=gemm.JumpReLU(fixed, 0.5, ste_to_input=True)).counts.tolist() == [6]


def test_negative_thresholds_act_as_zero(device: torch.device) -> None:
    x, W = torch.tensor([[1.0]], device=device), torch.tensor([[-0.2, 0.1, 0.3]], device=device)
    threshold = torch.full((3,), -0.3, device=device, requires_grad=True)
    rows, l0 = encode_with_l0(x, W, activation=gemm.JumpReLU(threshold, 1.0))
    assert_exact(rows.to_dense(), W.double().relu())
    (rows.to_dense().sum() + l0.sum()).backward()
    assert threshold.grad is not None and threshold.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "activation, capacity",
    [("relu", 3), ("relu", "exact"), *((name, None) for name in ("relu", *SCALED, "groupmax"))],
)
def test_gradients(
    activation: str, capacity: int | None, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    leaves, weights, _ = jumprelu_case((2, 3), 20, 90, dtype, generator)
    del leaves["threshold"]
    options = options_for(activation, 90, 5, weights)
    W_dec = (torch.randn(90, 16, device=device, generator=generator) / 4).to(dtype)
    masks = []

    def ours(x: Tensor, W_enc: Tensor, b_enc: Tensor, b_dec: Tensor) -> Tensor:
        rows = encode(x.to(dtype), W_enc.to(dtype), b_enc, **valued(b_dec=b_dec, capacity=capacity, **options))
        masks.append(rows.to_dense().detach() != 0)
        return (decode(rows, W_dec).float() * weights[..., :16]).sum()

    def dense(x: Tensor, W_enc: Tensor, b_enc: Tensor, b_dec: Tensor) -> Tensor:
        narrow = x.dtype if x.dtype is torch.float64 else dtype
        z = ((x - b_dec).to(narrow) @ W_enc.to(narrow) + b_enc).to(narrow)
        out = torch.where(masks[0], z, 0) @ W_dec.to(narrow)
        return (out.to(x.dtype) * weights[..., :16].to(x.dtype)).sum()

    got = gradients(leaves, torch.float32, ours)
    exact, plain = gradients(leaves, torch.float64, dense), gradients(leaves, torch.float32, dense)
    for name in leaves:
        assert_close(got[name], reference64=exact[name], plain=plain[name], name=name)


@pytest.mark.native
@pytest.mark.skipif(torch.cuda.is_available(), reason="float64 runs on the CPU")
@pytest.mark.parametrize(
    "activation, capacity",
    [("relu", 2), ("relu", "exact"), *((name, None) for name in ("relu", *SCALED, "groupmax"))],
)
def test_gradcheck(activation: str, capacity: int | None, generator: torch.Generator) -> None:
    leaves, _, _ = jumprelu_case((3,), 4, 15, torch.float64, generator)
    inputs = [leaf.double().requires_grad_() for name, leaf in leaves.items() if name != "threshold"]
    options = options_for(activation, 15, 4, leaves["threshold"])

    def run(x: Tensor, W: Tensor, b: Tensor, b_dec: Tensor) -> Tensor:
        return encode(x, W, b, **valued(b_dec=b_dec, capacity=capacity, **options)).to_dense()

    torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("wanted", ["x", "W_enc", "b_enc", "b_dec", "threshold"])
def test_each_gradient_alone(wanted: str, device: torch.device, generator: torch.Generator) -> None:
    """Each comes by a way of its own when it is the only one."""
    leaves, weights, l0_weights = jumprelu_case((6,), 20, 90, torch.float32, generator)

    def loss(**leaves: Tensor) -> Tensor:
        rows, l0 = encode_with_l0(**valued("jumprelu", bandwidth=BANDWIDTH, capacity=8, **leaves))
        return (rows.to_dense() * weights).sum() + (l0 * l0_weights).sum()

    together = gradients(leaves, torch.float32, loss)
    leaves[wanted].requires_grad_()
    (alone,) = torch.autograd.grad(loss(**leaves), leaves[wanted])
    torch.testing.assert_close(alone, together[wanted].to(alone.dtype))


@pytest.mark.parametrize("activation", ["jumprelu", "topk", "batchtopk"])
def test_gradient_in_the_layout_of_the_weight(
    activation: str, device: torch.device, generator: torch.Generator
) -> None:
    """W_enc as it is, or a `nn.Linear` weight's transpose: autograd has nothing to copy into another order."""
    leaves, weights, _ = jumprelu_case((6,), 20, 90, torch.float32, generator)
    W_enc, options = leaves.pop("W_enc"), options_for(activation, 90, 5, leaves.pop("threshold"))
    found, linear = [], W_enc.t().contiguous()
    for weight in (W_enc, linear.t()):
        weight = weight.detach().requires_grad_()
        rows = encode(W_enc=weight, **leaves, **valued(capacity=capacities(activation, 4)[-1], **options))
        (grad,) = torch.autograd.grad((rows.to_dense() * weights).sum(), weight)
        assert grad.stride() == weight.stride()
        found.append(grad)
    torch.testing.assert_close(*found)


def test_gradient_of_l0_alone(device: torch.device, generator: torch.Generator) -> None:
    leaves, _, _ = jumprelu_case((6,), 20, 90, torch.float32, generator)
    for capacity in (90, 4):
        threshold = leaves["threshold"].clone().requires_grad_()
        kwargs = {**leaves, "threshold": threshold, "W_enc": leaves["W_enc"].clone().requires_grad_()}
        _, l0 = encode_with_l0(**valued("jumprelu", bandwidth=BANDWIDTH, capacity=capacity, **kwargs))
        l0.mean().backward()
        z = (leaves["x"] - leaves["b_dec"]) @ leaves["W_enc"] + leaves["b_enc"]
        near = ((z - leaves["threshold"]).abs() < BANDWIDTH / 2).double().mean(0) / -BANDWIDTH
        assert_close(threshold.grad, reference64=near, plain=near.float())
        assert kwargs["W_enc"].grad is None or not kwargs["W_enc"].grad.any()


def test_reproducible(device: torch.device, generator: torch.Generator, scale: int) -> None:
    """Bit for bit, with columns that many rows share."""
    leaves, weights, _ = jumprelu_case((8 * scale,), 10, 40, torch.float32, generator)

    def loss(**leaves: Tensor) -> Tensor:
        rows = encode(**valued("jumprelu", bandwidth=BANDWIDTH, capacity=12, **leaves))
        return (rows.to_dense() * weights).sum()

    first, second = (gradients(leaves, torch.float32, loss) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in leaves)

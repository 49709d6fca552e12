"""Rotary embeddings and gates out of one projection, against dense float64."""

import pytest
import torch
from torch import Tensor

from gossamer.attention.rotary_gates import rotary_gates
from gossamer.testing import assert_close


def plain(y: Tensor, cos: Tensor, sin: Tensor, h: int, g: int, value_gate: bool, output_gate: bool) -> list[Tensor]:
    d = cos.shape[-1]
    heads = y.unflatten(-1, (-1, d))
    cos, sin = (x.to(y.dtype)[..., None, :] for x in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        return x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin

    q, k, v, rest = heads.split([h, g, g, heads.shape[2] - h - 2 * g], 2)
    if value_gate:
        v, rest = v * rest[:, :, :g].sigmoid(), rest[:, :, g:]
    out = [turned(q), turned(k), v]
    return [*out, rest.flatten(2).sigmoid()] if output_gate else out


@pytest.mark.parametrize("value_gate, output_gate", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize(
    "b, t, h, g, d, batched", [(2, 5, 4, 2, 16, False), (1, 37, 3, 3, 6, True), (2, 33, 2, 1, 64, True)]
)
def test_against_dense(
    b: int, t: int, h: int, g: int, d: int, batched: bool, value_gate: bool, output_gate: bool, dtype: torch.dtype,
    device: torch.device, generator: torch.Generator,
) -> None:  # fmt: skip
    columns = d * (h * (1 + output_gate) + g * (2 + value_gate))
    y = torch.randn(b, t, columns, device=device, generator=generator).to(dtype).requires_grad_()
    angles = torch.randn(*((b,) if batched else ()), t, d // 2, device=device, generator=generator)
    angles = torch.cat([angles, angles], -1)
    cos, sin = angles.cos(), angles.sin()
    out = rotary_gates(y, cos, sin, h, g, value_gate=value_gate, output_gate=output_gate)
    assert (out[3] is not None) == output_gate
    exact = y.detach().double().requires_grad_()
    wanted = plain(exact, cos.double(), sin.double(), h, g, value_gate, output_gate)
    usual = y.detach().requires_grad_()
    other = plain(usual, cos, sin, h, g, value_gate, output_gate)
    grads = [torch.randn(x.shape, device=device, generator=generator).to(dtype) for x in other]
    for name, a, c, e in zip(("q", "k", "v", "gate"), out, wanted, other):
        assert_close(a, reference64=c, plain=e, name=name)
    found = (
        torch.autograd.grad(results, leaf, [x.to(leaf.dtype) for x in grads])[0]
        for results, leaf in ((out[: len(grads)], y), (wanted, exact), (other, usual))
    )
    ours, reference64, by_plain = found
    assert_close(ours, reference64=reference64, plain=by_plain, name="gradient")


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"y": torch.ones(2, 3)}, ValueError, r"y must have shape \[B, T, N\]"),
        ({"y": torch.ones(2, 3, 31)}, ValueError, r"y must have shape \[B, T, N\] = \[2, 3, 28\] by the heads"),
        ({"cos": torch.ones(3, 5)}, ValueError, "with an even D, got"),
        ({"cos": torch.ones(4, 4)}, ValueError, r"cos must have shape .* = \[3, 4\] like y, got \[4, 4\]"),
        ({"sin": torch.ones(2, 3, 4)}, ValueError, r"sin must have shape .* = \[3, 4\] like cos"),
        ({"cos": torch.ones(3, 4).double()}, TypeError, "cos and sin must be float32, got float64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change: dict[str, Tensor], error: type[Exception], message: str) -> None:
    given = {"y": torch.ones(2, 3, 28), "cos": torch.ones(3, 4), "sin": torch.ones(3, 4), **change}
    with pytest.raises(error, match=f"attention.rotary_gates: .*{message}"):
        rotary_gates(**given, num_heads=2, num_kv_heads=1)

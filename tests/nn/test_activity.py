"""Blocks with `l1=True`: result, L1 with its gradient, L0 and counts against dense float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer import nn

pytestmark = pytest.mark.native
BLOCKS = {"gated": nn.GatedMLP, "plain": nn.MLP}


def oracle(block: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, l1, l0, fired of a float64 copy, in plain PyTorch; the L1 is eq. 2 with the sum over neurons."""
    acts = {"relu": F.relu, "relu2": lambda t: F.relu(t).square(), "silu": F.silu}
    gate = getattr(block, "gate_proj", block.up_proj)
    active = acts[block.activation](F.linear(x, gate.weight, gate.bias))
    h = active * F.linear(x, block.up_proj.weight, block.up_proj.bias) if gate is not block.up_proj else active
    flat = (active != 0).flatten(0, -2)
    l1 = h.abs().flatten(0, -2).sum(1).mean()
    return F.linear(h, block.down_proj.weight, block.down_proj.bias), l1, flat.sum(1).double().mean(), flat.sum(0)


@pytest.mark.parametrize("kind", list(BLOCKS))
@pytest.mark.parametrize("activation", ["relu", "relu2", "silu"])
@pytest.mark.parametrize("bias", [False, True])
def test_against_float64(kind: str, activation: str, bias: bool) -> None:
    block = BLOCKS[kind](12, 30, activation, bias, l1=True, dtype=torch.float64)
    other, x = copy.deepcopy(block), torch.randn(3, 7, 12, dtype=torch.float64)
    found = block(x)
    out, l1, l0, fired = oracle(other, x)
    torch.testing.assert_close(found.out, out)
    torch.testing.assert_close(found.activity.l1, l1)
    assert found.activity.l0.item() == pytest.approx(l0.item())
    assert torch.equal(found.activity.fired, fired)
    (found.out.square().sum() + 0.3 * found.activity.l1).backward()
    (out.square().sum() + 0.3 * l1).backward()
    for (name, parameter), wanted in zip(block.named_parameters(), other.parameters()):
        torch.testing.assert_close(parameter.grad, wanted.grad, msg=name)


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_it_compiles_whole_and_runs_under_autocast_and_checkpoints(kind: str) -> None:
    block = BLOCKS[kind](16, 48, "relu", l1=True)
    x = torch.randn(2, 5, 16)
    wanted = block(x)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    again: Any = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    for found in (compiled, again):
        torch.testing.assert_close(found.activity.l1, wanted.activity.l1)
        assert torch.equal(found.activity.fired, wanted.activity.fired)
    grads = [torch.autograd.grad(made.activity.l1, block.up_proj.weight)[0] for made in (wanted, compiled, again)]
    torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(grads[2], grads[0])
    with torch.autocast("cpu", torch.bfloat16):
        found = block(x)
    assert found.out.dtype is torch.bfloat16 and found.activity.l1.dtype is torch.float32
    assert found.activity.l1.item() == pytest.approx(wanted.activity.l1.item(), rel=0.02)


def test_l1_may_be_switched_and_no_tokens_have_none() -> None:
    block = nn.GatedMLP(8, 24, "relu")
    x = torch.randn(3, 8)
    plain = block(x)
    block.l1 = True
    torch.testing.assert_close(block(x).out, plain)
    none = block(x[:0]).activity
    assert none.l1 == 0 and none.l0 == 0 and not none.fired.any()

"""Gradients under checkpoints are those without, with several micro-batches in flight."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gossamer import nn

pytestmark = pytest.mark.native

MODELS: dict[str, Callable[[], Any]] = {
    "step": lambda: nn.JumpReLUSAE(16, 96, l0_coefficient=1e-2, bandwidth=0.5),
    "steered": lambda: nn.JumpReLUSAE(16, 96, target_l0=8, bandwidth=0.5),
    "quadratic": lambda: nn.JumpReLUSAE(16, 96, target_l0=8, penalty="quadratic", bandwidth=0.5),
    "tanh": lambda: nn.JumpReLUSAE(
        16, 96, l0_coefficient=1e-2, penalty="tanh", bandwidth=0.5, pre_act_coefficient=1e-3, dead_after=2
    ),
    "topk": lambda: nn.TopKSAE(16, 96, 3, dead_after=3),
    "batchtopk": lambda: nn.BatchTopKSAE(16, 96, 3, dead_after=3),
    "matryoshka": lambda: nn.MatryoshkaBatchTopKSAE(16, 96, 3, dead_after=3),
    "gated": lambda: nn.GatedSAE(16, 96),
    "transcoder": lambda: nn.Transcoder(16, 12, 96, 3, dead_after=3),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients(kind: str, reentrant: bool, device: torch.device) -> None:
    """What a later call counts or steers is nothing to the recomputation of an earlier one."""
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(MODELS[kind]().to(device))
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        batches = []
        for index in range(7):
            x = torch.randn(8, 16, generator=generator).to(device) * (1 + index % 3)
            rest = (torch.randn(8, 12, generator=generator).to(device),) if kind == "transcoder" else ()
            batches.append((x, *rest))
        for model, checkpointed in zip(models, (False, True)):
            model.zero_grad()

            def loss(*batch: Tensor, model: Any = model) -> Tensor:
                return model.loss(*batch).loss

            if checkpointed and reentrant and kind not in ("step", "gated"):
                # Its two runs have nothing in common that the second could find.
                with pytest.raises(
                    RuntimeError, match=r"nn\.\w+: a checkpoint computes a call again .* use_reentrant=False"
                ):
                    checkpoint(loss, batches[0][0].requires_grad_(), *batches[0][1:], use_reentrant=True).backward()
                return
            losses = [
                checkpoint(loss, batch[0].requires_grad_(), *batch[1:], use_reentrant=reentrant)
                if checkpointed
                else loss(*batch)
                for batch in batches
            ]
            for term in losses[1::2] + losses[::2]:
                term.backward()
    for (name, want), got in zip(models[0].named_parameters(), models[1].parameters()):
        if want.grad is not None:
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-5, msg=name)
    for want, got in zip(models[0].buffers(), models[1].buffers()):
        assert torch.equal(got, want)


def test_what_was_not_seen_raises(device: torch.device) -> None:
    """Hooks of somebody else inside of a checkpoint hide it."""
    model = nn.TopKSAE(16, 96, 3, dead_after=1).to(device)

    def loss(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            found: Tensor = model.loss(x).loss
        return found * found

    out = checkpoint(loss, torch.randn(8, 16, device=device, requires_grad=True), use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"nn\.TopKSAE: a checkpoint computes a call again whose first run"):
        out.backward()

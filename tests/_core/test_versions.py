"""Steps of fused optimizers are counted as changes in place."""

from typing import Any

import pytest
import torch

from gossamer import gemm, rowsparse
from gossamer._core.versions import version_of

FUSED = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]


def _parameter(device: torch.device, grad: bool = True) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(5, 3, device=device))
    parameter.grad = torch.ones_like(parameter) if grad else None
    return parameter


@pytest.mark.parametrize("kind", FUSED)
def test_fused_steps_count(kind: Any, device: torch.device) -> None:
    """Of parameters that have a gradient: the others keep what follows them."""
    if kind is torch.optim.Adagrad and device.type == "cuda":
        pytest.skip("PyTorch has this on the CPU alone")
    followed, still = _parameter(device), _parameter(device, grad=False)
    optimizer = kind([followed, still], lr=0.1, fused=True)
    for _ in range(2):
        before = version_of(followed), version_of(still)
        optimizer.step()
        assert version_of(followed) > before[0] and version_of(still) == before[1]


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("options", [{}, {"fused": None}, {"foreach": True}, {"foreach": False}])
def test_other_steps_are_left_to_pytorch(kind: Any, options: dict[str, Any], device: torch.device) -> None:
    """Which counts them: the numbers are those without a hook."""
    followed, plain = _parameter(device), _parameter(device)
    optimizer, twin = kind([followed], lr=0.1, **options), kind([plain], lr=0.1, **options)
    version_of(followed)
    optimizer.step()
    type(twin).step.__wrapped__(twin)
    assert followed._version == plain._version > 0


def test_what_follows_a_parameter_sees_a_fused_step(device: torch.device) -> None:
    weight = torch.nn.Parameter(torch.randn(300, 16, device=device))
    with torch.no_grad():
        rows = gemm.linear_pack(torch.randn(4, 16, device=device), weight, capacity=1)
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.5, fused=True).step()
    with pytest.raises(RuntimeError, match="changed in place"):
        rowsparse.matmul(rows, torch.ones(300, 2, device=device))


def test_compiled_steps_stay_whole(device: torch.device) -> None:
    parameter = _parameter(device)
    version_of(parameter)
    optimizer = torch.optim.Adam([parameter], lr=0.1, fused=True)
    torch.compile(optimizer.step, backend="eager")()
    assert bool((parameter != 1).all())

"""Activations as values: what they hold, and what they refuse when they are made."""

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gossamer import gemm, sae
from gossamer.gemm.activations import ReLU, ReLU2, resolve

pytestmark = pytest.mark.native


def test_values() -> None:
    assert isinstance(gemm.BatchTopK(3), gemm.TopK) and gemm.BatchTopK(3).parameters.name == "batchtopk"
    jump = gemm.JumpReLU(torch.ones(4), bandwidth=0.5, ste_to_input=True)
    assert hash(jump) == hash(jump) and pickle.loads(pickle.dumps(jump)).bandwidth == 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        jump.bandwidth = 1.0  # type: ignore[misc]
    assert [resolve("f", name, (ReLU, ReLU2)) for name in ("relu", "relu2")] == [ReLU(), ReLU2()] != [ReLU2(), ReLU()]
    # A value of a class of its own is not one of ours: it may do something else.
    with pytest.raises(TypeError, match="activation must be"):
        resolve("f", type("Other", (), {})(), (ReLU,))


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: gemm.TopK(0), ValueError, "gemm.TopK: k must be at least 1, got 0"),
        (lambda: gemm.TopK(2.0), TypeError, "gemm.TopK: k must be an int, got float"),
        (lambda: gemm.GroupMax(0), ValueError, "gemm.GroupMax: k must be at least 1, got 0. It is the"),
        (lambda: gemm.BatchTopK(True), TypeError, "gemm.BatchTopK: k must be an int, got bool"),
        (lambda: gemm.TopK(2, torch.ones(3, 1)), ValueError, r"gemm.TopK: scale must have shape \[N\], got \[3, 1\]"),
        (lambda: gemm.BatchTopK(2, [1.0]), TypeError, "gemm.BatchTopK: scale must be a torch.Tensor, got list"),
        (lambda: gemm.JumpReLU(0.5), TypeError, "gemm.JumpReLU: threshold must be a torch.Tensor, got float"),
        (lambda: gemm.JumpReLU(torch.ones(2).int()), TypeError, "gemm.JumpReLU: threshold must be float32"),
        (lambda: gemm.JumpReLU(torch.ones(2, 2)), ValueError, r"threshold must have shape \[N\] or \[\], got \[2, 2\]"),
        (lambda: gemm.JumpReLU(torch.ones(2), 0.0), ValueError, "gemm.JumpReLU: bandwidth must be above 0"),
        (lambda: gemm.JumpReLU(torch.ones(2), "1"), TypeError, "gemm.JumpReLU: bandwidth must be a number, got str"),
        (lambda: gemm.ClampedSwiGLU(limit=0), ValueError, "gemm.ClampedSwiGLU: limit must be above 0 and finite"),
        (lambda: gemm.ClampedSwiGLU(alpha="1"), TypeError, "gemm.ClampedSwiGLU: alpha must be a number, got str"),
        (lambda: gemm.JumpReLU(torch.ones(2), ste_to_input=True), ValueError, "ste_to_input needs bandwidth"),
    ],
)
def test_errors(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_in_a_compiled_graph(compiled: Any) -> None:
    """Made inside, and handed in."""
    x, W = torch.randn(5, 8), torch.randn(8, 60)

    def inside(x: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
        kept = sae.encode(x, W, None, gemm.TopK(4)).to_dense()
        return kept + sae.encode(x, W, None, gemm.JumpReLU(threshold)).to_dense()

    threshold = torch.rand(60)
    torch.testing.assert_close(compiled(inside)(x, threshold), inside(x, threshold))
    outside = lambda x, activation: sae.encode(x, W, None, activation).to_dense()  # noqa: E731
    for activation in (gemm.JumpReLU(threshold), gemm.BatchTopK(3), gemm.GroupMax(6), "relu"):
        torch.testing.assert_close(compiled(outside)(x, activation), outside(x, activation))

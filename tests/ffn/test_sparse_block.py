"""What a module keeps of its block."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.ffn import SparseBlock
from tests.ffn.dense import METHODS, check, operands


def call(block: SparseBlock, a: dict[str, Tensor], activation: str = "relu") -> Tensor | None:
    weights = (a["gate"], a["gate_bias"], a["up"], a["up_bias"], a["down"], a["down_bias"])
    return block(a["x"], *weights, activation=activation)


@pytest.mark.native
def test_pinned_and_followed(device: torch.device, generator: torch.Generator) -> None:
    a = operands((20, 24, 300, 40), torch.float32, device, generator)
    block = SparseBlock()
    assert block.last_path is None
    for method in ("auto", *METHODS):
        block.method = method
        for _ in range(5):
            check(a, call(block, a))
        assert block.last_path in (METHODS if method == "auto" else (method,))
    # What is pinned follows nothing.
    known = block.density.rows.known(training=False)
    assert known is not None
    for _ in range(5):
        call(block, {**a, "x": 0 * a["x"]})
    assert block.density.rows.known(training=False) is known


@pytest.mark.native
def test_what_is_left_to_others(device: torch.device, generator: torch.Generator) -> None:
    a, block, seen = operands((3, 24, 300, 40), torch.float32, device, generator), SparseBlock(), []
    block.observer = seen.append
    assert call(block, a, "silu") is None
    a["x"].requires_grad_()
    for block.method in ("fused", "dense"):
        assert call(block, a) is None
    assert len(seen) == 2 and block.last_path is None
    block.method = "auto"
    assert call(block, a).requires_grad and len(seen) == 3 and block.last_path == "fused"
    with torch.no_grad():
        check(a, call(block, a))


@pytest.mark.native
def test_observed(device: torch.device, generator: torch.Generator) -> None:
    a, block = operands((3, 24, 300, 40), torch.float32, device, generator), SparseBlock("gather")
    seen: list[Any] = []
    block.observer = seen.append
    call(block, a)
    (operand,) = seen
    assert operand.x is a["x"] and operand.up_weight is a["up"] and operand.activation == "relu"


@pytest.mark.parametrize("m", [1, 5, 20])
def test_a_weight_stored_by_columns(m: int, device: torch.device, generator: torch.Generator) -> None:
    a, block = operands((m, 24, 300, 40), torch.float32, device, generator), SparseBlock()
    a["down"] = a["down"].t().contiguous().t()
    for block.method in METHODS:
        check(a, call(block, a))


@pytest.mark.parametrize("m", [1, 5, 40])
@pytest.mark.parametrize("method", METHODS)
def test_a_write_that_no_version_counts_is_seen(
    method: str, m: int, device: torch.device, generator: torch.Generator
) -> None:
    """Through `.data` in place, and to a new tensor at the address of the old one."""
    a, block = operands((m, 24, 300, 40), torch.float32, device, generator), SparseBlock(method)
    check(a, call(block, a))
    a["down"].data.mul_(1.5)
    check(a, call(block, a))
    a["down"].data = a["down"].data * 1.5
    check(a, call(block, a))


@pytest.mark.native
def test_copies_start_anew(device: torch.device, generator: torch.Generator) -> None:
    a, block = operands((20, 24, 300, 40), torch.float32, device, generator), SparseBlock("gather")
    block.observer = lambda operand: None
    call(block, a)
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert other.method == "gather" and other.observer is None
        check(a, call(other, a))


@pytest.mark.native
def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"^ffn\.SparseBlock: method must be one of auto, .*, got 'fast'"):
        SparseBlock("fast")
    block = SparseBlock(operator="nn.MLP")
    with pytest.raises(ValueError, match=r"^nn\.MLP: method must be one of auto, .*, got 'slow'"):
        block.method = "slow"
    assert block.method == "auto"

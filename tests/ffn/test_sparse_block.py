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
    assert call(block, a) is None and not seen and block.last_path is None
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
    assert block.copied_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 5])
def test_few_rows_read_the_copy_that_is_there(m: int, generator: torch.Generator) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    a, block = operands((40, 256, 520, 64), torch.bfloat16, device, generator), SparseBlock("gather")
    few = {**a, "x": a["x"][:m]}
    by_columns = call(SparseBlock("gather"), {**few, "down": a["down"].t().contiguous().t()})
    call(block, a)
    assert call(block, few).equal(by_columns)
    # If nothing notices the change, the copy is what is read; else the weight is.
    a["down"].data.zero_()
    assert call(block, few).equal(by_columns)
    torch.autograd.graph.increment_version(a["down"])
    check(few, call(block, few))


@pytest.mark.native
def test_copies_start_anew(device: torch.device, generator: torch.Generator) -> None:
    a, block = operands((20, 24, 300, 40), torch.float32, device, generator), SparseBlock("gather")
    block.observer = lambda operand: None
    call(block, a)
    assert block.copied_bytes == 300 * 40 * 4
    if device.type == "cuda":
        few = SparseBlock("gather")
        call(few, {**a, "x": a["x"][:3]})
        assert few.copied_bytes == 0
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert other.method == "gather" and other.observer is None and other.copied_bytes == 0
        check(a, call(other, a))


@pytest.mark.native
def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"^ffn\.SparseBlock: method must be one of auto, .*, got 'fast'"):
        SparseBlock("fast")
    block = SparseBlock(operator="nn.MLP")
    with pytest.raises(ValueError, match=r"^nn\.MLP: method must be one of auto, .*, got 'slow'"):
        block.method = "slow"
    assert block.method == "auto"

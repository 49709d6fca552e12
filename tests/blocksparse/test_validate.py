"""`blocksparse.validate` names all that is wrong."""

from dataclasses import replace

import pytest
import torch

from gossamer.blocksparse import BlockSparseTensor, Layout, adapt, from_dense, validate
from tests.blocksparse.blocks import random_layout

pytestmark = pytest.mark.native


def test_what_is_right_passes(device: torch.device) -> None:
    layout = random_layout((2,), (40, 50), (16, 32), device)
    x = from_dense(torch.ones(2, 40, 50, device=device), layout)
    validate()
    validate(x, layout, Layout.from_mask(layout.to_dense(), (16, 32), size=(40, 50)), x)
    # Equal blocks in two layouts: arithmetic refuses them, and takes what the error names.
    again = from_dense(x.to_dense(), Layout.from_mask(layout.to_dense(), (16, 32), size=(40, 50)))
    validate(x, adapt(again, layout))


def test_what_is_wrong_is_named(device: torch.device) -> None:
    mask = torch.tensor([[1, 0], [1, 1]], device=device)
    layout = Layout.from_mask(mask, 16)
    x = from_dense(torch.ones(32, 32, device=device), layout)
    wrong = replace(layout, buffer=layout.buffer.clone())
    wrong.col_indices.copy_(layout.col_indices.flip(0))
    cases = [
        ((Layout.from_mask(mask, 16, capacity=2),), "operand 0: 3 blocks are present, but there is room for 2"),
        ((x, wrong), "operand 1: col_indices of the layout do not belong to its blocks"),
        ((x, Layout.from_mask(mask, 32)), "operand 1: its blocks are 32 x 32, those of operand 0 16 x 16. Use adapt"),
        ((x, Layout.from_mask(mask.T, 16)), "operand 1: it has 1 blocks that operand 0 lacks, and lacks 1"),
        ((x, Layout.from_mask(mask[:1], 16)), r"operand 1: it is of \[16, 32\] elements, operand 0 of \[32, 32\]"),
        ((x, from_dense(torch.ones(32, 32, device=device).half(), layout)), "operand 1: its values are float16, those"),
        ((x, BlockSparseTensor(x.values, Layout.from_mask(mask, 16))), "operand 1: it has the blocks of .* of its own"),
    ]
    for operands, line in cases:
        with pytest.raises(ValueError, match=f"1 thing is wrong.\n- {line}"):
            validate(*operands)
    with pytest.raises(ValueError, match=r"2 things are wrong.\n- operand 1: col_.*\n- operand 2: its blocks"):
        validate(x, wrong, Layout.from_mask(mask, 32))
    with pytest.raises(TypeError, match="operand 0 must be a BlockSparseTensor or a Layout, got Tensor"):
        validate(mask)

"""`blocksparse.validate` names all that is wrong."""

from dataclasses import replace

import pytest
import torch

from gossamer.blocksparse import BlockSparseTensor, Layout, adapt, from_dense, matmul, validate
from tests.blocksparse.blocks import random_layout

pytestmark = pytest.mark.native


def test_what_is_right_passes(device: torch.device) -> None:
    layout = random_layout((2,), (40, 50), (16, 32), device)
    x = from_dense(torch.ones(2, 40, 50, device=device), layout)
    validate()
    validate(x, layout, Layout.from_mask(layout.to_dense(), (16, 32), size=(40, 50)), x)
    validate(x, random_layout((3,), (10, 20), (16, 32), device), same_layout=False)
    # Equal blocks in two layouts: arithmetic refuses them, and takes what the error names.
    again = from_dense(x.to_dense(), Layout.from_mask(layout.to_dense(), (16, 32), size=(40, 50)))
    validate(x, again, same_layout=False)
    validate(x, adapt(again, layout))


def test_factors(device: torch.device) -> None:
    a, b = (
        from_dense(torch.ones(size, device=device), Layout.full((2, 2), block, size=size, device=device))
        for size, block in (((32, 64), (16, 32)), ((64, 32), (32, 16)))
    )
    validate(a, b, a, product=True)
    matmul(a, b)
    with pytest.raises(ValueError, match=r"its blocks are 32 x 16, .*Use adapt; of factors say product=True"):
        validate(a, b, same_layout=False)
    lines = [
        "- operand 1: it has 32 rows, operand 0 64 columns. They meet in a product.",
        "- operand 1: its blocks are 16 high, those of operand 0 32 wide. Use adapt.",
        r"- operand 2: its leading dimensions are \[3\], those of operand 1 \[\]. Use repeat.",
        "- operand 2: its values are float16, those of operand 0 float32.",
    ]
    c = Layout.full((3, 2, 2), (32, 16), device=device)
    c = from_dense(torch.ones(c.dense_shape, device=device).half(), c)
    with pytest.raises(ValueError, match="4 things are wrong.\n" + "\n".join(lines)):
        validate(a, a, c, product=True)


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
        ((x, BlockSparseTensor(x.values, Layout.from_mask(mask, 16))), "operand 1: it has the blocks of .* as objects"),
    ]
    for operands, line in cases:
        with pytest.raises(ValueError, match=f"1 thing is wrong.\n- {line}"):
            validate(*operands)
    with pytest.raises(ValueError, match=r"2 things are wrong.\n- operand 1: col_.*\n- operand 2: its blocks"):
        validate(x, wrong, Layout.from_mask(mask, 32))
    with pytest.raises(TypeError, match="operand 0 must be a BlockSparseTensor or a Layout, got Tensor"):
        validate(mask)

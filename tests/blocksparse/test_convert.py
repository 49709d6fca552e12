"""BSR tensors and FlexAttention's block masks, there and back."""

import pytest
import torch

from gossamer.blocksparse import (
    BlockSparseTensor,
    Layout,
    attention,
    from_block_mask,
    from_dense,
    from_sparse_bsr,
    to_block_mask,
    to_sparse_bsr,
)
from tests.blocksparse.blocks import random_blocks, random_layout

pytestmark = [pytest.mark.native, pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")]


def equal_rows(device: torch.device, lead: tuple[int, ...] = (2, 2)) -> Layout:
    """Matrices of different blocks, but equally many."""
    generator = torch.Generator(device).manual_seed(0)
    order = torch.rand(*lead, 12, device=device, generator=generator).argsort(-1)
    return Layout.from_mask((order < 5).view(*lead, 3, 4), (16, 32), capacity=30)


@pytest.mark.parametrize("lead", [(), (3,), (2, 2)], ids=str)
def test_bsr_there_and_back(lead: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    layout = equal_rows(device, lead)
    x = random_blocks(layout, dtype).requires_grad_()
    bsr = to_sparse_bsr(from_dense(x, layout))
    assert bsr.layout is torch.sparse_bsr and torch.equal(bsr.to_dense(), x)
    back = from_sparse_bsr(bsr)
    assert torch.equal(back.layout.to_dense(), layout.to_dense()) and torch.equal(back.to_dense(), x)
    grad = torch.randn_like(x)
    (got,) = torch.autograd.grad(back.to_dense(), x, grad)
    named = from_dense(torch.ones_like(x), layout).to_dense() > 0
    assert torch.equal(got, torch.where(named, grad, 0))


@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
def test_from_pytorchs_bsr(density: float, device: torch.device) -> None:
    layout = random_layout((), (48, 64), (16, 16), device, density=density)
    x = random_blocks(layout, torch.float32)
    blocks = from_sparse_bsr(x.to_sparse_bsr((16, 16)))
    assert torch.equal(blocks.to_dense(), x) and torch.equal(blocks.layout.to_dense(), layout.to_dense())


def test_bsr_errors(device: torch.device) -> None:
    with pytest.raises(TypeError, match=r"from_sparse_bsr: x must be of layout sparse_bsr, got strided"):
        from_sparse_bsr(torch.ones(2, 2))
    with pytest.raises(ValueError, match="from_sparse_bsr: block_size must be 16, 32, 64 or 128"):
        from_sparse_bsr(torch.eye(8, device=device).to_sparse_bsr((4, 4)))
    uneven = from_dense(
        torch.ones(2, 32, 32, device=device),
        Layout.from_mask(torch.tensor([[[1, 0]] * 2, [[1, 1]] * 2]).to(device), 16),
    )
    with pytest.raises(ValueError, match="matrices of x must have equally many blocks, got 2 to 4"):
        to_sparse_bsr(uneven)
    cut = from_dense(torch.ones(20, 20), Layout.from_mask(torch.ones(2, 2).bool(), 16, size=(20, 20)))
    with pytest.raises(ValueError, match="x must be of whole blocks of 16 x 16"):
        to_sparse_bsr(cut)
    short = Layout.from_mask(torch.ones(2, 2).bool(), 16, capacity=3)
    with pytest.raises(ValueError, match="x must not have overflowed: 4 blocks, room for 3"):
        to_sparse_bsr(BlockSparseTensor(torch.ones(3, 16, 16), short))


@pytest.mark.parametrize("lead", [(), (3,), (2, 2)], ids=str)
def test_block_mask_there_and_back(lead: tuple[int, ...], device: torch.device) -> None:
    layout = random_layout(lead, (200, 300), (64, 128), device)
    for mask_mod in (None, lambda b, h, q, k: q >= k):
        mask = to_block_mask(layout, mask_mod)
        assert mask.shape == (*(*lead, 1, 1)[:2], 200, 300)
        assert mask.full_kv_num_blocks is None or not mask.kv_num_blocks.any()
        back = from_block_mask(mask, capacity=100)
        assert back.size == (200, 300) and torch.equal(back.to_dense().reshape(layout.shape), layout.to_dense())
    mask_mods_columns = mask.q_num_blocks.sum()
    assert mask_mods_columns == layout.nnz


def test_flex_attention_takes_it(device: torch.device) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    layout = random_layout((1, 2), (256, 256), (128, 128), device, density=0.7, seed=2)
    q, k, v = torch.randn(3, 1, 2, 256, 16, device=device)
    named = from_dense(torch.ones(1, 2, 256, 256, device=device), layout).to_dense() > 0
    for mask_mod, seen in ((None, named), (lambda b, h, q, k: q >= k, named.tril())):
        out = flex_attention(q, k, v, block_mask=to_block_mask(layout, mask_mod))
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        rows = seen.any(-1, keepdim=True)
        torch.testing.assert_close(torch.where(rows, out, 0), torch.where(rows, want, 0), rtol=1e-4, atol=1e-4)


def test_block_mask_errors() -> None:
    with pytest.raises(TypeError, match="from_block_mask: mask must be a BlockMask of FlexAttention's, got Layout"):
        from_block_mask(Layout.full((1, 1), 16))
    with pytest.raises(TypeError, match=r"to_block_mask: layout must be a blocksparse\.Layout"):
        to_block_mask(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"to_block_mask: layout must be \(B, H, rows, cols\) at most"):
        to_block_mask(Layout.from_mask(torch.ones(1, 1, 1, 2, 2).bool(), 16))


@pytest.mark.parametrize(
    "crow, col",
    [([0, 2, 2], [1, 0]), ([0, 2, 3], [1, 0, 1]), ([0, 3, 3], [0, 1, 0])],
    ids=["unsorted", "unsorted first row", "repeated"],
)
def test_bsr_in_any_order(crow: list[int], col: list[int], device: torch.device) -> None:
    """Block columns stand in any order, and blocks of one place add up."""
    values = torch.arange(1.0, len(col) + 1, device=device)[:, None, None].expand(-1, 16, 16).clone().requires_grad_()
    given = torch.tensor(crow), torch.tensor(col), values
    x = torch.sparse_bsr_tensor(*given, size=(32, 32), device=device, check_invariants=False)
    blocks = from_sparse_bsr(x)
    want = torch.zeros(32, 32, device=device)
    for row in range(2):
        for k in range(crow[row], crow[row + 1]):
            want[16 * row : 16 * row + 16, 16 * col[k] : 16 * col[k] + 16] += values[k].detach()
    assert torch.equal(blocks.to_dense(), want)
    assert torch.equal(blocks.layout.to_dense(), want[::16, ::16] != 0)
    if len(set(col)) == len(col):
        # PyTorch itself has no gradient of a BSR tensor's values where one place has two blocks.
        (grad,) = torch.autograd.grad(blocks.to_dense().sum(), values)
        assert torch.equal(grad, torch.ones_like(values))


@pytest.mark.parametrize(
    "crow, col", [([0, 1, 1], [0, 1]), ([1, 1, 2], [0, 1]), ([0, 2, 1], [0, 1]), ([0, 1, 2], [0, 2])]
)
def test_bsr_that_breaks_its_rules(crow: list[int], col: list[int], device: torch.device) -> None:
    values = torch.ones(2, 16, 16, device=device)
    given = torch.tensor(crow, device=device), torch.tensor(col, device=device), values
    x = torch.sparse_bsr_tensor(*given, size=(32, 32), check_invariants=False)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"from_sparse_bsr: (crow|col)_indices of x must"):
            from_sparse_bsr(x)
    else:
        blocks = from_sparse_bsr(x)
        assert blocks.values[: int(blocks.layout.nnz)].isnan().all()


@pytest.mark.parametrize("lead", [(1, 1), (2, 3)], ids=str)
def test_mask_mods_cut_partial_blocks(lead: tuple[int, int], device: torch.device) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    document = torch.arange(300, device=device).div(70, rounding_mode="floor")

    def takes(b, h, q, k):
        return ((q - k <= 50 + 9 * h) & (q >= k) & (document[q] == document[k])) | (k < b)

    mask = create_block_mask(takes, *lead, 300, 300, device=str(device), BLOCK_SIZE=64)
    want = create_mask(takes, *lead, 300, 300, device=str(device))
    for capacity in (None, 160):
        layout = from_block_mask(mask, capacity=capacity)
        assert torch.equal(layout.element_mask(), want)
        back = to_block_mask(layout)
        assert torch.equal(create_mask(back.mask_mod, *lead, 300, 300, device=str(device)), want)
        assert int(back.full_kv_num_blocks.sum()) == int(layout.nnz) - int(
            (layout.elements[: layout.capacity] > 0).sum()
        )
    whole = from_block_mask(mask, elements=False)
    assert whole.elements is None and torch.equal(whole.to_dense(), layout.to_dense())
    q, k, v = torch.randn(3, lead[0], lead[1], 300, 16, device=device)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=want)
    torch.testing.assert_close(attention(q, k, v, layout), dense, rtol=1e-4, atol=1e-4)

"""On the CPU layouts that leave nothing out, or later keys alone, are plain attention, and no other layout is."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import blocksparse
from gossamer.blocksparse import Layout
from gossamer.blocksparse._torch import attention as cpu
from gossamer.blocksparse.records import BlocksparseAttention

pytestmark = pytest.mark.native
T, BLOCK = 80, 16


def found(layout: Layout, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> bool | None:
    form = layout.form
    call = BlocksparseAttention(q, k, v, None, None, None, None, layout.buffer, form, (0, 0), causal, 0.25, 0, None)
    return cpu.leaves_nothing_out(cpu.Attention(call))


def operands(t: int = T) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, heads, t, 16, generator=generator).requires_grad_() for heads in (4, 2, 2))


def lower(offset: int = 0) -> Layout:
    return Layout.from_mask(torch.ones(T // BLOCK, T // BLOCK).tril(offset).bool(), BLOCK)


def with_hole(layout: Layout, row: int, col: int) -> Layout:
    mask = layout.to_dense().clone()
    mask[row, col] = False
    return Layout.from_mask(mask, BLOCK)


CASES = {
    "full": (lambda: lower(9), False, False),
    "full, causal": (lambda: lower(9), True, True),
    "lower triangle, causal": (lower, True, True),
    "lower triangle": (lower, False, None),
    "a block above the diagonal, causal": (lambda: lower(1), True, True),
    "a block above the diagonal": (lambda: lower(1), False, None),
    "pattern": (lambda: blocksparse.causal((T, T), BLOCK), False, True),
    "pattern, causal": (lambda: blocksparse.causal((T, T), BLOCK), True, True),
    "pattern of an odd length": (lambda: blocksparse.causal((T - 7, T - 7), BLOCK), False, True),
    "pattern of whole blocks": (lambda: blocksparse.causal((T, T), BLOCK, elements=False), False, None),
    "window": (lambda: blocksparse.sliding_window((T, T), BLOCK, (20, 0)), True, None),
    "wide window": (lambda: blocksparse.sliding_window((T, T), BLOCK, (T, 0)), False, True),
    "window without its last key": (lambda: blocksparse.sliding_window((T, T), BLOCK, (T - 2, 0)), True, None),
    "a hole": (lambda: with_hole(lower(9), 3, 1), False, None),
    "a hole, causal": (lambda: with_hole(lower(), 3, 1), True, None),
    "a hole above the diagonal, causal": (lambda: with_hole(lower(9), 1, 3), True, True),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_plain_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, causal, wanted = CASES[name]
    layout = make()
    q, k, v = operands(layout.size[0])
    assert found(layout, causal, q, k, v) is wanted
    results = []
    for _ in range(2):
        out = blocksparse.attention(q, k, v, layout, causal=causal)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        # Then by blocks.
        monkeypatch.setattr(cpu, "leaves_nothing_out", lambda given: None)
    for ours, by_blocks in zip(*results):
        assert ours.stride() == by_blocks.stride()
        torch.testing.assert_close(ours, by_blocks, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("turned", range(4))
def test_operands_by_columns(turned: int) -> None:
    layout, given = blocksparse.causal((T, T), BLOCK), [x.detach() for x in operands()]
    given.append(torch.randn(2, 4, T, 16, generator=torch.Generator().manual_seed(1)))
    results = []
    for _ in range(2):
        *qkv, grad = given
        leaves = [x.requires_grad_() for x in qkv]
        out = blocksparse.attention(*leaves, layout)
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
        given = [x.detach().clone() for x in given]
        # Every second column of a tensor whose other columns are NaN.
        wide = torch.full((*given[turned].shape[:-1], 32), torch.nan)
        wide[..., ::2] = given[turned]
        given[turned] = wide[..., ::2]
    for ours, contiguous in zip(*results):
        torch.testing.assert_close(ours, contiguous, rtol=1e-6, atol=1e-6)


def test_a_nan_reaches_its_own_blocks_alone() -> None:
    q, k, v = (x.detach() for x in operands())
    v[:, :, -1] = torch.nan
    out = blocksparse.attention(q, k, v, blocksparse.causal((T, T), BLOCK))
    assert bool(out[:, :, :-BLOCK].isfinite().all()) and bool(out[:, :, -1].isnan().all())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name, calls", [("pattern", 1), ("full, causal", 1), ("window", 0)])
def test_whole_layouts_call_the_operator_of_pytorch(
    name: str, calls: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in the forward pass, and once in the backward pass."""
    seen, forward = [], "_scaled_dot_product_flash_attention_for_cpu"
    for operator in (forward, f"{forward}_backward"):
        plain = getattr(torch.ops.aten, operator)

        def counted(*args: Any, operator: str = operator, plain: Any = plain, **kwargs: Any) -> Any:
            seen.append(operator)
            return plain(*args, **kwargs)

        monkeypatch.setattr(torch.ops.aten, operator, counted)
    q, k, v = operands()
    out = blocksparse.attention(q, k, v, CASES[name][0](), causal=causal)
    assert seen == [forward] * calls
    out.sum().backward()
    assert seen == [forward, f"{forward}_backward"] * calls
    seen.clear()
    blocksparse.attention(q, k, v, CASES[name][0](), causal=causal, dropout=0.5)
    assert not seen


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_any_scale(scale: float) -> None:
    """PyTorch's operator on a CPU gives NaN below a diagonal, where it scales the mask too."""
    q, k, v = operands()
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    mask = torch.ones(T, T).bool().tril()
    wanted = ((q @ keys.mT) * scale).masked_fill(~mask, -torch.inf).softmax(-1) @ values
    for layout, causal in ((CASES["pattern"][0](), False), (Layout.full((5, 5), BLOCK), True)):
        torch.testing.assert_close(blocksparse.attention(q, k, v, layout, causal=causal, scale=scale), wanted)

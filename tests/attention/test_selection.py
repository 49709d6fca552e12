"""`Selection` against dense masks."""

import io
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer._core.ops import INTERPRET
from gossamer.attention import AdaptiveK, Selection

SHAPES = [(2, 3, 130, 77), (1, 1, 1, 200), (1, 2, 64, 64), (1, 1, 65, 1)]


def random_mask(shape: tuple[int, ...], density: float, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.rand(shape, generator=generator) < density).to(device)


@pytest.mark.parametrize("density", [0.0, 0.03, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_mask_comes_back(shape: tuple[int, ...], density: float, device: torch.device) -> None:
    mask = random_mask(shape, density, device)
    selection = Selection.from_mask(mask)
    assert torch.equal(selection.to_mask(), mask)
    assert (selection.num_queries, selection.num_keys) == shape[2:]


def test_the_bit_of_a_query_in_the_word_of_a_key(device: torch.device) -> None:
    mask = torch.zeros(1, 70, 3, dtype=torch.bool, device=device)
    mask[0, 63, 1] = mask[0, 0, 1] = mask[0, 69, 2] = True
    words = Selection.from_mask(mask).words
    assert words.tolist() == [[[[0, 1 - (1 << 63), 0], [0, 0, 1 << 5]]]]


def test_indices_in_any_order_repeated_and_masked(device: torch.device) -> None:
    indices = torch.tensor([[[4, 0, 4, -1], [2, 1, -1, -1]]], device=device)
    taken = torch.tensor([[[True, True, True, True], [True, False, True, True]]], device=device)
    selection = Selection.from_indices(indices, 6, taken)
    got, mask = selection.to_indices()
    assert got.tolist() == [[[[0, 4], [2, -1]]]]
    assert mask.tolist() == [[[[True, True], [True, False]]]]
    assert selection.to_indices(1)[0].tolist() == [[[[0], [2]]]]


def test_indices_come_back(device: torch.device) -> None:
    mask = random_mask((2, 2, 70, 50), 0.2, device)
    selection = Selection.from_mask(mask)
    indices, _ = selection.to_indices()
    assert torch.equal(Selection.from_indices(indices, 50).words, selection.words)


@pytest.mark.native
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("scopes", [1, 2])
def test_flex_attention_sees_the_same_keys(scopes: int, block_size: int, device: torch.device) -> None:
    mask = random_mask((2, scopes, 130, 200), 0.02, device)
    mask[:, :, :128, 64:192] = True
    mask[0, :, :, 192:] = False
    block_mask = Selection.from_mask(mask).to_block_mask(block_size)
    b, h, q, k = torch.meshgrid(*(torch.arange(n, device=device) for n in mask.shape), indexing="ij")
    assert torch.equal(block_mask.mask_mod(b, h, q, k), mask)
    rows, columns = (-(-n // block_size) for n in (130, 200))
    padded = torch.zeros(2, scopes, rows * block_size, columns * block_size, dtype=torch.bool, device=device)
    padded[:, :, :130, :200] = mask
    taken = padded.view(2, scopes, rows, block_size, columns, block_size).sum((3, 5)).cpu()
    for i, (nums, found) in enumerate(
        ((block_mask.kv_num_blocks, block_mask.kv_indices), (block_mask.full_kv_num_blocks, block_mask.full_kv_indices))
    ):
        full = taken == block_size**2
        wanted = full if i else (taken > 0) & ~full
        held = torch.arange(columns) < nums[..., None].cpu()
        got = torch.zeros_like(wanted).scatter_(3, found.cpu().long(), held)
        assert torch.equal(got, wanted)


@pytest.mark.native
def test_a_block_mask_takes_little_memory() -> None:
    """No tensor on the way has a number for each of the 2^26 pairs."""

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            made = [x.nbytes for x in _pytree.tree_leaves(out) if isinstance(x, Tensor)]
            self.seen = max(self.seen, *made, 0)
            return out

    t = 8192
    selection = Selection(torch.ones(1, 1, t // 64, t, dtype=torch.int64), t)
    with Largest() as largest:
        selection.to_block_mask()
    assert 0 < largest.seen <= selection.words.nbytes


@pytest.mark.native
def test_it_crosses_a_compiled_region_and_devices(compiled: object, device: torch.device) -> None:
    mask = random_mask((1, 1, 70, 30), 0.2, device)
    selection = Selection.from_mask(mask)
    assert torch.equal(compiled(lambda s: s.to_mask())(selection), mask)  # type: ignore[operator]
    leaves, spec = _pytree.tree_flatten(selection)
    assert len(leaves) == 1 and torch.equal(_pytree.tree_unflatten(leaves, spec).to_mask(), mask)
    assert torch.equal(selection.to("cpu").to_mask(), mask.cpu())


@pytest.mark.native
def test_save_load_and_repr(device: torch.device) -> None:
    """Plain `torch.load` reads it, and a rule for how many keys a query takes."""
    mask = random_mask((2, 1, 70, 30), 0.2, device)
    rule = AdaptiveK("variance", 2, 8, 16, mean=torch.tensor(0.02))
    file = io.BytesIO()
    torch.save({"selection": Selection.from_mask(mask), "rule": rule}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    selection, again = loaded["selection"], loaded["rule"]
    assert torch.equal(selection.to_mask(), mask) and selection.num_queries == 70
    assert (again.rule, again.k_min, again.k_base, again.k_max) == ("variance", 2, 8, 16) and again.mean == rule.mean
    assert repr(selection.to("cpu")) == "Selection(batch=2, scopes=1, num_queries=70, num_keys=30, device=cpu)"


@given(
    batch=st.integers(0, 2), scopes=st.integers(1, 3), tq=st.integers(0, 140), tk=st.integers(0, 90),
    density=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)  # fmt: skip
def test_conversions(batch: int, scopes: int, tq: int, tk: int, density: float) -> None:
    """Mask, indices and words say the same."""
    device = torch.device("cuda" if torch.cuda.is_available() and not INTERPRET else "cpu")
    mask = random_mask((batch, scopes, tq, tk), density, device)
    selection = Selection.from_mask(mask)
    assert torch.equal(selection.to_mask(), mask)
    found, there = selection.to_indices()
    assert int(there.sum()) == int(mask.sum()) and bool(((found >= 0) == there).all())
    assert torch.equal(Selection.from_indices(found.flip(-1), tk).words, selection.words)


@pytest.mark.native
def test_bad_input(device: torch.device) -> None:
    mask = torch.ones(1, 3, 4, dtype=torch.bool, device=device)
    with pytest.raises(TypeError, match=r"Selection.from_mask: mask must be bool, .* got float32"):
        Selection.from_mask(mask.float())
    with pytest.raises(ValueError, match=r"Selection.from_mask: mask must have shape .* got \[3, 4\]"):
        Selection.from_mask(mask[0])
    with pytest.raises(TypeError, match="indices must be int32 or int64, got float32"):
        Selection.from_indices(mask.float(), 4)
    with pytest.raises(ValueError, match=r"indices must lie in \[0, Tk\) with Tk = 4"):
        Selection.from_indices(torch.tensor([[[4]]]), 4)
    with pytest.raises(ValueError, match="block_size must be a multiple of 64, got 32"):
        Selection.from_mask(mask).to_block_mask(32)
    good = Selection.from_mask(mask)
    with pytest.raises(ValueError, match=r"words must have shape .* = 2, got \[1, 1, 1, 4\]"):
        Selection(good.words, 65)
    with pytest.raises(TypeError, match="words must be int64, got int32"):
        Selection(good.words.int(), 3)


@pytest.mark.parametrize("tq, tk, heads", [(130, 200, 1), (256, 256, 2), (40, 300, 1)])
def test_from_block_mask(tq: int, tk: int, heads: int, device: torch.device) -> None:
    """FlexAttention's own, with partial and full blocks, and back from what to_block_mask makes."""
    from torch.nn.attention.flex_attention import create_block_mask

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q + 20 * h >= k) & (k % 7 > b)

    made = create_block_mask(near, 2, heads, tq, tk, device=str(device), BLOCK_SIZE=64)
    b, h, q, k = (torch.arange(n, device=device) for n in (2, heads, tq, tk))
    wanted = near(b[:, None, None, None], h[:, None, None], q[:, None], k)
    found = Selection.from_block_mask(made)
    assert torch.equal(found.to_mask(), wanted)
    assert torch.equal(Selection.from_block_mask(found.to_block_mask(64)).words, found.words)
    whole = create_block_mask(lambda b, h, q, k: q >= 0, None, None, tq, tk, device=str(device))
    assert bool(Selection.from_block_mask(whole).to_mask().all())
    with pytest.raises(TypeError, match=r"block_mask must be a BlockMask .* got Tensor. A dense mask goes to"):
        Selection.from_block_mask(wanted)  # type: ignore[arg-type]

"""What repeats Hopper's attention launches as the first call of a shape did, of other tensors."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gossamer.blocksparse import Layout
from gossamer.blocksparse._gluon import attention, attention_backward, attention_order
from gossamer.blocksparse._torch.attention import BlocksparseAttention, BlocksparseAttentionBwd
from gossamer.blocksparse._triton import attention_backward as general

pytestmark = pytest.mark.native

Launch = tuple[tuple[int, ...], list[Any]]


class Compiled:
    """A kernel that is launched into a list."""

    function, packed_metadata = 0, ()

    def __init__(self, launches: list[Launch]) -> None:
        self._launches = launches

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def first(*args: Any, num_warps: int, num_stages: int, maxnreg: int | None = None, **meta: Any) -> Any:
            self._launches.append((grid, [*args, *meta.values()]))
            return self

        return first

    def run(self, x: int, y: int, z: int, stream: int, *args: Any) -> None:
        self._launches.append(((x, y, z), list(args[5:])))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    found: list[Launch] = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    kernels = (
        attention._attention_fwd_kernel,
        attention_order._attention_order_kernel,
        general._attention_stats_kernel,
    )
    for kernel in (*kernels, attention_backward._attention_dq_kernel, attention_backward._attention_dkdv_kernel):
        monkeypatch.setattr(kernel, "_compiled", {})
        monkeypatch.setattr(kernel, "fn", Compiled(found))
    yield found


def told(launch: Launch, names: dict[int, str]) -> Any:
    """A launch with its tensors by name."""

    def of(x: Any) -> Any:
        if isinstance(x, Tensor):
            return names.get(x.data_ptr(), "new")
        if isinstance(x, int) and x in names:
            return names[x]
        if hasattr(x, "block_shape"):
            fields = {name: y for name, y in vars(x).items() if name not in ("base", "kind")}
            return of(x.base), repr(fields)
        # A heap may begin low; no size or stride here is that large.
        return "new" if isinstance(x, int) and x > 1 << 22 else x

    grid, args = launch
    return grid, [of(x) for x in args]


@pytest.mark.parametrize("causal, sorts", [(False, True), (False, False), (True, True)])
def test_the_same_launches(launches: list[Launch], causal: bool, sorts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_order, "ordered", lambda total, *_: 3 if sorts else 0)
    layout, other = (Layout.full((2, 1, 5, 3), (64, 128), size=(300, 300)) for _ in range(2))
    settings = layout.form, (1, 0), causal, 0.125

    def tensors() -> dict[str, Tensor]:
        made = {name: torch.empty(2, 300, h, 64).bfloat16().transpose(1, 2) for name, h in (("q", 4), ("k", 2))}
        made |= {"v": torch.empty_like(made["k"]), "grad": torch.empty_like(made["q"])}
        return made | {"out": torch.empty_like(made["q"]), "lse": torch.empty(2, 4, 300)}

    def names(given: dict[str, Tensor], of: Layout) -> dict[int, str]:
        lists = of.row_offsets, of.col_indices, of.row_indices, of.col_offsets, of.transpose_order, of.positions
        found = {tensor.data_ptr(): name for name, tensor in given.items()}
        return found | {tensor.data_ptr(): f"list {i}" for i, tensor in enumerate(lists)}

    one, two = tensors(), tensors()
    qkv = [(t["q"], t["k"], t["v"]) for t in (one, two)]
    none = None, None, None, None
    call = BlocksparseAttention(*qkv[0], *none, layout.buffer, *settings)
    *results, again = attention.launch_attention_fwd(call)
    assert again is not None
    repeated = again(0, *qkv[1], other.buffer.data_ptr())
    for a, b in zip(results, repeated, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    stats, bound = general.attention_stats(one["out"], one["grad"], one["lse"], None)
    assert bound is not None
    bound(0, two["out"].data_ptr(), two["grad"].data_ptr(), two["lse"].data_ptr(), None, stats.data_ptr())
    split = len(launches)
    towards = one["grad"], None, one["out"], one["lse"]
    back = BlocksparseAttentionBwd(*towards, *qkv[0], *none, layout.buffer, *settings, False, False)
    *results, again = attention_backward.launch_attention_bwd(back, one["grad"], stats)
    count = len(launches) - split
    assert again is not None and count == (4 if sorts and not causal else 2)
    repeated = again(0, *qkv[1], two["grad"], stats, other.buffer)
    for a, b in zip(results, repeated, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    assert len(launches) == 4 + 2 * count
    firsts, seconds = [*launches[0:4:2], *launches[4 : 4 + count]], [*launches[1:4:2], *launches[4 + count :]]
    # The order of the lines is made before each kernel, and named by the kernel it is for.
    for a, b in zip(firsts, seconds, strict=True):
        assert told(a, names(one, layout)) == told(b, names(two, other))


def test_copies_are_not_repeated(launches: list[Launch]) -> None:
    """What had to be copied is another tensor in each call, and lengths make copies of keys and values."""
    layout = Layout.full((2, 1, 1, 1), (64, 128), size=(64, 64))
    q, k, v = (torch.empty(2, 2, 64, 64).bfloat16() for _ in range(3))
    crooked = torch.empty(2, 2, 64, 65).bfloat16()[..., :64]
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    for q_given, given in ((crooked, None), (q, lengths)):
        call = BlocksparseAttention(
            q_given, k, v, None, None, None, given, layout.buffer, layout.form, (1, 0), False, 0.125
        )  # fmt: skip
        *_, again = attention.launch_attention_fwd(call)
        assert again is None

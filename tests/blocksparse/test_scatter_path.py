"""The choice of the path of `blocksparse.scatter`, and scatters along columns."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.blocksparse import BlockSparseTensor, Layout, from_dense, scatter
from gossamer.blocksparse.indexed import choose_path
from gossamer.blocksparse.lists import Form
from gossamer.blocksparse.records import BlocksparseScatterReduce, Direction
from gossamer.testing import assert_close
from tests.blocksparse.blocks import dense_index, elements, native, random_blocks, random_index, random_layout
from tests.blocksparse.test_scatter_reduce import expected
from tests.graphs import follows


@pytest.mark.native
@pytest.mark.parametrize("axis, path", [(0, "matrices"), (1, "transposed")])
def test_which_way(axis: int, path: str) -> None:
    index, layout = torch.empty(1, 64, 64, device="meta"), torch.empty(0, device="meta")
    form = Form(1, 1, 1, 64, 64, 64, 64, 1)
    call = BlocksparseScatterReduce(
        None, index, index, layout, form, layout, form, Direction(axis), "sum", True, torch.float32
    )
    assert choose_path(call) == path


@pytest.mark.native
@pytest.mark.parametrize(
    "n, reduce, src, out, path",
    [
        (16384, "sum", torch.bfloat16, torch.float32, "shared"),
        (16385, "sum", torch.float32, torch.float32, "lines"),
        (64, "last", torch.float32, torch.float32, "lines"),
        (64, "amax", torch.int64, torch.int64, "lines"),
        (64, "sum", None, torch.int32, "lines"),  # counts
    ],
)
def test_rows_on_hopper(n: int, reduce: str, src, out, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer._core.tuning.hopper", lambda _: True)
    index, layout = torch.empty(1, 64, 64, device="meta"), torch.empty(0, device="meta")
    form = Form(1, 1, 257, 64, 64, 64, n, 1)
    given = None if src is None else index.to(src)
    call = BlocksparseScatterReduce(None, given, index, layout, form, layout, form, Direction(2), reduce, True, out)
    assert choose_path(call) == path
    monkeypatch.setattr("gossamer._core.tuning.hopper", lambda _: False)
    assert choose_path(call) == "lines"


@pytest.mark.kernels
@pytest.mark.parametrize("reduce", ["sum", native("mean"), native("prod")])
def test_close_to_float64(reduce: str, dtype: torch.dtype, device: torch.device) -> None:
    layout = random_layout((2,), (40, 33), (16, 32), device)
    other = random_layout((2,), (64, 30), (16, 32), device, seed=1, density=0.8)
    x, src = random_blocks(layout, dtype), random_blocks(other, dtype, seed=1)
    index = random_index(other, 40)
    at, named = dense_index(index, 40), elements(layout)
    first, second = (scatter(from_dense(x, layout), 1, index, from_dense(src, other), reduce) for _ in range(2))
    assert torch.equal(first.values, second.values)
    want, plain = (
        expected(x.to(kind) * named, named, 1, at, src.to(kind) * elements(other), reduce, True)
        for kind in (torch.float64, dtype)
    )
    assert_close(first.to_dense(), reference64=want, plain=plain, factor=4.0)


@pytest.mark.kernels
def test_room_behind_the_last_block_and_lost_blocks(device: torch.device) -> None:
    """Zeros where there is room; NaN everywhere where blocks are lost, of the result or of index."""
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]], device=device)
    layouts = {capacity: Layout.from_mask(mask, 16, capacity=capacity) for capacity in (3, 6)}
    dense = torch.arange(32, device=device)[:, None].expand(32, 48) // 2
    for a, b in itertools.product(layouts.values(), repeat=2):
        index, src = from_dense(dense, b), BlockSparseTensor(torch.ones(b.capacity, 16, 16, device=device), b)
        for held in (a, BlockSparseTensor(torch.ones(a.capacity, 16, 16, device=device), a)):
            out = scatter(held, 0, index, src, "sum").values
            if 3 in (a.capacity, b.capacity):
                assert out.isnan().all()
                continue
            want = torch.zeros(32, 48, device=device).scatter_add(0, dense, src.to_dense())
            want += 0 if held is a else held.to_dense()
            assert torch.equal(out, from_dense(want, a).values)


@pytest.mark.kernels
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_indices_that_name_nothing(kind: torch.dtype, device: torch.device) -> None:
    """Numbers of 64 bits are narrowed: what lies beyond 32 must not come back as a row."""
    layout = Layout.from_mask(torch.ones(1, 1, device=device).bool(), 16)
    index = torch.arange(16, device=device, dtype=kind)[:, None].expand(16, 16).contiguous()
    index[3, 4], index[5, 6], index[7, 8] = 16, -2, -1
    index[9, 1], index[9, 2] = torch.iinfo(kind).max, torch.iinfo(kind).min
    if kind is torch.int64:
        index[9, 3], index[9, 4], index[9, 5] = (1 << 32) + 5, 1 << 31, -(1 << 32)
    src = from_dense(torch.ones(16, 16, device=device), layout)
    out = scatter(layout, 0, from_dense(index, layout), src, "sum")
    assert torch.equal(out.to_dense() == 1, index == torch.arange(16, device=device)[:, None])


@pytest.mark.gpu
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_capture(reduce: str, device: torch.device) -> None:
    """A graph of transposing follows indices and source."""
    layout, other = (random_layout((2,), size, (32, 16), device) for size in ((40, 70), (96, 70)))
    index = from_dense(torch.randint(-1, 40, other.dense_shape, device=device), other)
    src = from_dense(random_blocks(other, torch.float32), other)
    follows(lambda: [scatter(layout, -2, index, src, reduce).values], index.values, src.values)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("dim", [-1, -2])
def test_more_than_2_to_the_31_elements(dim: int) -> None:
    """Columns are transposed: all of the last block goes to its last place."""
    device = torch.device("cuda")
    last_place(Layout.full((9, 128, 128), 128, device=device), dim)


@pytest.mark.parametrize("dim", [-1, -2])
def test_all_to_the_last_place(dim: int, device: torch.device) -> None:
    """What the GPU is asked of more elements."""
    last_place(Layout.full((2, 2, 2), 16, device=device), dim)


def last_place(layout: Layout, dim: int) -> None:
    block = layout.block_size[0]
    shape = layout.capacity, block, block
    src = BlockSparseTensor(torch.zeros(shape, dtype=torch.float16, device=layout.device), layout)
    src.values[-1] = 1
    places = torch.full(shape, layout.size[0] - 1, dtype=torch.int32, device=layout.device)
    out = scatter(layout, dim, BlockSparseTensor(places, layout), src, "sum")
    assert (out.values[-1].select(dim, -1) == block).all() and out.values.count_nonzero() == block


@pytest.mark.kernels
@settings(max_examples=4)
@given(data=st.data())
def test_property(data: st.DataObject) -> None:
    """Any shape, block and density; small integers, whose sums are exact."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    block = data.draw(st.sampled_from([(16, 16), (32, 16), (16, 64)]))
    lead = data.draw(st.lists(st.integers(0, 3), max_size=2).map(tuple))
    m, n, m_index = (data.draw(st.integers(0, 40)) for _ in range(3))
    n_index = data.draw(st.integers(0, n))
    density = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    layout = random_layout(lead, (m, n), block, device, density=density)
    other = random_layout(lead, (m_index, n_index), block, device, seed=1, density=density)
    x, src = (random_blocks(at, torch.float32, integers=True) for at in (layout, other))
    index = random_index(other, m)
    out = scatter(from_dense(x, layout), -2, index, from_dense(src, other), "sum").to_dense()
    want = expected(x, elements(layout), len(lead), dense_index(index, m), src, "sum", True)
    assert torch.equal(out, want)

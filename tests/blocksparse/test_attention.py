"""`blocksparse.attention` against dense float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gossamer._core import tuning
from gossamer.blocksparse import (
    BlockSparseTensor,
    Layout,
    Relative,
    attention,
    attention_path,
    documents,
    from_dense,
    global_tokens,
    sliding_window,
)
from tests.blocksparse.attention_oracle import check, elements, problem, terms_for
from tests.blocksparse.blocks import native
from tests.graphs import follows
from tests.strategies import seeded

SHAPES = [
    # leading dimensions of the layout, block, (Tq, Tk), (H, Hk), D
    ((), (16, 16), (48, 48), (1, 1), 16),
    ((2,), (16, 32), (40, 70), (2, 1), 20),
    ((2, 1), (32, 16), (33, 50), (2, 2), 8),
    ((2, 2), (64, 64), (64, 130), (2, 2), 32),
    ((1, 4), (16, 16), (16, 90), (4, 2), 5),
    ((2,), (16, 32), (70, 40), (2, 1), 8),
]


@pytest.mark.parametrize("lead, block, size, heads, d", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_error_budget(lead, block, size, heads, d, causal: bool, dtype: torch.dtype, device: torch.device) -> None:
    check(*problem(device, dtype, lead, block, size, heads, d), causal=causal)


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_empty_and_full_layouts(density: float, dtype: torch.dtype, device: torch.device) -> None:
    check(*problem(device, dtype, (2,), (16, 16), (40, 40), (2, 2), 16, density=density))


HOPPER = [
    # block, (Tq, Tk), (H, Hk), D: what its own kernels take
    ((64, 64), (300, 300), (4, 4), 64),
    ((128, 128), (500, 711), (4, 2), 128),
    ((64, 128), (700, 650), (4, 1), 72),
    ((128, 64), (333, 901), (2, 2), 40),
]


@pytest.mark.gpu
@pytest.mark.parametrize("block, size, heads, d", HOPPER, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_hopper(block, size, heads, d, causal: bool, dtype: torch.dtype, device: torch.device) -> None:
    """In 16 bits on Hopper; elsewhere the general kernels take the same."""
    given = problem(device, dtype, (2, heads[0]), block, size, heads, d, density=0.4)
    check(*given, causal=causal)
    check(*given, causal=causal, lengths=torch.tensor([size[1] - 77, 130], device=device))
    projected = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given[:4]]
    check(*projected, given[4], causal=causal)


@pytest.mark.full
@pytest.mark.native
@pytest.mark.parametrize("density", [0.0, 0.02, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("height", [16, 32, 64, 128])
@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("d", [8, 24, 128])
def test_wide_grid(height: int, width: int, density: float, d: int, dtype: torch.dtype, device: torch.device) -> None:
    given = problem(device, dtype, (2, 1), (height, width), (3 * height - 5, 4 * width - 7), (4, 2), d, density)
    check(*given, causal=d % 3 == 0, lengths=torch.tensor([2 * width + 1, 3 * width], device=device))


@pytest.mark.parametrize("block", [(16, 16), native((64, 64))], ids=str)
def test_more_queries_than_keys(block, dtype: torch.dtype, device: torch.device) -> None:
    """Query i stands at the position Tk - Tq + i; queries in front of the first key meet none."""
    given = problem(device, dtype, (2, 1), block, (100, 70), (2, 1), 16, density=0.9)
    for lengths in ([70, 41], [3, 0]):
        check(*given, causal=True, lengths=torch.tensor(lengths, device=device))
    out = attention(*given[:3], given[4], causal=True, lengths=torch.tensor([41, 0], device=device))
    assert not out[0, :, :30].any() and out[0, :, 70].any() and not out[1].any()


def test_lengths_scale_and_room(dtype: torch.dtype, device: torch.device) -> None:
    lengths = torch.tensor([37, 0], device=device)
    given = problem(device, dtype, (2, 2), (16, 16), (40, 50), (2, 2), 16, capacity=60)
    check(*given, lengths=lengths, scale=-0.3)
    check(*given, lengths=lengths, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True])
def test_graph_capture(half: bool, device: torch.device) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    q, k, v, grad, layout = problem(device, dtype, (2,), (64, 64), (256, 256), (2, 2), 64)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> tuple[Tensor, ...]:
        out = attention(*leaves, layout, causal=True)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    follows(step, q, grad)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("half", [False, True])
def test_more_than_2_31_elements(half: bool, device: torch.device) -> None:
    """The last of so many heads are as they would be alone."""
    heads, length, d = (131, 1 << 18, 64) if half else (130, 1 << 17, 128)
    dtype = torch.bfloat16 if half else torch.float32
    layout = Layout.from_mask(torch.eye(length // 128, device=device).bool(), 128)
    q = torch.randn(1, heads, length, d, device=device, dtype=dtype).requires_grad_()
    assert q.numel() > 1 << 31
    out = attention(q, q, q, layout)
    (grad,) = torch.autograd.grad(out, q, out.detach())
    alone = q.detach()[:, -1:].clone().requires_grad_()
    wanted = attention(alone, alone, alone, layout)
    assert torch.equal(out[:, -1:], wanted)
    assert torch.equal(grad[:, -1:], torch.autograd.grad(wanted, alone, wanted.detach())[0])


def test_compressed_operands(device: torch.device) -> None:
    """Absent blocks of q, k and v are zeros; gradients reach the values of those present."""
    *_, layout = problem(device, torch.float32, (), (16, 16), (40, 50), (2, 2), 32)
    g = torch.Generator(device).manual_seed(3)
    given = []
    for t in (40, 50, 50):
        present = torch.rand(2, 2, -(-t // 16), 2, device=device, generator=g) < 0.6
        x = torch.randn(2, 2, t, 32, device=device, generator=g)
        values = from_dense(x, Layout.from_mask(present, 16, size=(t, 32)))
        given.append(BlockSparseTensor(values.values.detach().requires_grad_(), values.layout))
    out = attention(*given, layout)
    plain = [x.to_dense().detach().requires_grad_() for x in given]
    assert torch.equal(out, attention(*plain, layout))
    out.square().sum().backward()
    attention(*plain, layout).square().sum().backward()
    for x, other in zip(given, plain):
        assert torch.equal(x.values.grad, from_dense(other.grad, x.layout).values)


def test_masks_and_biases_of_blocks(device: torch.device) -> None:
    """As block-sparse tensors they do what the dense ones do."""
    q, k, v, _, layout = problem(device, torch.float32, (), (16, 16), (40, 50), (2, 2), 32)
    g = torch.Generator(device).manual_seed(3)
    mask = torch.rand(layout.dense_shape, device=device, generator=g) < 0.7
    bias = torch.randn(layout.dense_shape, device=device, generator=g)
    wanted = attention(q, k, v, layout, mask=mask, bias=bias)
    blocks = {"mask": from_dense(mask, layout), "bias": from_dense(bias, layout)}
    torch.testing.assert_close(attention(q, k, v, layout, **blocks), wanted)
    torch.testing.assert_close(attention(q, k, v, layout, mask=blocks["mask"], bias=bias), wanted)
    alone = attention(q, k, v, layout, mask=blocks["mask"])
    assert not torch.equal(alone, wanted)


def test_a_dense_bias_of_the_shape_of_blocks_is_dense(device: torch.device) -> None:
    """One block, with room for as many as there are heads: [capacity, height, width] is [H, Tq, Tk] as well."""
    q, k, v = (torch.randn(1, 4, 16, 8, device=device) for _ in range(3))
    layout = Layout.from_mask(torch.ones(1, 1, dtype=torch.bool, device=device), 16, capacity=4)
    bias, mask = torch.randn(4, 16, 16, device=device), torch.rand(4, 16, 16, device=device) < 0.7
    for given in ({"bias": bias}, {"mask": mask}):
        wide = {name: x[None] for name, x in given.items()}
        assert torch.equal(attention(q, k, v, layout, **given), attention(q, k, v, layout, **wide))


def test_padding_behind_a_length_is_not_read(device: torch.device) -> None:
    """Keys behind a length may be anything, in a tile that other keys share."""
    q, k, v, grad, layout = problem(device, torch.float32, (2,), (16, 64), (40, 128), (2, 2), 16, density=1)
    lengths = torch.tensor([70, 3], device=device)
    behind = (torch.arange(128, device=device) >= lengths[:, None])[:, None, :, None]
    wanted = attention(q, k.masked_fill(behind, 0), v.masked_fill(behind, 0), layout, lengths=lengths)
    leaves = [x.requires_grad_() for x in (q, k.masked_fill(behind, math.nan), v.masked_fill(behind, math.inf))]
    out = attention(*leaves, layout, lengths=lengths)
    assert torch.equal(out, wanted)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad)
    assert bool(dq.isfinite().all())
    for x in (dk, dv):
        assert bool(x.isfinite().all()) and bool((x.masked_select(behind.expand_as(x)) == 0).all())


PROBLEM = attention_path.Problem(1, 16, 16, 8192, 8192, 64, 64, (False, True), (64, 64), False, 0.125)


@pytest.mark.parametrize(
    "change, dtype, plain, path",
    [
        ({}, torch.bfloat16, True, "hopper"),
        ({"d": 128, "dv": 128, "block": (128, 64)}, torch.float16, True, "hopper"),
        ({}, torch.float32, True, "tiles"),
        ({}, torch.bfloat16, False, "tiles"),
        ({"d": 68, "dv": 68}, torch.bfloat16, True, "tiles"),
        ({"d": 136, "dv": 136}, torch.bfloat16, True, "tiles"),
        ({"dv": 128}, torch.bfloat16, True, "tiles"),
        ({"scale": -0.1}, torch.bfloat16, True, "tiles"),
        ({"block": (64, 32)}, torch.bfloat16, True, "tiles"),
        ({"tq": 1}, torch.bfloat16, True, "split"),
    ],
)
def test_choose_path(change, dtype: torch.dtype, plain: bool, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_path, "INTERPRET", False)
    monkeypatch.setattr(tuning, "programs", lambda device: 132)
    device = torch.device("cpu")
    for hopper in (True, False):
        monkeypatch.setattr(tuning, "hopper", lambda device, hopper=hopper: hopper)
        wanted = path if hopper or path == "split" else "tiles"
        assert attention_path.path_for(replace(PROBLEM, **change), dtype, device, plain) == wanted


WIDTHS = [
    # leading dimensions of the layout, block, (Tq, Tk), (H, Hk), D, Dv
    ((2, 1), (16, 32), (40, 70), (4, 2), 24, 16),
    ((), (16, 16), (48, 40), (2, 1), 5, 40),
    ((1, 2), (64, 64), (70, 130), (2, 2), 48, 32),
]


@pytest.mark.parametrize("lead, block, size, heads, d, dv", WIDTHS, ids=str)
def test_values_of_another_width(lead, block, size, heads, d, dv, dtype: torch.dtype, device: torch.device) -> None:
    """As in multi-head latent attention; alone, and beside a bias, relative positions and lengths."""
    given = problem(device, dtype, lead, block, size, heads, d, dv=dv)
    check(*given, causal=True)
    tq, tk = size
    bias = torch.randn(1, heads[0], tq, tk, device=device, dtype=dtype).requires_grad_()
    lengths = torch.tensor([tk - 7, tk], device=device)
    check(*given, bias=bias, lengths=lengths, terms=terms_for(device, dtype, tq, tk, d, heads[0])[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1024, 1024), (3, 8192)], ids=str)
@pytest.mark.parametrize("d, dv", [(192, 128), (128, 64), (64, 256)])
def test_values_of_another_width_at_full_size(d: int, dv: int, size, dtype: torch.dtype, device: torch.device) -> None:
    check(*problem(device, dtype, (2, 1), (64, 64), size, (4, 2), d, dv=dv), causal=True)


def test_few_queries_meet_many_keys(dtype: torch.dtype, device: torch.device, scale: int) -> None:
    """Their keys are split on the GPU and in the interpreter."""
    check(*problem(device, dtype, (), (16, 64), (3, 1200 * scale), (1, 1), 16, density=0.9), causal=True)


@pytest.mark.parametrize("size", [(40, 50), (32, 48)], ids=str)
@pytest.mark.parametrize("dims", [(1, 2), (2, 3)], ids=str)
def test_any_strides(dims: tuple[int, int], size: tuple[int, int], device: torch.device) -> None:
    """As projections leave them, and with columns apart; also where blocks divide the sizes, and nothing is padded."""
    *given, grad, layout = problem(device, torch.float32, (2,), (16, 16), size, (2, 2), 16)
    arranged = [x.transpose(*dims).contiguous().transpose(*dims) for x in (*given, grad)]
    results = []
    for *leaves, towards in ((*given, grad), arranged):
        leaves = [x.requires_grad_() for x in leaves]
        out = attention(*leaves, layout)
        results.append((out, *torch.autograd.grad(out, leaves, towards)))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_overflow_gives_nan(device: torch.device) -> None:
    q, k, v, _, layout = problem(device, torch.float32, (2,), (16, 16), (40, 50), (2, 2), 16, capacity=3)
    assert bool(layout.overflowed)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, layout, return_lse=True)
    assert bool(out.isnan().all() and lse.isnan().all())
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert bool(grad.isnan().all())
    term = terms_for(device, torch.float32, 40, 50, 16, 2)[0]
    added = [term.table.requires_grad_(), torch.zeros(2, 1, 40, 50, device=device, requires_grad=True)]
    out = attention(*leaves, layout, relative=term, bias=added[1])
    for grad in torch.autograd.grad(out.sum(), added):
        assert bool(grad.isnan().all())


def test_special_values(device: torch.device) -> None:
    """NaN and Inf reach the queries that meet them, and no other."""
    q, k, v, _, layout = problem(device, torch.float32, (), (16, 16), (48, 48), (1, 1), 16)
    met = elements(layout, 2, 1)
    query, key = (int(x) for x in met[0, 0].nonzero()[-1] - 11)
    q[0, 0, query, 3] = math.nan
    v[0, 0, key, 7] = math.inf
    out, lse = attention(q, k, v, layout, return_lse=True)
    alone = torch.arange(48, device=device) == query
    assert bool((lse[0, 0].isnan() == alone).all()) and bool(out[0, 0, query].isnan().all())
    reached = met[0, 0, :, key] & ~alone
    assert reached.any()
    assert bool((out[0, 0, :, 7].isposinf() == reached).all())
    assert bool(out[1].isfinite().all())


@pytest.mark.parametrize("d, dv", [(0, 4), (4, 0)])
def test_no_columns(d: int, dv: int, device: torch.device) -> None:
    """Of q and k: the mean of the values; or of v: the log-sum-exp, whose gradients reach q and k."""
    q, k, v, grad, layout = problem(device, torch.float32, (), (16, 16), (32, 32), (2, 1), d, 1.0, dv=dv)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, layout, return_lse=True)
    s = q @ k.transpose(2, 3) * max(d, 1) ** -0.5
    torch.testing.assert_close(out, s.softmax(-1) @ v)
    torch.testing.assert_close(lse, s.logsumexp(-1))
    ours = torch.autograd.grad([out, lse], leaves, [grad, lse.detach()])
    want = torch.autograd.grad([s.softmax(-1) @ v, s.logsumexp(-1)], leaves, [grad, lse.detach()])
    for a, b in zip(ours, want):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("b, h, tq, tk, d", [(0, 2, 8, 8, 4), (2, 2, 0, 8, 4), (2, 2, 8, 0, 4), (1, 1, 8, 8, 0)])
def test_empty_input(b: int, h: int, tq: int, tk: int, d: int, device: torch.device) -> None:
    layout = Layout.from_mask(torch.ones(-(-tq // 16), -(-tk // 16), device=device).bool(), 16, size=(tq, tk))
    q = torch.randn(b, h, tq, d, device=device, requires_grad=True)
    k = torch.randn(b, h, tk, d, device=device, requires_grad=True)
    out, lse = attention(q, k, k, layout, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    assert bool((out == 0).all()) and bool((lse == (math.log(tk) if tk else -math.inf)).all())
    out.sum().backward()
    assert bool((q.grad == 0).all() and (k.grad == 0).all())


@pytest.mark.native
def test_compiles(compiled, device: torch.device) -> None:
    q, k, v, grad, layout = problem(device, torch.float32, (2,), (16, 16), (40, 50), (2, 2), 16)
    term = terms_for(device, torch.float32, 40, 50, 16, 2)[1]
    leaves = [x.requires_grad_() for x in (q, k, v, term.table)]

    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor, layout: Layout) -> Tensor:
        relative = Relative(table, term.query_positions, term.key_positions)
        return attention(q, k, v, layout, relative=relative, causal=True)

    ours = torch.autograd.grad(compiled(call)(*leaves, layout), leaves, grad)
    for a, b in zip(ours, torch.autograd.grad(call(*leaves, layout), leaves, grad)):
        torch.testing.assert_close(a, b)


def test_the_dispatcher_gives_lists(device: torch.device) -> None:
    q, k, v, _, layout = problem(device, torch.float32, (2,), (16, 16), (40, 50), (2, 2), 16)
    settings = [list(layout.form), [0, 1], True, 0.25, 0, None]
    out, _ = torch.ops.gossamer.blocksparse_attention(q, k, v, None, None, None, None, layout.buffer, *settings)
    assert torch.equal(out, attention(q, k, v, layout, causal=True))


@pytest.mark.native
def test_autocast(device: torch.device) -> None:
    q, k, v, _, layout = problem(device, torch.float32, (2,), (16, 16), (40, 50), (2, 2), 16)
    with torch.autocast(device.type, torch.bfloat16):
        out = attention(q, k, v, layout)
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), layout))


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"layout": torch.ones(2, 2)}, TypeError, "layout must be a Layout of blocksparse, got Tensor"),
        ({"q": torch.ones(2, 32, 8)}, ValueError, r"q and k must have shape \[B, H, T, D\]"),
        ({"k": torch.ones(1, 2, 32, 4), "v": torch.ones(1, 2, 32, 4)}, ValueError, "with B = 1 and D = 8 like q"),
        ({"v": torch.ones(1, 2, 31, 8)}, ValueError, r"v must have shape \[B, Hk, Tk, Dv\] .* got \[1, 2, 31, 8\]"),
        ({"q": torch.ones(1, 3, 32, 8)}, ValueError, "heads of k must divide the 3 heads of q, got 2"),
        ({"q": torch.ones(1, 2, 33, 8)}, ValueError, "layout must be of 33 x 32 elements like q and k, got 32 x 32"),
        ({"q": torch.ones(1, 2, 32, 8).half()}, TypeError, "q, k and v must have one dtype, got float16, float32"),
        ({"mask": torch.ones(32, 32)}, TypeError, "mask must be bool, True takes part, got float32"),
        ({"bias": torch.ones(3, 32)}, ValueError, r"bias must broadcast to .* = \[1, 2, 32, 32\]"),
        (
            {"relative": Relative(torch.ones(3, 5, 8), torch.arange(32), torch.arange(32))},
            ValueError,
            r"table of relative must have shape \[H or 1, R, D\] with H = 2 and D = 8 like q, got \[3, 5, 8\]",
        ),
        (
            {"relative": [Relative(torch.ones(1, 5, 8), torch.arange(31), torch.arange(32))]},
            ValueError,
            r"query_positions of relative must have shape \[Tq\] or \[B, Tq\] = \[1, 32\], got \[31\]",
        ),
        (
            {"relative": Relative(torch.ones(1, 5, 8).half(), torch.arange(32), torch.arange(32))},
            TypeError,
            "table of relative must have the dtype of q, float32, got float16",
        ),
        ({"relative": torch.ones(5, 8)}, TypeError, "relative must hold blocksparse.Relative terms, got Tensor"),
        (
            {"bias": from_dense(torch.ones(48, 32), Layout.from_mask(torch.ones(3, 2).bool(), 16))},
            ValueError,
            r"bias must be of \[32, 32\] elements like layout, got \[48, 32\]",
        ),
        (
            {"mask": from_dense(torch.ones(48, 32) > 0, Layout.from_mask(torch.ones(3, 2).bool(), 16))},
            ValueError,
            r"mask must be of \[32, 32\] elements like layout, got \[48, 32\]",
        ),
        ({"scale": math.inf}, ValueError, "scale must be a finite number, got inf"),
        ({"lengths": torch.ones(3).int()}, ValueError, r"lengths must have shape \[B\]"),
        ({"lengths": torch.ones(3)}, TypeError, "lengths must be int32 or int64, got float32"),
        (
            {"layout": Layout.from_mask(torch.ones(3, 2, 2).bool(), 16)},
            ValueError,
            r"broadcast to \[B, H\] = \[1, 2\], got \[3\]",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change, error: type[Exception], message: str) -> None:
    q, k, v = torch.ones(3, 1, 2, 32, 8)
    arguments = {"q": q, "k": k, "v": v, "layout": Layout.from_mask(torch.ones(2, 2).bool(), 16), **change}
    with pytest.raises(error, match=f"blocksparse.attention: .*{message}"):
        attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), arguments.pop("layout"), **arguments)


PATTERNS = {
    "window": lambda size, block, **given: sliding_window(size, block, (40, 3), **given),
    "dilated": lambda size, block, **given: sliding_window(size, block, (70, 0), dilation=3, **given),
    "window and globals": lambda size, block, **given: sliding_window(size, block, (9, 0), **given).union(
        global_tokens(size, block, 3, **given)
    ),
    "documents": lambda size, block, device, **given: documents(
        size, block, torch.tensor([0, 21, 40, 66, 140], device=device), **given
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(
    "block, size, heads, d", [((16, 16), (48, 48), (2, 1), 16), ((16, 32), (40, 70), (1, 1), 20)], ids=str
)
def test_patterns_are_exact(name, block, size, heads, d, dtype: torch.dtype, device: torch.device) -> None:
    q, k, v, grad, _ = problem(device, dtype, (), block, size, heads, d)
    check(q, k, v, grad, PATTERNS[name](size, block, device=device))
    lengths = torch.tensor([size[1] - 9, 17], device=device)
    check(q, k, v, grad, PATTERNS[name](size, block, lengths=lengths[:, None], device=device))


def test_patterns_beside_all_else(dtype: torch.dtype, device: torch.device) -> None:
    """Elements of blocks of which a line has two words, a diagonal and lengths, a bias and relative positions."""
    block, size, heads, d = (32, 64), (70, 100), (2, 1), 8
    q, k, v, grad, _ = problem(device, dtype, (), block, size, heads, d)
    layout = PATTERNS["window and globals"](size, block, device=device)
    check(q, k, v, grad, layout, causal=True, lengths=torch.tensor([91, 17], device=device))
    bias = torch.randn(1, 2, *size, device=device, generator=seeded(5, device)).to(dtype).requires_grad_()
    check(q, k, v, grad, layout, bias=bias)
    blocks = torch.randn(layout.capacity, *block, device=device, generator=seeded(6, device)).to(dtype).requires_grad_()
    check(
        q, k, v, grad, layout, bias=blocks, dense_bias=lambda x: BlockSparseTensor(x, layout).to_dense(),
        terms=terms_for(device, dtype, *size, d, heads[0]),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("block, size, heads, d", HOPPER, ids=str)
def test_patterns_on_hopper(name, block, size, heads, d, dtype: torch.dtype, device: torch.device) -> None:
    q, k, v, grad, _ = problem(device, dtype, (), block, size, heads, d)
    layout = PATTERNS[name](size, block, device=device)
    check(q, k, v, grad, layout)
    lengths = torch.tensor([size[1] - 77, 130], device=device)
    check(q, k, v, grad, layout, causal=True, lengths=lengths)
    check(q, k, v, grad, PATTERNS[name](size, block, lengths=lengths[:, None], device=device))

"""`select_topk` against a stable sort of the scores that the same backend stores."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from gossamer._core.ops import INTERPRET
from gossamer.attention import AdaptiveK, Selection, indexer_scores, select_topk, sparse_attention
from gossamer.attention._torch import select_topk as cpu
from gossamer.attention._torch.indexer_scores import gates_of
from gossamer.attention.levels import LEVELS, ZERO
from gossamer.attention.records import SelectTopk
from tests.attention.indexer import dense, inputs, visible
from tests.graphs import follows

NO_SCORE, KEPT = 0, 31744
# B, Hi, Tq, Tk, Di, causal, lengths
CASES = [
    (1, 2, 40, 140, 16, True, None),
    (2, 3, 18, 130, 20, True, [130, 50]),
    (2, 1, 5, 300, 64, True, [300, 3]),
    (1, 9, 20, 90, 64, False, None),
    (1, 1, 1, 1, 1, True, None),
    (2, 9, 3, 150, 20, True, [150, 40]),
]


def stored(
    case: tuple[Any, ...], q: Tensor, k: Tensor, w: Tensor, bias: Tensor | None, activation: str = "sigmoid"
) -> Tensor:
    """The keys [B, Tq, Tk] that the backend under test stores for scores, 0 where a query does not see."""
    b, _, tq, tk, d, causal, lengths = case
    seen = visible(case).to(q.device)
    if not (q.is_cuda or INTERPRET):
        wide = torch.promote_types(q.dtype, torch.float32)
        gates, bias = gates_of(w.to(wide), activation), None if bias is None else bias.to(wide)
        rows = [cpu.index_keys(q[i].to(wide), k[i].to(wide), gates[i], bias, d**-0.5, activation) for i in range(b)]
        return torch.stack(rows).where(seen, NO_SCORE)
    from gossamer.attention._triton import select_topk as gpu

    lengths = None if lengths is None else torch.tensor(lengths, device=q.device)
    given = (q, k, w, None if bias is None else bias.float(), lengths, None, None, 1, 1, 1, "", 1.0, d**-0.5, causal)
    call = gpu._Call(SelectTopk(*given, window=0, sinks=0, workspace=0, granularity=1, activation=activation))
    slab = gpu.Slab(0, b * call.padded, gpu.round_up(tk, gpu.COLUMNS))
    keys = torch.zeros(slab.rows, slab.columns, dtype=torch.int16, device=q.device)
    call.score(slab, keys)
    return keys.view(b, call.padded, slab.columns)[:, :tq, :tk].long().where(seen, NO_SCORE)


def sorted_first(keys: Tensor, seen: Tensor, k: Tensor | int, window: int = 0, sinks: int = 0) -> Tensor:
    """Mask [B, 1, Tq, Tk] of the first k in a stable descending sort, the always-kept first of all."""
    n = seen.sum(-1, keepdim=True)
    columns = torch.arange(keys.shape[2], device=keys.device)
    keys = torch.where((columns < sinks) | (columns >= n - window), KEPT, keys).where(seen, -1)
    order = torch.sort(keys, dim=-1, descending=True, stable=True).indices
    k = k[..., None] if isinstance(k, Tensor) else k
    first = (columns < k).expand_as(order)
    return (torch.zeros_like(seen).scatter_(2, order, first) & seen)[:, None]


def lengths_of(case: tuple[Any, ...], device: torch.device) -> Tensor | None:
    return None if case[6] is None else torch.tensor(case[6], device=device)


KEPT_TOO = [pytest.param(case, 4, 3, marks=[] if case in CASES[2:3] else pytest.mark.full) for case in CASES]


@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
@pytest.mark.parametrize("case, window, sinks", [*((case, 0, 0) for case in CASES), *KEPT_TOO])
def test_it_is_a_stable_sort(
    case: tuple[Any, ...], window: int, sinks: int, activation: Any, dtype: torch.dtype, device: torch.device
) -> None:
    q, k, w, bias = inputs(case, dtype, device)
    # Runs of equal keys: the k-th has ties nearly everywhere.
    k = k.repeat_interleave(4, 1)[:, : case[3]]
    options = {"causal": case[5], "lengths": lengths_of(case, device), "window": window, "sinks": sinks}
    found = select_topk(q, k, w, bias, k=25, activation=activation, **options)
    wanted = sorted_first(stored(case, q, k, w, bias, activation), visible(case).to(device), 25, window, sinks)
    assert torch.equal(found.to_mask(), wanted)


def test_stored_scores_are_the_scores(dtype: torch.dtype, device: torch.device) -> None:
    case = (2, 3, 40, 60, 32, True, None)
    q, k, w, bias = inputs(case, dtype, device)
    total = w.double().sigmoid().sum(-1, keepdim=True)
    wanted = dense(q.double(), k.double(), w.double(), bias.double(), 32**-0.5) / total * LEVELS + 1
    off = (stored(case, q, k, w, bias) - wanted).where(visible(case).to(device), 0).abs().max()
    assert off <= 1.5


@pytest.mark.parametrize("dtype", [torch.float32])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e4])
def test_stored_scores_of_a_relu(size: float, dtype: torch.dtype, device: torch.device) -> None:
    """Keys are those of numbers of 9 bits and an exponent, of either sign, down to 2^-9 of the sum of |w|."""
    case = (2, 3, 40, 60, 32, True, None)
    q, k, w, _ = inputs(case, dtype, device)
    found = stored(case, q * size, k, w, None, "relu") - ZERO
    scores = dense(q.double() * size, k.double(), w.double(), None, 32**-0.5, "relu")
    scores = scores / w.double().abs().sum(-1, keepdim=True)
    assert bool((scores < -0.01 * size).any()) and bool((scores > 0.01 * size).any()) and bool((scores == 0).any())
    # The octave of |x| + 1/512, and 512 equal steps in it.
    fraction, octave = torch.frexp(scores.abs() + 2.0**-9)
    wanted = ((octave + 8) * 512 + (fraction - 0.5) * 1024) * scores.sign()
    seen = visible(case).to(device)
    assert (found - wanted).where(seen, 0).abs().max() <= 0.51 and not found[seen & (scores == 0)].any()


def test_ties_at_zero_and_scores_below(device: torch.device) -> None:
    """Zeros of a ReLU are equal: the first ones are taken, and above those scores below 0 whose weight is negative."""
    q, k = torch.ones(1, 1, 3, 16, device=device), -torch.ones(1, 300, 16, device=device)
    k[0, [7, 290]] = torch.tensor([[2.0], [1.0]], device=device)
    weights = torch.tensor([[[1.0], [-1.0], [0.0]]], device=device)
    taken = select_topk(q, k, weights, None, k=4, activation="relu").to_indices()[0]
    assert taken[0, 0].tolist() == [[0, 1, 7, 290], [0, 1, 2, 3], [0, 1, 2, 3]]
    least = select_topk(q, k, weights, None, k=299, activation="relu").to_mask()[0, 0]
    assert least[1].logical_not().nonzero().tolist() == [[7]]


@pytest.mark.parametrize("activation, least", [("relu", 1e-36), ("sigmoid", -85.0)])
def test_weights_whose_sum_has_no_inverse(activation: Any, least: float, device: torch.device) -> None:
    """All scores are equal then, and none is NaN."""
    q, k, w, _ = inputs((1, 2, 3, 200, 16), torch.float32, device)
    taken = select_topk(q, k, torch.full_like(w, least), None, k=4, activation=activation).to_indices()[0]
    assert taken[0, 0].tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.kernels
def test_many_sequences_of_few_queries(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Queries are programs of the first axis, the only one that takes more than 65,535."""
    from gossamer.attention._triton import select_topk as gpu

    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(gpu, "_index_keys_of_few_kernel", lambda grid, *args, **options: grids.append(grid))
    q, k, w, _ = inputs((16384, 8, 4, 8, 16), torch.float32, device)
    given = (q, k, w, None, None, None, None, 1, 1, 1, "", 1.0, 0.25, True, 0, 0, 0, 1, "sigmoid")
    call = gpu._Call(SelectTopk(*given))
    slab = gpu.Slab(0, 16384 * call.padded, gpu.COLUMNS)
    call.score(slab, torch.empty(0, dtype=torch.int16, device=device))
    assert len(grids) == 1 and grids[0][0] == 65536 and max(grids[0][1:]) < 65536


def test_beyond_its_range_a_relu_saturates_and_nan_ranks_highest(device: torch.device) -> None:
    q, w = torch.ones(1, 1, 1, 16, device=device), torch.ones(1, 1, 1, device=device)
    k = torch.zeros(1, 200, 16, device=device)
    k[0, [3, 50, 60, 100]] = torch.tensor([[torch.nan], [torch.inf], [1e30], [1.0]], device=device)
    for count, wanted in ((1, [3]), (2, [3, 50]), (3, [3, 50, 60]), (4, [3, 50, 60, 100]), (5, [0, 3, 50, 60, 100])):
        assert select_topk(q, k, w, None, k=count, activation="relu").to_indices()[0].flatten().tolist() == wanted


@pytest.mark.parametrize("case", CASES[:3])
def test_no_higher_score_is_left(case: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Beside the scores that anybody can compute: what is not taken is higher than what is by a step at most, or two
    where 16 bits or the approximations of a GPU have a part."""
    q, k, w, bias = inputs(case, dtype, device)
    lengths = lengths_of(case, device)
    taken = select_topk(q, k, w, bias, k=25, lengths=lengths, causal=True).to_mask()[:, 0]
    scores = indexer_scores(q, k, w, bias, lengths=lengths, out_dtype=torch.float32, causal=True).double()
    step = w.double().sigmoid().sum(-1) / LEVELS
    step = step * (1.01 if dtype is torch.float32 and device.type == "cpu" else 2)
    seen = visible(case).to(device)
    assert torch.equal(scores.isfinite(), seen)
    lowest = scores.masked_fill(~taken, torch.inf).amin(-1)
    highest = scores.masked_fill(taken | ~seen, -torch.inf).amax(-1)
    assert bool((lowest >= highest - step).all())
    assert torch.equal(taken.sum(-1), seen.sum(-1).clamp(max=25))


@pytest.mark.parametrize("case", [(1, 2, 70, 70, 16, True, None), (3, 1, 17, 40, 8, True, [40, 36, 10])])
def test_the_workspace_and_the_batch_change_nothing(case: tuple[Any, ...], device: torch.device) -> None:
    q, k, w, bias = inputs(case, torch.float32, device)
    given, lengths = (q, k, w, bias), lengths_of(case, device)
    usual = select_topk(*given, k=20, lengths=lengths, causal=True)
    for workspace in (2 * 64 * 128, 3 * 64 * 128):
        assert torch.equal(
            select_topk(*given, k=20, lengths=lengths, workspace=workspace, causal=True).words, usual.words
        )
    for i in range(case[0]):
        alone = select_topk(
            q[i : i + 1],
            k[i : i + 1],
            w[i : i + 1],
            bias,
            k=20,
            lengths=None if lengths is None else lengths[i : i + 1],
            causal=True,
        )
        assert torch.equal(alone.words, usual.words[i : i + 1])


def sorted_units(keys: Tensor, seen: Tensor, k: Tensor | int, window: int = 0, sinks: int = 0) -> Tensor:
    """Mask [B, 1, Tq, Tk] of the keys that each query sees of its first k / 4 units, by the largest of their keys."""
    tk = keys.shape[2]
    pad = (0, -tk % 4)
    columns = torch.arange(tk, device=keys.device)
    kept = ((columns < sinks) | (columns >= seen.sum(-1, keepdim=True) - window)) & seen
    keys = torch.where(kept, KEPT, keys).where(seen, -1)
    units = torch.nn.functional.pad(keys, pad, value=-1).unflatten(2, (-1, 4)).amax(3)
    order = torch.sort(units, dim=-1, descending=True, stable=True).indices
    k = k[..., None] if isinstance(k, Tensor) else k
    first = (torch.arange(units.shape[2], device=keys.device) < k // 4).expand_as(order)
    taken = torch.zeros_like(units, dtype=torch.bool).scatter_(2, order, first)
    return (taken.repeat_interleave(4, 2)[..., :tk] & seen)[:, None]


@pytest.mark.parametrize("case, window, sinks", [*((case, 0, 0) for case in CASES), *KEPT_TOO])
def test_units_of_four_keys(
    case: tuple[Any, ...], window: int, sinks: int, dtype: torch.dtype, device: torch.device
) -> None:
    """A stable sort of the units' largest keys; with a window there are ties everywhere, too."""
    q, k, w, bias = inputs(case, dtype, device)
    k = k.repeat_interleave(12 if window else 1, 1)[:, : case[3]]
    options = {"causal": case[5], "lengths": lengths_of(case, device), "window": window, "sinks": sinks}
    found = select_topk(q, k, w, bias, k=24, granularity=4, **{"causal": True, **options})
    wanted = sorted_units(stored(case, q, k, w, bias), visible(case).to(device), 24, window, sinks)
    assert torch.equal(found.to_mask(), wanted)
    assert bool((wanted.sum(-1) <= 24).all())


def test_units_by_slab_and_one_at_a_time(device: torch.device) -> None:
    """Neither the workspace nor the number of queries of a call changes what a query takes."""
    case = (2, 1, 17, 60, 16, True, None)
    q, k, w, bias = inputs(case, torch.float32, device)
    options = {"k": 12, "window": 3, "sinks": 2, "granularity": 4}
    whole = select_topk(q, k, w, bias, **{"causal": True, **options})
    small = select_topk(q, k, w, bias, workspace=2 * 64 * 128, **{"causal": True, **options})
    assert torch.equal(small.words, whole.words)
    for t in (0, 16):
        step = (q[:, :, t : t + 1], k[:, : 44 + t], w[:, t : t + 1], bias)
        one = select_topk(*step, **{"causal": True, **options}).to_mask()
        assert torch.equal(one[:, :, 0], whole.to_mask()[:, :, t, : 44 + t])


@pytest.mark.kernels
def test_units_of_rows_longer_than_registers(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    from gossamer.attention._triton import threshold

    monkeypatch.setattr(threshold, "MAX_REGISTERS", 64)
    case = (1, 1, 5, 301, 16, True, None)
    q, k, w, bias = inputs(case, torch.float32, device)
    found = select_topk(q, k, w, bias, k=40, window=9, granularity=4, causal=True)
    wanted = sorted_units(stored(case, q, k, w, bias), visible(case).to(device), 40, 9)
    assert torch.equal(found.to_mask(), wanted)


def test_attention_over_units(device: torch.device) -> None:
    """Attention, its gradients and decoding do with them as with any selection: against dense attention."""
    case = (1, 2, 50, 50, 16, True, None)
    selection = select_topk(*inputs(case, torch.float32, device), k=12, window=1, granularity=4, causal=True)
    mask = selection.to_mask()
    q, k, v = (torch.randn(1, h, 50, 16, device=device).requires_grad_() for h in (4, 2, 2))
    wide = [x.double() for x in (q, k, v)]
    out = sparse_attention(q, k, v, selection, causal=True)
    scores = (wide[0] @ wide[1].repeat_interleave(2, 1).mT / 4).masked_fill(~mask, -torch.inf)
    wanted = scores.softmax(-1) @ wide[2].repeat_interleave(2, 1)
    torch.testing.assert_close(out, wanted.float(), rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(out)
    for ours, theirs in zip(*(torch.autograd.grad(x, (q, k, v), grad.to(x.dtype)) for x in (out, wanted))):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    last = Selection.from_mask(mask[:, :, -3:])
    with torch.no_grad():
        torch.testing.assert_close(
            sparse_attention(q[:, :, -3:], k, v, last, causal=True), out[:, :, -3:], rtol=1e-4, atol=1e-5
        )
    indices, there = selection.to_indices()
    assert torch.equal(Selection.from_indices(indices, 50, there).words, selection.words)


@given(
    tq=st.integers(1, 16),
    more=st.integers(0, 80),
    k=st.integers(1, 60),
    levels=st.integers(1, 40),
    heads=st.integers(1, 3),
    window=st.integers(0, 5),
)
def test_ties_everywhere(tq: int, more: int, k: int, levels: int, heads: int, window: int) -> None:
    """Few distinct keys, down to a single one."""
    device = torch.device("cuda" if torch.cuda.is_available() and not INTERPRET else "cpu")
    case = (1, heads, tq, tq + more, 4, True, None)
    q, keys, w, bias = inputs(case, torch.float32, device)
    keys = keys[:, torch.arange(tq + more, device=device) * 7 % min(levels, tq + more)]
    window = min(window, k)
    found = select_topk(q, keys, w, bias, k=k, window=window, causal=True)
    wanted = sorted_first(stored(case, q, keys, w, bias), visible(case).to(device), k, window)
    assert torch.equal(found.to_mask(), wanted)


@pytest.mark.kernels
@pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.full), 9])
def test_rows_longer_than_registers(window: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    from gossamer.attention._triton import threshold

    monkeypatch.setattr(threshold, "MAX_REGISTERS", 64)
    case = (1, 1, 20, 300, 16, True, None)
    for repeat in (1, 7):
        q, k, w, bias = inputs(case, torch.float32, device)
        k = k.repeat_interleave(repeat, 1)[:, :300]
        found = select_topk(q, k, w, bias, k=40, window=window, causal=True)
        wanted = sorted_first(stored(case, q, k, w, bias), visible(case).to(device), 40, window)
        assert torch.equal(found.to_mask(), wanted)


@pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.full), 5])
def test_words_of_many_columns(window: int, device: torch.device) -> None:
    """More keys than a program makes words of, an odd number, and ties that end in any of them."""
    case = (1, 1, 5, 1101, 4, True, None)
    for k_top, repeat in ((30, 300), (600, 300), (1000, 7)):
        q, k, w, bias = inputs(case, torch.float32, device)
        k = k.repeat_interleave(repeat, 1)[:, :1101]
        found = select_topk(q, k, w, bias, k=k_top, window=window, causal=True)
        wanted = sorted_first(stored(case, q, k, w, bias), visible(case).to(device), k_top, window)
        assert torch.equal(found.to_mask(), wanted)


def test_nan_ranks_first_and_closed_gates_rank_by_column(device: torch.device) -> None:
    case = (1, 2, 30, 50, 16, False, None)
    q, k, w, bias = inputs(case, torch.float32, device)
    k[0, 41] = torch.nan
    w[0, 3] = -torch.inf
    q[0, 0, 5, 2] = torch.inf
    w[0, 7, 1] = torch.nan
    mask = select_topk(q, k, w, bias, k=4, causal=False).to_mask()[0, 0]
    assert torch.equal(mask.sum(-1).cpu(), torch.full((30,), 4))
    assert bool(mask[[0, 1, 2, 4, 6], 41].all())
    # All scores are 0, or all are NaN: ties go to the lowest columns.
    assert mask[7, :4].all()
    wanted = sorted_first(stored(case, q, k, w, bias), visible(case).to(device), 4)
    assert torch.equal(mask, wanted[0, 0])


def test_one_query_at_a_time_selects_as_all_at_once(device: torch.device) -> None:
    """Decoding against a cache, contiguous or a slice of a longer one."""
    case = (2, 2, 40, 40, 16, True, None)
    q, k, w, bias = inputs(case, torch.float32, device)
    whole = select_topk(q, k, w, bias, k=9, window=2, causal=True).to_mask()
    cache = torch.full((2, 64, 16), torch.nan, device=device)
    cache[:, :40] = k
    for t in (0, 7, 39):
        step = (q[:, :, t : t + 1], cache[:, : t + 1], w[:, t : t + 1], bias)
        assert torch.equal(select_topk(*step, k=9, window=2, causal=True).to_mask()[:, :, 0], whole[:, :, t, : t + 1])
        step = (q[:, :, t : t + 1], cache, w[:, t : t + 1], bias)
        padded = select_topk(
            *step, k=9, window=2, lengths=torch.tensor([t + 1, t + 1], device=device), causal=True
        ).to_mask()
        assert torch.equal(padded[:, :, 0, : t + 1], whole[:, :, t, : t + 1]) and not padded[..., t + 1 :].any()


def test_without_heads_all_scores_are_equal(device: torch.device) -> None:
    given = inputs((1, 0, 2, 3, 4), torch.float32, device)
    assert int(select_topk(*given, k=2, causal=True).to_mask().sum()) == 3 + 1


@pytest.mark.native
def test_compile_and_autocast(compiled: Any, device: torch.device) -> None:
    given = inputs((1, 2, 70, 70, 16), torch.float32, device)
    usual = select_topk(*given, k=9, causal=True).words
    assert torch.equal(compiled(lambda *a: select_topk(*a, k=9, causal=True))(*given).words, usual)
    with torch.autocast(device.type, torch.bfloat16):
        cast = select_topk(*given, k=9, causal=True).words
    halves = [x.bfloat16() for x in given[:2]]
    assert torch.equal(cast, select_topk(*halves, *given[2:], k=9, causal=True).words)


@pytest.mark.gpu
def test_a_graph_replays_on_new_inputs(device: torch.device) -> None:
    given = inputs((1, 4, 3000, 3000, 64), torch.bfloat16, device)
    follows(lambda: [select_topk(*given, k=500, causal=True).words], given[1])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 4, 3000, 3000, 64), (1, 4, 500, 40000, 64), (1, 2, 70, 140000, 128)])
def test_real_sizes(shape: tuple[int, ...], device: torch.device) -> None:
    case = (*shape, True, None)
    q, k, w, bias = inputs(case, torch.bfloat16, device)
    keys, seen = stored(case, q, k, w, bias), visible(case).to(device)
    for window, sinks in ((0, 0), (64, 4)):
        found = select_topk(q, k, w, bias, k=2048, window=window, sinks=sinks, causal=True)
        assert torch.equal(found.to_mask(), sorted_first(keys, seen, 2048, window, sinks))


HOPPER = [
    (1, 4, 8192, 8192, 64, True, None),
    (2, 2, 130, 9001, 128, True, [9001, 77]),
    (2, 8, 65, 8200, 64, False, None),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", HOPPER)
def test_hoppers_kernel_stores_the_same_keys(
    case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    from gossamer._core import tuning
    from gossamer.attention._triton import select_topk as gpu

    if not tuning.hopper(device):
        pytest.skip("needs a Hopper GPU")
    q, k, w, bias = inputs(case, torch.bfloat16, device)
    assert gpu.choose_scores(q, k, 1) == "hopper"
    for added in (bias, None):
        found = stored(case, q, k, w, added)
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "choose_scores", lambda *_: "general")
            assert torch.equal(found, stored(case, q, k, w, added))


@pytest.mark.native
def test_which_kernel_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pytest.importorskip("gossamer.attention._triton.select_topk")
    half, many = torch.bfloat16, gpu.LONG
    queries, keys = torch.zeros(1, 4, 64, 64, dtype=half), torch.zeros(1, many, 64, dtype=half)
    assert gpu.choose_scores(queries, keys, 1) == "general"
    monkeypatch.setattr(gpu.tuning, "hopper", lambda device: True)
    monkeypatch.setattr(gpu, "fast", lambda x: x.element_size() == 2)
    assert gpu.choose_scores(queries, keys, 1) == "hopper"
    assert gpu.choose_scores(queries.transpose(1, 2).contiguous().transpose(1, 2), keys, 1) == "hopper"
    odd, wide = torch.zeros(1, 3, 64, 64, dtype=half), torch.zeros(1, 8, 64, 128, dtype=half)
    shifted = torch.zeros(1, many, 65, dtype=half)[..., 1:]
    for q, k, granularity in (
        (queries, keys, 4),
        (queries.float(), keys.float(), 1),
        (queries[:, :, :16], keys, 1),
        (queries, keys[:, : many - 1], 1),
        (odd, keys, 1),
        (wide, torch.zeros(1, many, 128, dtype=half), 1),
        (queries[..., :48], keys[..., :48], 1),
        (queries, shifted, 1),
        (queries[:, :1].expand(1, 4, 64, 64), keys, 1),
    ):
        assert gpu.choose_scores(q, k, granularity) == "general"


@pytest.mark.native
def test_bad_input(device: torch.device) -> None:
    given = inputs((1, 2, 3, 4, 8), torch.float32, device)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        select_topk(*given, k=0, causal=True)
    with pytest.raises(ValueError, match=r"window \+ sinks must be at most k .* got 2 \+ 1 and 2"):
        select_topk(*given, k=2, window=2, sinks=1, causal=True)
    with pytest.raises(ValueError, match="window must be an int of at least 0, got -1"):
        select_topk(*given, k=2, window=-1, causal=True)
    with pytest.raises(ValueError, match="workspace must be at least 16384 bytes, the scores of 64 queries by 4 keys"):
        select_topk(*given, k=2, workspace=100, causal=True)
    with pytest.raises(ValueError, match=r"granularity must be 1 or 4, got 2\. For blocks of 64 or 128 keys"):
        select_topk(*given, k=2, granularity=2, causal=True)
    with pytest.raises(
        ValueError, match="with granularity=4, k, or k_min, k_base and k_max, must be multiples of it, got 6"
    ):
        select_topk(*given, k=6, granularity=4, causal=True)
    with pytest.raises(ValueError, match="got 4, 8, 9"):
        select_topk(*given, k=AdaptiveK("entropy", 4, 8, 9), granularity=4, causal=True)
    with pytest.raises(ValueError, match=r"at most k / 4 units of 4 keys, 2, got 2 and 1, which may reach into 3"):
        select_topk(*given, k=8, window=2, sinks=1, granularity=4, causal=True)
    with pytest.raises(
        TypeError, match=r"k must be an int, got str\. It is how many keys a query takes, or an AdaptiveK"
    ):
        select_topk(*given, k="variance", causal=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="AdaptiveK: rule must be one of variance, entropy, learned, got 'mean'"):
        AdaptiveK("mean")
    with pytest.raises(ValueError, match="the rule 'variance' needs mean"):
        AdaptiveK("variance")
    with pytest.raises(ValueError, match="k_min <= k_base <= k_max must hold, got 5, 4, 6"):
        AdaptiveK("entropy", 5, 4, 6)
    with pytest.raises(ValueError, match=r"hidden a power of two, got \[3, 5\]"):
        AdaptiveK("learned", mean=torch.zeros(1), predictor=torch.zeros(3, 5))

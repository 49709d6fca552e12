"""sae.encode, against the definition of each activation in dense float64."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer import gemm
from gossamer.rowsparse import Rows
from gossamer.rowsparse.pack import check_capacity
from gossamer.sae import count_fired, decode, encode
from gossamer.testing import assert_close, assert_exact, dense64
from tests import strategies
from tests.graphs import captured
from tests.sae.dense import (
    BANDWIDTH,
    SCALED,
    capacities,
    encode_with_l0,
    gradients,
    jumprelu_case,
    options_for,
    selected,
    valued,
    whole,
)
from tests.syncs import without_a_sync

NAN, INF = math.nan, math.inf
ACTIVATIONS = ("relu", "jumprelu", "topk", "abstopk", "batchtopk", "groupmax")


def check(rows: Rows, acts: Tensor, capacity: int | None = None) -> None:
    """The invariants of the entries that differ from 0 in dense float64 acts, in `capacity` slots a row if that is
    known."""
    flat = acts.reshape(math.prod(acts.shape[:-1]), acts.shape[-1])
    counts = (flat != 0).sum(1)
    assert rows.shape == tuple(acts.shape)
    values, indices, spans, _ = rows.packed
    assert capacity is None or len(values) == len(flat) * capacity
    assert rows.counts.tolist() == counts.tolist()
    held = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    for row, (first, count) in enumerate(spans.t().tolist()):
        if first + count > len(values):
            assert capacity is not None and count > capacity
            continue
        assert capacity is None or first == row * capacity
        columns = flat[row].nonzero().squeeze(1)
        assert indices[first : first + count].tolist() == columns.tolist()
        assert_exact(values[first : first + count], flat[row, columns])
        held[first : first + count] = True
    if not rows.overflowed:
        assert (indices[~held] == -1).all() and (values[~held] == 0).all()
    assert_exact(dense64(rows), acts)
    assert_exact(rows.to_dense(), acts)
    assert count_fired(rows).tolist() == (flat != 0).sum(0).tolist()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@given(data=st.data())
def test_encode(activation: str, data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    leading, d, n = data.draw(strategies.LEADING), data.draw(st.integers(0, 9)), data.draw(st.integers(1, 70))
    generator = strategies.seeded(data.draw(strategies.SEEDS), device)
    layout = data.draw(strategies.LAYOUTS)
    x = strategies.laid_out(whole((*leading, d), 2, generator, dtype), layout)
    W = strategies.laid_out(whole((d, n), 1, generator, dtype), data.draw(strategies.LAYOUTS))
    b = None if data.draw(st.booleans()) else whole((n,), 8, generator, torch.float32) / 4
    b = None if b is None else strategies.laid_out(b, data.draw(strategies.LAYOUTS))
    b_dec = None if data.draw(st.booleans()) else whole((d,), 1, generator, torch.float32)
    threshold = whole((n,) if data.draw(st.booleans()) else (), 4, generator, torch.float32)
    threshold = strategies.laid_out(threshold, data.draw(strategies.LAYOUTS))
    options = options_for(activation, n, data.draw(st.integers(1, 12)), threshold)
    capacity = None
    if activation in ("relu", "jumprelu"):
        capacity = data.draw(st.one_of(st.none(), st.just("exact"), st.integers(1, 70)))
    scale = None
    if activation in SCALED and data.draw(st.booleans()):
        # Powers of 2: no dtype rounds their products.
        scale = strategies.laid_out(whole((n,), 1, generator, torch.float32).exp2(), data.draw(strategies.LAYOUTS))
    rows, l0 = encode_with_l0(x, W, b, **valued(b_dec=b_dec, capacity=capacity, scale=scale, **options))
    z = (x.double() - (0 if b_dec is None else b_dec.double())) @ W.double() + (0 if b is None else b.double())
    acts = torch.where(selected(z if scale is None else z * scale.double(), **options), z, 0)
    slots = None
    if activation in ("relu", "jumprelu"):
        slots = None if capacity == "exact" else min(n, capacity or 128)
        assert (rows.source is None) == (slots in (None, n))
    else:
        assert rows.source is None and len(rows.values) == options["k"] * rows.num_rows
        slots = None if activation == "batchtopk" else options["k"]
    check(rows, acts, slots)
    assert rows.dtype is dtype
    assert l0.shape == tuple(leading) and l0.dtype is torch.float32
    assert l0.tolist() == (acts != 0).sum(-1).tolist()


@pytest.mark.parametrize("m, n", [(1, 1), (3, 2047), (2, 2100), (5, 5000), (600, 300), (33, 16384)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_way_through_the_rows(
    m: int, n: int, activation: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator, mode: str
) -> None:
    if mode == "interpreter" and (m > 3 or dtype is not torch.float32):
        pytest.skip("large for the interpreter")
    x, W = whole((m, 6), 3, generator, dtype), whole((6, n), 3, generator, dtype)
    # A shift that leaves relu little to keep.
    b = whole((n,), 3, generator, torch.float32) / 4 - 20
    threshold = torch.full((n,), 2.0, device=device)
    threshold[n // 2] = -INF
    options = options_for(activation, n, 40, threshold)
    z = x.double() @ W.double() + b.double()
    acts = torch.where(selected(z, **options), z, 0)
    for capacity in capacities(activation, 3, n, "exact") if mode != "interpreter" else capacities(activation, 3):
        slots = check_capacity("", capacity, n) if activation in ("relu", "jumprelu") else None
        check(encode(x, W, b, **valued(capacity=capacity, **options)), acts, slots)
    if activation in SCALED:
        scale = whole((n,), 1, generator, torch.float32).exp2()
        acts = torch.where(selected(z * scale.double(), **options), z, 0)
        check(encode(x, W, b, **valued(scale=scale.to(dtype), **options)), acts)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_against_plain_pytorch(
    activation: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """On numbers that round: what is kept is as exact as plain PyTorch, and nothing clearly larger is left out."""
    x = torch.randn(6, 40, device=device, generator=generator).to(dtype)
    W = (torch.randn(40, 500, device=device, generator=generator) / 40**0.5).to(dtype)
    b = torch.randn(500, device=device, generator=generator) / 8
    options = options_for(activation, 500, 9, torch.full((500,), 1.5, device=device))
    dense = encode(x, W, b, **valued(**options)).to_dense()
    z = x.double() @ W.double() + b.double()
    plain = (x @ W + b).to(dtype)
    kept = dense != 0
    assert_close(dense[kept], reference64=z[kept], plain=plain[kept])
    margin = 4 * torch.finfo(dtype).eps * z.abs().max()
    acts = torch.where(selected(z, **options), z, 0)
    if activation == "abstopk":
        assert (dense < 0).any() and torch.equal(dense.sign()[kept], z.sign().to(dtype)[kept])
        z, acts = z.abs(), acts.abs()
    border = z[acts > 0].min() if activation == "batchtopk" else acts.masked_fill(acts == 0, INF).amin(1, keepdim=True)
    if activation == "groupmax":
        groups = acts.unflatten(-1, (options["k"], -1))
        border = groups.amax(-1, keepdim=True).expand_as(groups).flatten(-2)
    border = {"relu": 0.0, "jumprelu": 1.5}.get(activation, border)
    assert not (kept & (z < border - margin)).any() and not (~kept & (z > border + margin)).any()


@pytest.mark.parametrize("activation", SCALED)
def test_ties_go_to_the_lowest_index(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    W = torch.ones(1, 100, device=device, dtype=dtype)
    W[0, 70] = 2
    x = torch.tensor([[1.0], [2.0], [1.0]], device=device, dtype=dtype)
    columns = [row.nonzero().squeeze(1).tolist() for row in encode(x, W, None, **valued(activation, k=3)).to_dense()]
    if activation != "batchtopk":
        assert columns == [[0, 1, 70]] * 3
    else:
        # 4, then the twos in order of row and column: the row of twos takes what is left before the third row's one.
        assert columns == [[70], [0, 1, 2, 3, 4, 5, 6, 70], []]


@pytest.mark.parametrize(
    "activation, capacity", [*((name, None) for name in ACTIVATIONS), ("relu", 2), ("jumprelu", 2)]
)
def test_not_a_number_and_infinity(
    activation: str, capacity: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    b = torch.tensor([0.0, NAN, 3.0, -NAN, INF, -INF, -1.0, 2.0, -0.0], device=device)
    x, W = torch.zeros(2, 4, device=device, dtype=dtype), torch.zeros(4, 9, device=device, dtype=dtype)
    options = options_for(activation, 9, 4, torch.full((9,), 2.0, device=device))
    rows = encode(x, W, b, **valued(capacity=capacity, **options))
    kept = {"relu": [1, 2, 3, 4, 7], "abstopk": [1, 3, 4, 5], "groupmax": [1, 3, 7]}.get(activation, [1, 2, 3, 4])
    assert rows.counts.tolist() == [len(kept)] * 2
    expected = torch.zeros(2, 9, dtype=torch.float64, device=device)
    expected[:, kept] = b[kept].double()
    assert_exact(rows.to_dense(), expected)
    few = options_for(activation, 9, 2, torch.full((9,), 2.0, device=device))
    if "k" in few:
        assert encode(x, W, b, **valued(**few)).indices.tolist() == [1, 3][: few["k"]] * 2


def test_a_threshold_that_is_not_a_number_keeps_everything(dtype: torch.dtype, device: torch.device) -> None:
    x, W = torch.ones(2, 1, device=device, dtype=dtype), torch.arange(-3, 4, device=device, dtype=dtype)[None]
    rows = encode(x, W, activation=gemm.JumpReLU(torch.tensor(NAN, device=device)))
    assert rows.counts.tolist() == [7, 7]


def test_nothing_to_keep(dtype: torch.dtype, device: torch.device) -> None:
    x, W = torch.zeros(3, 4, device=device, dtype=dtype), torch.ones(4, 50, device=device, dtype=dtype)
    for activation in ACTIVATIONS:
        rows = encode(x, W, **valued(**options_for(activation, 50, 5, torch.zeros((), device=device))))
        assert rows.counts.tolist() == [0, 0, 0] and (rows.indices == -1).all() and (rows.values == 0).all()


def test_k_may_be_all(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    x, W = whole((3, 4), 2, generator, dtype), whole((4, 37), 1, generator, dtype)
    reference = (x.double() @ W.double()).relu()
    for activation in ("topk", "batchtopk"):
        rows = encode(x, W, **valued(activation, k=37))
        assert_exact(rows.to_dense(), reference)


def test_batchtopk_of_one_row_is_topk(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    x, W, b = (whole(shape, 2, generator, dtype) for shape in ((1, 4), (4, 300), (300,)))
    for scale in (None, torch.linspace(0.5, 2, 300, device=device, dtype=dtype)):
        by_row, by_batch = (
            encode(x, W, b, **valued(activation, k=7, scale=scale)) for activation in ("topk", "batchtopk")
        )
        assert torch.equal(by_row.to_dense(), by_batch.to_dense())
        assert torch.equal(by_row.counts, by_batch.counts)


def test_statistics_stay_float32(device: torch.device, mode: str) -> None:
    """A threshold or bias in half precision would decide these the other way."""
    half = torch.float16 if mode == "interpreter" else torch.bfloat16
    one, W = torch.ones(1, 1, device=device), torch.tensor([[1.0, -1.0]], device=device)
    step = torch.finfo(half).eps / 2
    threshold, b = torch.tensor([1 - step / 2, 0.0], device=device), torch.tensor([0.0, 1 + step], device=device)
    options = {"activation": "jumprelu", "threshold": threshold}
    for x, weight, context in ((one.to(half), W.to(half), False), (one, W, True)):
        with torch.autocast(device.type, half, enabled=context):
            rows = encode(x, weight, b, **valued(**options))
            assert rows.dtype is half and rows.indices[:2].tolist() == [0, 1]
            assert rows.values[:2].tolist() == [1.0, step]
            assert decode(rows, weight.t().contiguous()).dtype is half


@pytest.mark.native
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compile(activation: str, device: torch.device, generator: torch.Generator, compiled: Any) -> None:
    leaves, weights, _ = jumprelu_case((2, 3), 20, 90, torch.float32, generator)
    threshold = leaves.pop("threshold")
    options = options_for(activation, 90, 5, threshold.requires_grad_())
    if activation == "jumprelu":
        options["bandwidth"] = BANDWIDTH

    def run(x: Tensor, W_enc: Tensor, b_enc: Tensor, b_dec: Tensor) -> Tensor:
        rows, l0 = encode_with_l0(
            x, W_enc, b_enc, **valued(b_dec=b_dec, capacity=capacities(activation, 6)[-1], **options)
        )
        counts = count_fired(rows)
        return (rows.to_dense() * weights).sum() + l0.sum() + counts.sum()

    got, want = (gradients(leaves, torch.float32, f) for f in (compiled(run), run))
    for name in leaves:
        torch.testing.assert_close(got[name], want[name])


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("m", [32, 600])
def test_capture_without_a_sync(activation: str, m: int, device: torch.device, generator: torch.Generator) -> None:
    leaves, weights, _ = jumprelu_case((m,), 64, 4096, torch.bfloat16, generator)
    threshold = leaves.pop("threshold")
    options = options_for(activation, 4096, 20, threshold)
    if activation == "jumprelu":
        options |= {"bandwidth": BANDWIDTH, "threshold": threshold.requires_grad_()}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    weights = weights.bfloat16()

    def run() -> tuple[Tensor, ...]:
        rows = encode(**leaves, **valued(capacity=capacities(activation, 16)[-1], **options))
        return rows.to_dense(), *torch.autograd.grad((rows.to_dense() * weights).sum(), leaves.values())

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        with without_a_sync():
            eager = run()
    torch.cuda.current_stream().wait_stream(stream)
    graph, results = captured(run)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, eager))


@pytest.mark.native
def test_autocast_does_not_mix_in_float64() -> None:
    x, W = torch.ones(3, 4), torch.ones(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        for mixed in ((x.double(), W), (x, W.double())):
            with pytest.raises(TypeError, match=r"x and W_enc must have one dtype, .*Convert one with .to\(dtype\)\.$"):
                encode(*mixed, activation="relu")


OK_X, OK_W = torch.ones(2, 4), torch.ones(4, 8)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"x": torch.tensor(1.0)}, ValueError, r"sae.encode: x must have shape \[..., d_in\], got a scalar"),
        ({"W_enc": None}, TypeError, r"sae.encode: W_enc must be a torch.Tensor, got None"),
        ({"x": OK_X.long()}, TypeError, r"x must be float32, float16 or bfloat16 .* got int64"),
        ({"x": OK_X.half()}, TypeError, r"x and W_enc must have one dtype, got float16 and float32"),
        ({"W_enc": torch.ones(5, 8)}, ValueError, r"x must have shape \[..., d_in\] with d_in = 5 like W_enc, got"),
        ({"W_enc": torch.ones(8)}, ValueError, r"W_enc must have shape \[d_in, d_sae\], got \[8\]"),
        ({"b_enc": torch.ones(7)}, ValueError, r"b_enc must have shape \[d_sae\] = \[8\] like W_enc, got \[7\]"),
        ({"b_dec": torch.ones(8)}, ValueError, r"b_dec must have shape \[d_in\] = \[4\]"),
        ({"b_enc": torch.ones(8, device="meta")}, ValueError, r"b_enc must be on .* got meta"),
        (
            {"activation": "gelu"},
            ValueError,
            r'activation must be "relu" or gemm.JumpReLU\(...\), gemm.TopK\(...\), .* got \'gelu\'',
        ),
        ({"activation": "relu2"}, ValueError, r'activation must be "relu" or gemm.JumpReLU'),
        ({"activation": "topk"}, ValueError, r"activation must be .* got 'topk'"),
        ({"activation": "relu2"}, ValueError, r"activation must be .* got 'relu2'"),
        ({"activation": torch.relu}, TypeError, r"activation must be .* got <built-in"),
        ({"activation": gemm.JumpReLU(torch.ones(7))}, ValueError, r"threshold must have shape \[d_sae\] = \[8\]"),
        ({"activation": gemm.TopK(9)}, ValueError, r"k must be at most d_sae = 8, got 9"),
        ({"activation": gemm.BatchTopK(9)}, ValueError, r"k must be at most d_sae = 8, got 9"),
        ({"activation": gemm.GroupMax(9)}, ValueError, r"k must be at most d_sae = 8, got 9"),
        (
            {"activation": gemm.GroupMax(6)},
            ValueError,
            r"sae.encode: k of gemm.GroupMax must divide d_sae = 8 into groups of one size, got 6. Take 4, for example",
        ),
        ({"activation": gemm.GroupMax(2), "capacity": 3}, ValueError, r"capacity belongs to the other .* got 3 for"),
        ({"activation": gemm.TopK(2, torch.ones(7))}, ValueError, r"scale must have shape \[d_sae\]"),
        ({"capacity": 0}, ValueError, r"capacity must be at least 1, got 0"),
        ({"capacity": 2.0}, TypeError, r"capacity must be an int, got float"),
        ({"capacity": "all"}, ValueError, r'capacity must be an int, None or "exact", got \'all\''),
        ({"activation": gemm.BatchTopK(2), "capacity": 3}, ValueError, r"capacity belongs to the other .* got 3 for"),
        ({"activation": gemm.TopK(2), "capacity": "exact"}, ValueError, r"capacity belongs to the other activations"),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], message: str, device: torch.device) -> None:
    arguments: dict[str, Any] = {"x": OK_X, "W_enc": OK_W, "activation": "relu", **change}

    def moved(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.replace(value, **{name: moved(part) for name, part in vars(value).items()})
        return value.to(device) if isinstance(value, Tensor) and value.device.type != "meta" else value

    with pytest.raises(error, match=message):
        encode(**{name: moved(value) for name, value in arguments.items()})

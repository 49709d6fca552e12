"""Attention over selected keys and its gradients, against dense float64."""

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gossamer.attention import Selection, sparse_attention
from gossamer.attention.sparse_attention import choose_path
from gossamer.testing import assert_close
from tests import strategies
from tests.attention.budget import no_luck, spread


def dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None, causal: bool = True, lengths: Any = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) by dense PyTorch in the dtype of q; mask bool [B, S, Tq, Tk]."""
    (_, h, tq, d), (_, g, tk, _) = q.shape, k.shape
    mask = visible(mask, tq, tk, causal, lengths).repeat_interleave(h // mask.shape[1], 1)
    k, v = (x.repeat_interleave(h // g, 1) for x in (k, v))
    s = (q @ k.transpose(2, 3)) * (d**-0.5 if scale is None else scale)
    s = s.masked_fill(~mask, -math.inf)
    # A row without keys would be NaN: it is computed over all and cleared.
    some = mask.any(-1, keepdim=True)
    p = torch.where(some, s, 0).softmax(-1)
    out = torch.where(mask, p, 0) @ v
    return torch.where(some, out, 0), torch.where(some, s, 0).logsumexp(-1).where(some[..., 0], -math.inf)


def visible(mask: Tensor, tq: int, tk: int, causal: bool, lengths: Any) -> Tensor:
    keys = torch.arange(tk, device=mask.device)
    if causal:
        offset = mask.new_full((len(mask),), tk - tq, dtype=torch.int64)
        # Of more queries than keys the first have none, with lengths too, which move no query in front of all keys.
        offset = offset if lengths is None else (lengths - tq).clamp(min=min(tk - tq, 0))
        queries = torch.arange(tq, device=mask.device) + offset[:, None]
        mask = mask & (keys <= queries[:, None, :, None])
        if lengths is not None:  # a query that stands behind the last key takes none
            mask = mask & (queries < lengths[:, None])[:, None, :, None]
    if lengths is not None:
        mask = mask & (keys < lengths[:, None, None, None])
    return mask


def inputs(
    b: int, h: int, g: int, tq: int, tk: int, d: int, dtype: torch.dtype, device: torch.device, generator: Any,
    dv: int | None = None,
) -> list[Tensor]:  # fmt: skip
    shapes = ((b, h, tq, d), (b, g, tk, d), (b, g, tk, d if dv is None else dv))
    return [torch.randn(s, device=device, generator=generator).to(dtype).requires_grad_() for s in shapes]


def random_mask(shape: tuple[int, ...], density: float, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, device=generator.device, generator=generator) < density


def by_formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, grad: Tensor, grad_lse: Tensor | None, exact: Any, **options: Any
) -> list[Tensor]:
    """Gradients by dense PyTorch in the dtype of q, as every attention without a matrix of probabilities has them:
    from the lse, and from the output and its gradient. Autograd, which sums the probabilities times their
    gradients, gets exact zeros where a query has one key. Not closer to exact than the order of a sum may be, whose
    terms are those of the two sums whose difference a logit's gradient is."""
    (b, h, tq, d), (_, g, tk, _) = q.shape, k.shape
    out, lse = dense(q, k, v, mask, **options)
    scale = options.get("scale") or d**-0.5
    mask = visible(mask, tq, tk, options.get("causal", True), options.get("lengths"))
    mask = mask.repeat_interleave(h // mask.shape[1], 1)
    k, v = (x.repeat_interleave(h // g, 1) for x in (k, v))
    p = torch.where(mask, ((q @ k.transpose(2, 3)) * scale - lse[..., None]).exp(), 0)
    delta = (grad * out).sum(-1) - (0 if grad_lse is None else grad_lse)
    ds = p * (grad @ v.transpose(2, 3) - delta[..., None]) * scale
    squares = (grad * out).double().square().sum(-1) + (0 if grad_lse is None else grad_lse.double().square())
    terms = p.double() * (spread(grad, v.transpose(2, 3)).square() + squares[..., None]).sqrt() * scale

    def of_group(x: Tensor) -> Tensor:
        """[B, H, Tq, n] of all heads that share one of k, as [B, G, heads of it * Tq, n]."""
        return x.reshape(b, g, h // g * tq, x.shape[3])

    factors = (
        (ds, k, terms),
        (of_group(ds).transpose(2, 3), of_group(q), of_group(terms).transpose(2, 3)),
        (of_group(p).transpose(2, 3), of_group(grad), of_group(p).transpose(2, 3)),
    )
    return [
        no_luck((x @ w).view_as(wanted), wanted, spread(y, w).view_as(wanted), x.shape[-1])
        for wanted, (x, w, y) in zip(exact, factors, strict=True)
    ]


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    mask: Tensor,
    generator: Any,
    path: str | None = None,
    factor: float = 2.0,
    **options: Any,
) -> None:
    """Results, lse and gradients, also those that come through the lse."""
    options = {"causal": True, **options}
    leaves = (q, k, v)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    usual = [x.detach() for x in leaves]
    wanted, plain = dense(*exact, mask, **options), dense(*usual, mask, **options)
    got = sparse_attention(q, k, v, selection, return_lse=True, path=path, **options)
    assert got[0].dtype is q.dtype and got[1].dtype is torch.promote_types(q.dtype, torch.float32)
    # At least the root of the sum of the squares of probability times value.
    magnitude = dense(*exact[:2], exact[2].square(), mask, **options)[0].sqrt()
    assert_close(got[0], reference64=wanted[0], plain=plain[0], length=k.shape[2], magnitude=magnitude, name="out")
    # Plain PyTorch rounds the scores to the inputs' dtype before it sums. The sum is of the order of its largest score.
    scale, keys = options.get("scale") or q.shape[3] ** -0.5, k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    largest = spread(q, keys.transpose(2, 3)).amax(-1) * scale if k.shape[2] else 0
    assert_close(
        got[1].to(q.dtype), reference64=wanted[1], plain=no_luck(plain[1], wanted[1], largest, q.shape[3]), name="lse"
    )
    towards = torch.randn(wanted[0].shape, device=q.device, generator=generator).to(q.dtype)
    some = wanted[1].isfinite()
    of_lse = torch.randn(some.shape, device=q.device, generator=generator).to(q.dtype) * some
    for through in (False, True):

        def grads(out: Tensor, lse: Tensor, leaves: Any, through: bool = through) -> tuple[Tensor, ...]:
            total = (out * towards.to(out.dtype)).sum()
            if through:
                total = total + torch.where(some, lse * of_lse.to(lse.dtype), 0).sum()
            return torch.autograd.grad(total, leaves, retain_graph=True)

        precise = grads(*wanted, exact)
        other = by_formula(*usual, mask, towards, of_lse if through else None, precise, **options)
        for name, a, b, c in zip("qkv", grads(*got, leaves), precise, other):
            assert_close(a, reference64=b, plain=c, factor=factor, name=f"gradient of {name}")


PATHS = pytest.mark.parametrize("path", ["lists", pytest.param("tiles", marks=pytest.mark.kernels)])
"""The CPU has one way."""
CASES = [
    (1, 1, 1, 64, 64, 16, 1),
    (2, 4, 2, 70, 70, 16, 2),
    (1, 4, 2, 33, 200, 24, 4),
    (1, 6, 2, 33, 150, 16, 1),
    (1, 2, 2, 130, 90, 64, 2),
    (1, 3, 1, 2, 77, 8, 3),
]
"""B, H, G, Tq, Tk, D, S."""


@PATHS
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_dense(
    case: tuple[int, ...], path: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    b, h, g, tq, tk, d, s = case
    q, k, v = inputs(b, h, g, tq, tk, d, dtype, device, generator)
    mask = random_mask((b, s, tq, tk), 0.3, generator)
    check(q, k, v, Selection.from_mask(mask), mask, generator, path=path)


@pytest.mark.full
@pytest.mark.parametrize("h, g, s", [(4, 4, 4), (8, 2, 1), (8, 2, 2), (5, 1, 1)])
@pytest.mark.parametrize("tq, tk", [(1, 400), (65, 513), (200, 131), (600, 600)])
@pytest.mark.parametrize("d", [80, 256])
@pytest.mark.parametrize("density", [0.02, 0.5])
@PATHS
def test_grid(
    h: int, g: int, s: int, tq: int, tk: int, d: int, density: float, path: str, dtype: torch.dtype,
    device: torch.device, generator: torch.Generator,
) -> None:  # fmt: skip
    q, k, v = inputs(2, h, g, tq, tk, d, dtype, device, generator)
    mask = random_mask((2, s, tq, tk), density, generator)
    # Of so many cases one may have a formula that is closer than usual.
    check(q, k, v, Selection.from_mask(mask), mask, generator, path=path, factor=3.0)


@pytest.mark.parametrize(
    "options",
    [{"causal": False}, {"scale": 0.7}, {"lengths": (1, 70)}, {"lengths": (0, 33), "causal": False}],
    ids=str,
)
@PATHS
def test_options(options: dict[str, Any], path: str, device: torch.device, generator: torch.Generator) -> None:
    q, k, v = inputs(2, 2, 1, 66, 70, 16, torch.float32, device, generator)
    mask = random_mask((2, 1, 66, 70), 0.2, generator)
    if "lengths" in options:
        options = {**options, "lengths": torch.tensor(options["lengths"], device=device)}
    check(q, k, v, Selection.from_mask(mask), mask, generator, path=path, **options)


@pytest.mark.parametrize("tq, tk", [(70, 50), (130, 33), (16, 9)])
def test_more_queries_than_keys(tq: int, tk: int, device: torch.device, generator: torch.Generator) -> None:
    """The first queries stand in front of all keys, take none and have no gradient, with lengths too. Lengths that
    leave all keys change nothing."""
    q, k, v = inputs(3, 2, 1, tq, tk, 16, torch.float32, device, generator)
    mask = random_mask((3, 1, tq, tk), 0.7, generator)
    selection, lengths = Selection.from_mask(mask), torch.tensor([tk, tk // 2, 0], device=device)
    check(q, k, v, selection, mask, generator, lengths=lengths)
    out, lse = sparse_attention(q, k, v, selection, lengths=lengths, return_lse=True, causal=True)
    (dq,) = torch.autograd.grad(out.sum(), q)
    for early in (out[:, :, : tq - tk], dq[:, :, : tq - tk], lse[:, :, : tq - tk].exp()):
        assert not early.any()
    whole = sparse_attention(q, k, v, selection, causal=True)
    assert torch.equal(whole[0], out[0])
    if tq <= 16:
        for options in ({"causal": True}, {"causal": True, "lengths": lengths}):
            expected = sparse_attention(q, k, v, selection, path="tiles", **options)
            torch.testing.assert_close(sparse_attention(q, k, v, selection, **options), expected)


@pytest.mark.native
@settings(max_examples=20)
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 70), st.integers(1, 90)),
    d=st.integers(1, 40),
    shared=st.booleans(),
    density=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    causal=st.booleans(),
    lengths=st.one_of(st.none(), st.lists(st.integers(0, 90), min_size=2, max_size=2)),
    path=st.sampled_from([None, "tiles", "lists"]),
)
def test_any_shape(
    sizes: tuple[int, ...], d: int, shared: bool, density: float, causal: bool, lengths: Any, path: Any
) -> None:
    """Batches, groups of heads, queries without keys: results and gradients."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(sum(sizes) + d)
    b, g, group, tq, tk = sizes
    q, k, v = inputs(b, g * group, g, tq, tk, d, torch.float32, device, generator)
    mask = random_mask((b, 1 if shared else g, tq, tk), density, generator)
    if lengths is not None:
        lengths = torch.tensor(lengths[:b], device=device).clamp(max=tk)
    selection = Selection.from_mask(mask)
    check(q, k, v, selection, mask, generator, path=path, causal=causal, lengths=lengths)


@pytest.mark.native
def test_results_of_one_element() -> None:
    """Of which plain PyTorch's may be exact by luck."""
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = inputs(1, 1, 1, 1, 8, 1, torch.float32, torch.device("cpu"), generator)
        mask = random_mask((1, 1, 1, 8), 0.5, generator)
        check(q, k, v, Selection.from_mask(mask), mask, generator, causal=False)


@pytest.mark.parametrize("d", [3, 96, 256])
def test_head_dims(d: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    q, k, v = inputs(1, 2, 1, 40, 40, d, dtype, device, generator)
    mask = random_mask((1, 1, 40, 40), 0.3, generator)
    check(q, k, v, Selection.from_mask(mask), mask, generator)


@PATHS
@pytest.mark.parametrize("d, dv", [(24, 40), (192, 128), (8, 0), (0, 8), (300, 24), (24, 300), (576, 512)])
def test_values_of_another_width(
    d: int, dv: int, path: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Long rows are read by parts, and sums of many columns are those of several programs."""
    q, k, v = inputs(1, 4, 2, 40, 50, d, dtype, device, generator, dv)
    mask = random_mask((1, 2, 40, 50), 0.3, generator)
    lengths = torch.tensor([45], device=device)
    check(q, k, v, Selection.from_mask(mask), mask, generator, path=path, lengths=lengths, scale=0.2)


def test_values_are_the_first_columns_of_keys(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """As in latent attention, where values have the strides of keys."""
    q, k, _ = (x.detach() for x in inputs(1, 4, 1, 40, 50, 48, dtype, device, generator))
    mask = random_mask((1, 1, 40, 50), 0.3, generator)
    for few in (slice(None), slice(0, 3)):
        given = q[:, :, few], k, k[..., :32]
        exact, plain = (dense(*(x.to(t) for x in given), mask[:, :, few], causal=False) for t in (torch.float64, dtype))
        out = sparse_attention(*given, Selection.from_mask(mask[:, :, few]))
        assert_close(out, reference64=exact[0], plain=plain[0])


@pytest.mark.parametrize(
    "which, layout, tq",
    [
        ("qkv", "transposed", 70), ("qkv", "strided", 70), ("qkv", "tokens", 70), ("qk", "misaligned", 70),
        ("v", "tokens", 70), ("k", "expanded", 70), ("words", "transposed", 70), ("words", "expanded", 70),
        ("qkv", "tokens", 5), ("qk", "transposed", 3), ("q", "strided", 5), ("words", "expanded", 5),
    ],
)  # fmt: skip
def test_any_layout(which: str, layout: str, tq: int, device: torch.device, generator: torch.Generator) -> None:
    """Few queries go to the kernels of decoding."""
    leaves = dict(zip("qkv", inputs(2, 4, 2, tq, 70, 16, torch.float32, device, generator)))
    mask = random_mask((2, 1, tq, 70), 0.3, generator)
    selection = Selection.from_mask(mask)

    def arranged(x: Tensor) -> Tensor:
        if layout == "tokens":  # as a projection leaves them: [B, T, H, D]
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        return strategies.laid_out(x, layout)

    if which == "words":
        selection = replace(selection, words=arranged(selection.words))
        mask = selection.to_mask()
    else:
        leaves |= {name: arranged(leaves[name].detach()).requires_grad_() for name in which}
    check(*leaves.values(), selection, mask, generator)


@pytest.mark.parametrize("lists", [1 << 13])
def test_lists_in_pieces(
    lists: int, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What memory lists may take decides how many launches there are, and nothing else."""
    kernels = pytest.importorskip("gossamer.attention._triton.sparse_attention")
    q, k, v = inputs(2, 1, 1, 200, 200, 16, torch.float32, device, generator)
    selection = Selection.from_mask(random_mask((2, 1, 200, 200), 0.1, generator))

    def results() -> tuple[Tensor, ...]:
        out = sparse_attention(q, k, v, selection, path="lists", causal=True)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    whole = results()
    monkeypatch.setattr(kernels, "LIST_BYTES", lists)
    for a, b in zip(whole, results()):
        assert torch.equal(a, b)


@pytest.mark.kernels
@PATHS
def test_two_blocks_of_queries_a_program(
    path: str, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tile of Hopper, also where the second block is no more than begun, or not there."""
    kernels = pytest.importorskip("gossamer.attention._triton.sparse_attention")
    monkeypatch.setattr(kernels, "fwd_tile", lambda call: kernels.Tile(parts=2, keys=64, warps=8, stages=2))
    for tq, lengths in ((150, [200, 90]), (60, None)):
        q, k, v = inputs(2, 2, 1, tq, 200, 16, torch.float32, device, generator)
        mask = random_mask((2, 1, tq, 200), 0.2, generator)
        given = None if lengths is None else torch.tensor(lengths, device=device)
        options = {"lengths": given, "path": path, "return_lse": True}
        got = sparse_attention(q, k, v, Selection.from_mask(mask), **{"causal": True, **options})
        wanted = dense(q.double(), k.double(), v.double(), mask, lengths=given)
        torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1].double(), wanted[1], rtol=1e-5, atol=1e-5)


@PATHS
def test_queries_without_keys(path: str, device: torch.device, generator: torch.Generator) -> None:
    q, k, v = inputs(1, 2, 2, 200, 200, 16, torch.float32, device, generator)
    mask = random_mask((1, 1, 200, 200), 0.3, generator)
    mask[:, :, 3:20], mask[:, :, 64:150] = False, False
    check(q, k, v, Selection.from_mask(mask), mask, generator, path=path)
    out, lse = sparse_attention(q, k, v, Selection.from_mask(mask), return_lse=True, path=path, causal=True)
    dq = torch.autograd.grad(out.sum(), q)[0]
    for rows in (slice(3, 20), slice(64, 150)):
        assert not out[:, :, rows].any() and not dq[:, :, rows].any() and bool((lse[:, :, rows] == -math.inf).all())


@PATHS
def test_special_values(path: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    """NaN in a query stays in its row; in a key it reaches those who take it; nobody else notices."""
    q, k, v = (x.detach() for x in inputs(1, 1, 1, 300, 300, 16, dtype, device, generator))
    mask = random_mask((1, 1, 300, 300), 0.3, generator)
    mask[..., 7], mask[..., 250] = False, False
    q[0, 0, 5, 3], k[0, 0, 100, 2], k[0, 0, 40, 1] = math.nan, math.nan, math.inf
    # Keys that nobody takes are never read.
    k[0, 0, 7], v[0, 0, 7], k[0, 0, 250], v[0, 0, 250] = math.nan, math.nan, math.inf, math.nan
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sparse_attention(q, k, v, Selection.from_mask(mask), path=path, causal=True)[0, 0]
    for gradient in torch.autograd.grad(out.nan_to_num().sum(), (k, v)):
        assert not gradient[0, 0, [7, 250]].any()
    keep = visible(mask, 300, 300, True, None)[0, 0]
    touched = keep[:, 100] | (torch.arange(300, device=device) == 5)
    assert bool(out[touched & keep.any(1)].isnan().all())
    rest = ~touched & ~keep[:, 40]
    assert bool(out[rest].isfinite().all())


@pytest.mark.native
def test_autocast(device: torch.device, generator: torch.Generator) -> None:
    q, k, v = inputs(1, 2, 2, 70, 70, 16, torch.float32, device, generator)
    mask = random_mask((1, 1, 70, 70), 0.4, generator)
    with torch.autocast(device.type, torch.bfloat16):
        out = sparse_attention(q, k, v, Selection.from_mask(mask), causal=True)
    assert out.dtype is torch.bfloat16
    rounded = [x.detach().bfloat16() for x in (q, k, v)]
    exact, plain = dense(*(x.double() for x in rounded), mask)[0], dense(*rounded, mask)[0]
    assert_close(out, reference64=exact, plain=plain)
    assert all(g.dtype is torch.float32 for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.native
def test_compiled(compiled: Any, device: torch.device, generator: torch.Generator) -> None:
    """In one graph, with a selection that goes in and comes out of it."""
    q, k, v = inputs(1, 2, 2, 70, 70, 16, torch.float32, device, generator)
    selection = Selection.from_mask(random_mask((1, 1, 70, 70), 0.4, generator))

    def run(q: Tensor, k: Tensor, v: Tensor, selection: Selection) -> tuple[Tensor, Tensor]:
        out, lse = sparse_attention(q * 1.5, k, v, selection, return_lse=True, causal=True)
        return out * 2, lse

    for a, b in zip(compiled(run)(q, k, v, selection), run(q, k, v, selection)):
        assert torch.equal(a, b)
    ours, wanted = (torch.autograd.grad(f(q, k, v, selection)[0].sum(), (q, k, v)) for f in (compiled(run), run))
    for a, b in zip(ours, wanted):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"selection": torch.ones(1, 5, 6)}, TypeError, "selection must be an attention.Selection, got Tensor"),
        ({"q": torch.ones(1, 2, 5)}, ValueError, r"q must have shape \[B, H, Tq, D\]"),
        ({"k": torch.ones(1, 2, 7, 4)}, ValueError, r"k must have shape \[B, G, Tk, D\] = \[1, 2, 6, 4\] like q"),
        ({"v": torch.ones(1, 1, 6, 9)}, ValueError, r"v must have shape \[B, G, Tk, Dv\] = \[1, 2, 6, 9\] like k"),
        ({"q": torch.ones(1, 3, 5, 4)}, ValueError, r"k must have a number of heads that divides the H = 3 of q, got"),
        ({"k": torch.ones(1, 2, 6, 4).half()}, TypeError, "q, k and v must have one dtype, got float32, float16"),
        ({"k": torch.ones(1, 2, 6, 4, device="meta")}, ValueError, "k must be on cpu like q, got meta"),
        ({"q": torch.ones(1, 2, 4, 4)}, ValueError, r"selection must be of \[B, Tq\] = \[1, 4\] like q, got \[1, 5\]"),
        ({"q": torch.ones(1, 4, 5, 4), "scopes": 3}, ValueError, "S = 1 scope, one for each of the G = 2 heads"),
        ({"lengths": torch.ones(2).long()}, ValueError, r"lengths must have shape \[B\] = \[1\] like q, got \[2\]"),
        ({"lengths": torch.ones(1)}, TypeError, "lengths must be int32 or int64, got float32"),
        ({"path": "tile"}, ValueError, "path must be one of decode, tiles, lists, .* got 'tile' with 5"),
        ({"scale": 0.0}, ValueError, "scale must be above 0 and finite, got 0.0. None gives the width"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    mask = torch.ones(1, change.get("scopes", 1), 5, 6, dtype=torch.bool)
    given = {"q": torch.ones(1, 2, 5, 4), "k": torch.ones(1, 2, 6, 4), "v": torch.ones(1, 2, 6, 4)}
    given |= {"selection": Selection.from_mask(mask), **{key: x for key, x in change.items() if key != "scopes"}}
    with pytest.raises(error, match=f"attention.sparse_attention: .*{message}"):
        sparse_attention(**given)


@pytest.mark.native
@pytest.mark.parametrize("given, path", [((16, 10**5), "decode"), ((1024, 1024), "tiles"), ((17, 1025), "lists")])
def test_path(given: tuple[int, ...], path: str) -> None:
    assert choose_path(*given) == path

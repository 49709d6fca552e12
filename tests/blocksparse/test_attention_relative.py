"""Relative positions in `blocksparse.attention`, against dense float64."""

import io
import math

import pytest
import torch

from gossamer.blocksparse import Layout, Relative, attention
from tests.blocksparse.attention_oracle import check, problem, terms_for


@pytest.mark.parametrize(
    "size, heads",
    [
        ((40, 50), (2, 2)),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (((40, 40), (4, 2)), ((20, 16), (1, 1)))),
    ],
    ids=str,
)
def test_relative_positions(size, heads, dtype: torch.dtype, device: torch.device) -> None:
    given = problem(device, dtype, (2,) if heads[0] == 2 else (), (16, 16), size, heads, 16)
    terms = terms_for(device, dtype, *size, 16, heads[0])
    check(*given, terms=terms[::-1], causal=True, lengths=torch.tensor([size[1], 7], device=device))


def test_one_term_beside_a_bias(dtype: torch.dtype, device: torch.device) -> None:
    given = problem(device, dtype, (2, 1), (16, 32), (40, 50), (2, 1), 16)
    bias = torch.randn(2, 1, 40, 50, device=device).to(dtype).requires_grad_()
    check(*given, terms=terms_for(device, dtype, 40, 50, 16, 2)[:1], bias=bias, scale=0.3)


def test_one_relative_term_needs_no_list(device: torch.device) -> None:
    q, k, v, _, layout = problem(device, torch.float32, (2,), (16, 16), (40, 50), (2, 2), 16)
    term = terms_for(device, torch.float32, 40, 50, 16, 2)[0]
    assert torch.equal(attention(q, k, v, layout, relative=term), attention(q, k, v, layout, relative=[term]))


@pytest.mark.parametrize("beyond", [False, True])
@pytest.mark.parametrize("rows, first", [(1, 0), (4, -3), (5, 2), (6, -9)])
def test_bounds_that_are_not_symmetric(rows: int, first: int, beyond: bool, device: torch.device) -> None:
    """Row r belongs to the relative position first + r, and beyond them stand the outermost rows, or zeros."""
    q, k, v, grad, layout = problem(device, torch.float32, (), (16, 16), (40, 50), (2, 2), 16, density=1)
    table = torch.randn(2, rows, 16, device=device, requires_grad=True)
    places = torch.arange(40, device=device, dtype=torch.int8), torch.arange(50, device=device, dtype=torch.int8)
    out = attention(q, k, v, layout, relative=Relative.starting_at(table, *places, first, zeros_beyond=beyond))
    at = places[1][None, :].long() - places[0][:, None].long() - first
    wide = table.double()[:, at.clamp(0, rows - 1)]
    if beyond:
        wide = wide * ((at >= 0) & (at < rows))[..., None]
    scores = torch.einsum("bhqd,bhqkd->bhqk", q.double(), k.double()[:, :, None] + wide) / 4
    wanted = scores.softmax(-1) @ v.double()
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    (ours,), (theirs,) = (torch.autograd.grad(x, table, grad.to(x.dtype)) for x in (out, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("query, key", [(-(1 << 30), 1 << 30), (1 << 30, -(1 << 30))])
def test_positions_that_are_far_apart(query: int, key: int, device: torch.device) -> None:
    """A difference of two positions within 2^30 may be beyond int32, and so may the start of a table."""
    q, k, v = torch.randn(3, 1, 1, 16, 8, device=device)
    table, layout = torch.randn(1, 3, 8, device=device), Layout.full((1, 1), 16, device=device)
    places = torch.full((16,), query, device=device)
    # Half of the keys stand beside the queries.
    others = torch.where(torch.arange(16, device=device) < 8, key, query)
    rows = torch.where(others == query, 1, 2 if key > query else 0)
    wanted = ((q @ (k + table[0, rows]).mT) * 8**-0.5).softmax(-1) @ v
    torch.testing.assert_close(attention(q, k, v, layout, relative=Relative(table, places, others)), wanted)
    near = torch.arange(16, device=device)
    last = [Relative.starting_at(table, near, near, first) for first in (-20, -(1 << 32), -(1 << 80))]
    outs = [attention(q, k, v, layout, relative=term) for term in last]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_plain_load_reads_a_term(device: torch.device) -> None:
    term, file = terms_for(device, torch.float32, 40, 50, 16, 2)[0], io.BytesIO()
    torch.save(term, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded.table, term.table) and loaded.clip == term.clip


def test_queries_behind_their_length_do_not_reach_the_table(device: torch.device) -> None:
    """In a causal call they may hold anything, NaN included."""
    q, k, v, _, layout = problem(device, torch.float32, (), (16, 16), (64, 64), (2, 2), 16, density=1)
    table, places = torch.randn(2, 9, 16, device=device, requires_grad=True), torch.arange(64, device=device)
    lengths = torch.full((len(q),), 64, device=device)
    lengths[-1] = 40
    behind = (torch.arange(64, device=device) >= lengths[:, None])[:, None, :, None]
    results = []
    for filled in (0, math.nan):
        x = q.masked_fill(behind, filled).requires_grad_()
        relative = Relative(table, places, places)
        out = attention(x, k, v, layout, relative=relative, causal=True, lengths=lengths)
        results.append((out, *torch.autograd.grad(out.square().sum(), (x, table))))
    for got, wanted in zip(results[1], results[0]):
        torch.testing.assert_close(got, wanted)


def test_errors_of_relative() -> None:
    places = torch.arange(4)
    with pytest.raises(ValueError, match=r"blocksparse\.Relative: table must have shape \[H, R, D\] with an odd R"):
        Relative(torch.ones(1, 4, 8), places, places)
    with pytest.raises(TypeError, match=r"blocksparse\.Relative: key_positions must be integers, got float32"):
        Relative(torch.ones(1, 5, 8), places, places.float())
    with pytest.raises(ValueError, match=r"table must have shape \[H, R, D\] with R of at least 1"):
        Relative.starting_at(torch.ones(1, 0, 8), places, places, 0)
    with pytest.raises(TypeError, match=r"blocksparse\.Relative: key_positions must be integers, got float32"):
        Relative.starting_at(torch.ones(1, 4, 8), places, places.float(), 0)
    with pytest.raises(TypeError, match=r"blocksparse\.Relative: first must be an int, .* got 1.5"):
        Relative.starting_at(torch.ones(1, 4, 8), places, places, 1.5)  # type: ignore[arg-type]
    q = torch.ones(1, 1, 16, 8)
    with pytest.raises(TypeError, match=r"relative must hold blocksparse\.Relative terms, got int"):
        attention(q, q, q, Layout.full((1, 1), 16), relative=3)  # type: ignore[arg-type]

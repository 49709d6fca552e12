"""The order in which programs of `blocksparse.attention` begin: each line once, the last ones longest first."""

import pytest
import torch

from gossamer._core import tuning
from gossamer.blocksparse import Layout
from gossamer.blocksparse.attention_path import Problem

attention_order = pytest.importorskip("gossamer.blocksparse._gluon.attention_order", exc_type=ImportError)
pytestmark = pytest.mark.kernels


def _problem(b: int, h: int, key_heads: int, own: tuple[bool, bool], rows: int, cols: int, causal: bool) -> Problem:
    return Problem(b, h, key_heads, rows * 64, cols * 64, 64, own, (64, 64), causal, 1.0)


@pytest.mark.parametrize("own", [(False, False), (False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("group", [1, 2])
def test_last_lines_longest_first(own, group: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    b, h, rows, cols = 2, 4, 9, 7
    generator = torch.Generator(device).manual_seed(0)
    lead = (b if own[0] else 1, h if own[1] else 1)
    layout = Layout.random((*lead, rows, cols), 64, 0.5, generator=generator, device=device)
    problem = _problem(b, h, h // group, own, rows, cols, False)
    for window in (1, 5, 40, 10_000):
        monkeypatch.setattr(attention_order, "ordered", lambda total, *_, window=window: min(total, window))
        order, first, _ = attention_order.launch_order(problem, layout.col_offsets, cols, 1, group)
        # Blocks of each column, of all heads that share it.
        blocks = layout.to_dense().expand(b, h, rows, cols).sum(-2).view(b, h // group, group, cols).sum(2).flatten()
        assert first == max(0, len(blocks) - window)
        wanted = first + blocks[first:].sort(descending=True, stable=True).indices
        assert torch.equal(order.long(), wanted)


def test_nothing_to_order(device: torch.device) -> None:
    """Below a diagonal, and where one wave holds all."""
    layout = Layout.full((2, 300, 4), 64, device=device)
    below = _problem(1, 2, 2, (False, True), 300, 4, True)
    assert attention_order.launch_order(below, layout.row_offsets, 300, 1) == (None, 600, None)
    assert attention_order.ordered(5, 1, device) == 0


def test_window(device: torch.device) -> None:
    """All of two waves, or the last two of more; a line of two programs counts twice."""
    wave = attention_order.RESIDENT * tuning.programs(device)
    assert attention_order.ordered(wave, 1, device) == 0
    assert attention_order.ordered(wave + 1, 1, device) == wave + 1
    assert attention_order.ordered(50 * wave, 1, device) == 2 * wave
    assert attention_order.ordered(50 * wave, 2, device) == 2 * (wave // 2)

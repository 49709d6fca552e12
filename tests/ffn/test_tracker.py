"""What a block knows of its sparsity, and which path it takes by that: eager, captured, compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import ffn, nn
from gossamer._core import checks
from gossamer.rowsparse import Density
from tests.ffn.dense import METHODS, call, check, operands
from tests.graphs import captured


def chosen(known: Density | None, eager: bool) -> str:
    if known is None:
        return "fused"
    return "dense" if eager else "gather"


def seen(tracker: ffn.BlockTracker, counts: Tensor, limit: int = 10, calls: int = 2) -> None:
    for _ in range(calls):
        tracker.path(chosen)
        tracker.record(counts, limit)
    tracker.path(chosen)


def test_a_graph_and_a_compiled_region_go_by_the_device_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the path last taken, which a slow host may have decided; and nothing is counted."""
    for module, name in ((checks, "capturing"), (torch.compiler, "is_compiling")):
        tracker = ffn.BlockTracker(lag=1)
        with monkeypatch.context() as patched:
            patched.setattr(module, name, lambda: True)
            assert tracker.path(chosen) == "fused"
        seen(tracker, torch.full((3,), 7, dtype=torch.int32, device=device))
        assert tracker.last_path == "dense"
        with monkeypatch.context() as patched:
            patched.setattr(module, name, lambda: True)
            assert tracker.path(chosen) == tracker.last_path == "gather"
        assert tracker.path(chosen) == "dense"
        tracker.rows.pinned = "gather"
        for taken in (True, False):
            with monkeypatch.context() as patched:
                patched.setattr(module, name, lambda taken=taken: taken)
                assert tracker.path(chosen) == "gather"


def test_how_often_is_looked() -> None:
    tracker = ffn.BlockTracker(lag=1)
    assert [tracker.due(4) for _ in range(3)] == [True] * 3
    seen(tracker, torch.zeros(2, dtype=torch.int32), calls=1)
    assert [tracker.due(4) for _ in range(8)] == [False, True, False, False, False, True, False, False]


def test_a_path_is_chosen_once_for_what_is_known() -> None:
    """Of each number of rows; where nothing was recorded nothing is read."""
    tracker, asked = ffn.BlockTracker(lag=1), []

    def choose(known: Density | None, eager: bool) -> str:
        asked.append((known, eager))
        return chosen(known, eager)

    for key in (1, 1, 2, 1):
        assert tracker.path(choose, due=False, key=key) == "fused"
    assert [eager for _, eager in asked] == [True, False] * 2
    tracker.path(choose, key=1)
    tracker.record(torch.ones(3, dtype=torch.int32), 10)
    assert tracker.path(choose, due=False, key=1) == "fused"
    assert tracker.path(choose, key=1) == "dense"
    assert len(asked) == 6 and asked[-1][0] is not None


def test_what_is_light_may_become_heavy(device: torch.device, generator: torch.Generator) -> None:
    """The launch that expects no heavy row computes those that come nevertheless."""
    a, tracker = operands((40, 24, 300, 40), torch.float32, device, generator), ffn.BlockTracker(pinned="gather")
    check(a, call(a, density=tracker))
    full = {**a, "gate_bias": torch.full_like(a["gate_bias"], 9.0)}
    check(full, call(full, density=tracker))


@pytest.mark.gpu
def test_captured(device: torch.device, generator: torch.Generator) -> None:
    for m in (4, 40):
        a, tracker = operands((m, 24, 300, 40), torch.float32, device, generator), ffn.BlockTracker(lag=1)
        for _ in range(4):
            call(a, density=tracker)
        graph, out = captured(lambda a=a, tracker=tracker: call(a, density=tracker))
        assert tracker.last_path in METHODS
        for _ in range(2):
            out.fill_(float("nan"))
            graph.replay()
            check(a, out)


@pytest.mark.native
def test_compiled(compiled: Callable[..., Any], device: torch.device, generator: torch.Generator) -> None:
    a, tracker = operands((4, 24, 300, 40), torch.float32, device, generator), ffn.BlockTracker(lag=1)
    for _ in range(4):
        call(a, density=tracker)
    check(a, compiled(lambda a: call(a, density=tracker))(a))


@pytest.mark.native
def test_compiled_once(device: torch.device, generator: torch.Generator) -> None:
    """Whatever is called between, and however often; counts of calls are no guards. Layers share what is compiled."""
    made: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        made.append(graph)
        return graph.forward

    blocks = [nn.GatedMLP(24, 96, "relu", method="auto", device=device).requires_grad_(False) for _ in range(2)]
    step = torch.compile(lambda block, x: block(x), fullgraph=True, dynamic=False, backend=backend)
    x, other = (torch.randn(m, 24, device=device, generator=generator) for m in (40, 8))
    for block in blocks:
        block(x)
    torch._dynamo.reset()
    for turn in range(6):
        for block in blocks:
            torch.testing.assert_close(step(block, x), block(x))
            block(other[: 1 + turn])
    assert len(made) <= 2
    torch._dynamo.reset()


def test_a_lag_of_no_calls() -> None:
    with pytest.raises(ValueError, match=r"ffn.BlockTracker: lag must be"):
        ffn.BlockTracker(lag=0)

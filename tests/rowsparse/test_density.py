"""Statistics that arrive late, and the paths chosen from them."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gossamer import ffn, nn
from gossamer.rowsparse import Density, DensityTracker


def dense_above(limit: float) -> Any:
    return lambda known: "sparse" if known is None or known.mean <= limit else "dense"


class Layer:
    """x in, x out: its rows have as many entries as they are told."""

    def __init__(self, lag: int = 2) -> None:
        self.tracker, self.paths = DensityTracker(lag), []

    def __call__(self, x: Tensor, count: int, training: bool = True) -> Tensor:
        self.paths.append(self.tracker.path(dense_above(10), training=training))
        out = x * x
        counts = torch.full((3,), count, dtype=torch.int32, device=x.device)
        self.tracker.record(counts, training=training)
        return out


@pytest.mark.parametrize("counts", [[0, 3, 7, 7, 100], [], [5], list(range(700))])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_what_is_known(counts: list[int], dtype: torch.dtype, device: torch.device) -> None:
    tracker = DensityTracker(lag=1)
    tracker.record(torch.tensor(counts, dtype=dtype, device=device), training=False, limit=6)
    tracker.path(dense_above(1), training=False)
    mean = sum(counts) / max(len(counts), 1)
    want = Density(
        len(counts), mean, max(counts, default=0), sum(c > 6 for c in counts), sum(c for c in counts if c <= 6)
    )
    assert tracker.known(training=False) == want
    assert tracker.known(training=True) is None


@pytest.mark.native
@pytest.mark.parametrize("lag", [1, 2, 5])
def test_a_call_knows_what_was_lag_calls_before(lag: int, device: torch.device) -> None:
    layer = Layer(lag)
    for count in [100, 1, 100, 100, 1, 1, 1, 100, 1, 1]:
        layer(torch.ones(3, device=device), count, training=False)
    told = ["sparse"] * lag + ["dense" if c > 10 else "sparse" for c in [100, 1, 100, 100, 1, 1, 1, 100, 1, 1]]
    assert layer.paths == told[:10]


@pytest.mark.native
def test_training_and_inference_have_a_history_each(device: torch.device) -> None:
    layer, x = Layer(1), torch.ones(3, device=device)
    for _ in range(3):
        layer(x, 100, training=False)
        layer(x, 1, training=True)
    assert layer.paths == ["sparse", "sparse", "dense", "sparse", "dense", "sparse"]


@pytest.mark.native
def test_no_graph_keeps_the_path_from_changing(device: torch.device) -> None:
    """Such as a validation loss that nobody calls backward on, in training mode, with a graph or without."""
    layer, x = Layer(1), torch.ones(3, device=device, requires_grad=True)
    checkpoint(layer, x, 1, use_reentrant=True).sum().backward()
    kept = layer(x, 100)
    with torch.no_grad():
        layer(x, 100)
    checkpoint(layer, x, 1, use_reentrant=True).sum().backward()
    assert kept.grad_fn is not None and layer.paths[-2:] == ["dense", "dense"]
    checkpoint(layer, x, 1, use_reentrant=True).sum().backward()
    assert layer.paths[-2:] == ["sparse", "sparse"]


@pytest.mark.native
@pytest.mark.parametrize("micro_batches", [1, 3, 6])
def test_what_is_computed_again_takes_the_same_path_uncounted(micro_batches: int, device: torch.device) -> None:
    layer, x = Layer(2), torch.ones(3, device=device, requires_grad=True)
    for step in range(6):
        outs = [
            checkpoint(layer, x, 100 if (step + call) % 3 else 1, use_reentrant=False) for call in range(micro_batches)
        ]
        seen = len(layer.paths)
        for out in reversed(outs):
            out.sum().backward()
        first, again = layer.paths[seen - micro_batches : seen], layer.paths[seen:]
        assert again == list(reversed(first))
    assert {"dense", "sparse"} <= set(layer.paths)
    assert len(layer.tracker._histories[True]._pending) == layer.tracker.lag


@pytest.mark.native
@pytest.mark.parametrize("outer, inner", [(True, None), (True, True), (True, False), (False, True), (False, False)])
def test_a_first_run_that_is_not_seen(outer: bool, inner: bool | None, device: torch.device) -> None:
    """A reentrant checkpoint takes the path last taken; neither it nor a checkpoint within another counts twice."""
    layer, x = Layer(1), torch.ones(3, device=device, requires_grad=True)

    def block(x: Tensor, count: int) -> Tensor:
        return layer(x, count) if inner is None else checkpoint(layer, x, count, use_reentrant=inner)

    outs = [checkpoint(block, x, count, use_reentrant=outer) for count in (100, 1, 100)]
    assert layer.paths == ["sparse", "dense", "sparse"]
    for out in outs:
        out.sum().backward()
    assert not outer or set(layer.paths[3:]) == {"sparse"}
    assert len(layer.tracker._histories[True]._pending) == 1
    assert torch.equal(x.grad, torch.full_like(x, 6.0))


@pytest.mark.native
def test_a_graph_that_is_kept_is_computed_again_twice(device: torch.device) -> None:
    layer, x = Layer(1), torch.ones(3, device=device, requires_grad=True)
    twice = lambda x: layer(layer(x, 100), 1)  # noqa: E731
    outs = [checkpoint(twice, x, use_reentrant=False) for _ in range(2)]
    first = layer.paths[:]
    for _ in range(2):
        outs[0].sum().backward(retain_graph=True)
    assert first == ["sparse", "dense", "sparse", "dense"] and layer.paths[4:] == ["sparse", "dense"] * 2


def test_pinned_and_shown(device: torch.device) -> None:
    tracker = DensityTracker(pinned="dense")
    assert tracker.path(dense_above(1), training=False) == tracker.last_path == "dense"
    tracker.pinned = None
    assert tracker.path(dense_above(1), training=False) == "sparse"
    assert repr(tracker) == "DensityTracker(lag=4, last_path='sparse')"


def test_a_path_that_no_call_takes_is_not_pinned(device: torch.device) -> None:
    """A name with a slip in it is no other path."""
    x, W = torch.ones(2, 8, device=device), torch.ones(8, 8, device=device)
    model = nn.TopKSAE(8, 16, 2, device=device)
    model.density.pinned = "Dense"
    for call, paths in (
        (lambda: model(x), "sparse, dense"),
        (lambda: ffn.gated(x, W, W, W, density=ffn.BlockTracker(pinned="Dense")), "gather, fused, dense"),
    ):
        with pytest.raises(ValueError, match=f"pinned must be None or name a path .* take, {paths}, got 'Dense'"):
            call()
    model.density.pinned = "dense"
    model(x)
    assert model.last_path == "dense"


def test_copies_start_anew(device: torch.device) -> None:
    tracker = DensityTracker(lag=1, pinned="dense")
    tracker.record(torch.ones(3, device=device), training=True)
    tracker.path(dense_above(1), training=True)
    for other in (copy.deepcopy(tracker), pickle.loads(pickle.dumps(tracker))):
        assert (other.lag, other.pinned, other.last_path, other.known(training=True)) == (1, "dense", None, None)


@pytest.mark.native
def test_compiled_calls_record_nothing(device: torch.device, compiled) -> None:
    layer, x = Layer(1), torch.ones(3, device=device)
    layer(x, 100, training=False)
    layer(x, 100, training=False)
    pending = len(layer.tracker._histories[False]._pending)

    def call(x: Tensor) -> Tensor:
        path = layer.tracker.path(dense_above(10), training=False)
        layer.tracker.record(torch.ones(3, device=x.device), training=False)
        return x * (2 if path == "dense" and layer.tracker.basis(training=False) is None else 3)

    basis = layer.tracker.basis(training=False)
    assert basis is not None and basis.mean == 100
    assert compiled(call)(x).tolist() == [2.0] * 3
    assert len(layer.tracker._histories[False]._pending) == pending


@pytest.mark.gpu
def test_captured_calls_record_nothing(device: torch.device) -> None:
    layer, x = Layer(1), torch.ones(3, device=device)
    layer(x, 100, training=False)
    layer(x, 100, training=False)
    pending = len(layer.tracker._histories[False]._pending)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, 1, training=False)
    assert layer.paths[-1] == "dense" and len(layer.tracker._histories[False]._pending) == pending


@pytest.mark.parametrize("lag, error", [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_bad_lag(lag: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"rowsparse\.DensityTracker: lag must"):
        DensityTracker(lag)


@pytest.mark.native
def test_inference_mode_comes_and_goes(device: torch.device) -> None:
    layer, x = Layer(1), torch.ones(3, device=device)
    for inference in (True, False, True, False):
        with torch.inference_mode(inference):
            layer(x, 100, training=False)
    assert layer.paths == ["sparse", "dense", "dense", "dense"]


def test_what_a_pinned_layer_records_is_read() -> None:
    """It would pile up else; and says how dense the layer is."""
    tracker = DensityTracker(lag=2, pinned="sparse")
    for mean in (3, 5, 7):
        assert tracker.path(dense_above(1), training=False) == "sparse"
        tracker.record(torch.full((4,), mean), training=False)
    known = tracker.known(training=False)
    assert known is not None and known.mean == 3

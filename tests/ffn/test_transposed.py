"""The transposed copy of a weight follows the weight."""

import copy
import pickle

import pytest
import torch

from gossamer.ffn.tracker import BlockTracker
from gossamer.ffn.transposed import Transposed


def test_it_is_renewed_when_the_weight_changes(device: torch.device) -> None:
    kept, weight = Transposed(), torch.nn.Parameter(torch.randn(5, 7, device=device))
    first = kept(weight)
    assert first is not None and first.is_contiguous() and first.equal(weight.t())
    assert kept(weight) is first and kept.nbytes == 4 * 5 * 7
    with torch.no_grad():
        weight.add_(1)
    second = kept(weight)
    assert second is not None and second is not first and second.equal(weight.t())
    weight.data = torch.randn(5, 7, device=device)
    assert kept(weight).equal(weight.t())  # type: ignore[union-attr]
    other = torch.nn.Parameter(weight.detach().clone())
    assert kept(other).equal(other.t()) and kept(weight).equal(weight.t())  # type: ignore[union-attr]


@pytest.mark.gpu
def test_another_stream_waits_for_the_copy() -> None:
    weight = torch.nn.Parameter(torch.randn(4096, 4096, device="cuda"))
    kept, made, reads = Transposed(), torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(made):
        torch.cuda._sleep(50_000_000)
        kept(weight)
    with torch.cuda.stream(reads):
        found = kept.held(weight).clone()  # type: ignore[union-attr]
    torch.cuda.synchronize()
    assert found.equal(weight.t())


def test_what_is_held_is_not_renewed(device: torch.device) -> None:
    kept, weight = Transposed(), torch.nn.Parameter(torch.randn(5, 7, device=device))
    assert kept.held(weight) is None and kept.nbytes == 0
    made = kept(weight)
    assert kept.held(weight) is made and kept.held(torch.nn.Parameter(weight.detach())) is None
    with torch.no_grad():
        weight.add_(1)
    assert kept.held(weight) is None and kept.nbytes
    assert kept.held(weight) is None and kept(weight) is kept.held(weight)
    if device.type == "cuda":
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            assert kept.held(weight) is None


def test_nothing_is_kept_of_what_cannot_be_followed(device: torch.device) -> None:
    kept = Transposed()
    with torch.inference_mode():
        assert kept(torch.randn(5, 7, device=device)) is None
    if device.type == "cuda":
        weight = torch.randn(5, 7, device=device)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            assert kept(weight) is None
    assert kept.nbytes == 0


def test_copies_start_anew() -> None:
    kept, tracker = Transposed(), BlockTracker(lag=2, pinned="gather")
    kept(torch.randn(3, 4))
    for copied in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert copied.nbytes == 0
    tracker.light, tracker.last_path = True, "gather"
    for other in (copy.deepcopy(tracker), pickle.loads(pickle.dumps(tracker))):
        assert (other.rows.lag, other.rows.pinned) == (2, "gather")
        assert not other.light and other.last_path is None


def test_a_weight_stored_by_columns_is_its_own_transpose(device: torch.device) -> None:
    """Also where no copy could be kept."""
    kept, weight = Transposed(), torch.randn(7, 5, device=device).t()
    assert not kept(weight[:4]).is_set_to(weight[:4].t())  # type: ignore[union-attr]
    for _ in range(2):
        assert kept(weight).is_set_to(weight.t()) and kept.nbytes == 0  # type: ignore[union-attr]
    with torch.inference_mode():
        weight = torch.randn(7, 5, device=device).t()
        assert kept(weight).is_set_to(weight.t())  # type: ignore[union-attr]

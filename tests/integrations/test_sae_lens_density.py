"""Patched autoencoders of SAELens whose latents are so many that dense products are faster: the paths of passes."""

import copy
import pickle
from typing import Any

import pytest
import torch

pytest.importorskip("sae_lens")

from sae_lens import JumpReLUSAE, JumpReLUSAEConfig
from sae_lens.saes.sae import TrainingSAE

import gossamer
from gossamer.integrations.sae_lens import patch, unpatch
from gossamer.rowsparse import DensityTracker
from tests.integrations import test_sae_lens as inference
from tests.integrations import test_sae_lens_training as training
from tests.integrations.models import gradients
from tests.integrations.test_host import functions
from tests.integrations.test_sae_lens_training import D_SAE, activations, make, step


def fire(sae: TrainingSAE[Any], threshold: float) -> TrainingSAE[Any]:
    """A JumpReLU SAE whose pre-activations are around 0."""
    sae.b_enc.data.zero_()
    sae.threshold.data.fill_(threshold)
    return sae


@pytest.mark.parametrize("kind", training.KINDS)
def test_dense_is_what_saelens_computes(kind: str, device: torch.device) -> None:
    plain, x = make(kind, device), activations(device)
    patched = copy.deepcopy(plain)
    density = patch(patched).density
    density.pinned = "dense"
    ours, theirs = step(patched, x, dead=5), step(plain, x, dead=5)
    assert density.last_path == "dense" and type(ours.feature_acts) is type(ours.hidden_pre) is torch.Tensor
    assert torch.equal(ours.loss, theirs.loss) and torch.equal(ours.feature_acts, theirs.feature_acts)
    for name, grad in gradients(plain).items():
        assert torch.equal(gradients(patched)[name], grad), name
    with torch.no_grad():
        assert torch.equal(patched(x), plain(x))
        patched.use_error_term = plain.use_error_term = True
        assert torch.equal(patched(x), plain(x))


@pytest.mark.parametrize("kind", inference.KINDS)
def test_dense_inference(kind: str, device: torch.device) -> None:
    (plain, patched), x = inference.pair(kind, device), inference.activations(device)
    patched._gossamer.report.density.pinned = "dense"
    with torch.no_grad():
        assert torch.equal(patched(x), plain(x))
        torch.testing.assert_close(patched.run_with_cache(x)[0], plain.run_with_cache(x)[0])


def test_the_path_follows_the_rows(device: torch.device) -> None:
    """Half of the latents fire: dense from the first training pass on; in inference once that is known."""
    sae, x = fire(make("jumprelu", device), 0.01), activations(device)
    density = patch(sae).density
    paths = []
    for _ in range(7):
        with torch.no_grad():
            sae(x)
        paths.append(density.last_path)
        step(sae, x)
        assert density.last_path == "dense"
    assert paths == ["sparse"] * 4 + ["dense"] * 3
    entries = [density.known(training=training) for training in (True, False)]
    assert all(0.4 * D_SAE < known.mean < 0.7 * D_SAE for known in entries if known is not None) and None not in entries
    fire(sae, 3.0)
    for _ in range(6):
        step(sae, x)
    assert density.last_path == "sparse"


def test_passes_that_are_known_to_be_dense(device: torch.device) -> None:
    """They run the functions of SAELens, but for one of eight, which is counted; and so few entries are seen."""
    plain, x = fire(inference.make("jumprelu", device), 0.01), inference.activations(device)
    sae = copy.deepcopy(plain)
    density = patch(sae).density
    least, found = functions(lambda: plain(x)), [functions(lambda: sae(x), before) for before in [20, *[0] * 15]]
    assert density.last_path == "dense" and sum(count <= least + 1 for count in found) == 14
    with torch.no_grad():
        assert torch.equal(sae(x), plain(x))
        density.pinned = "sparse"
        assert sae(x).shape == x.shape and density.last_path == "sparse"
        density.pinned = None
        fire(sae, 3.0)
        for _ in range(50):
            sae(x)
    assert density.last_path == "sparse"


@pytest.mark.gpu
@pytest.mark.parametrize("rows, path", [(1, "dense"), (4096, "sparse")])
def test_few_rows_of_eager_passes(rows: int, path: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host takes longer for a packed pass than the device saves; in a CUDA graph it takes no part."""
    from gossamer.integrations.sae_lens._direct import pays

    monkeypatch.setattr("gossamer.integrations.sae_lens.pays", pays)
    sae = JumpReLUSAE(JumpReLUSAEConfig(d_in=768, d_sae=24576, device=str(device)))
    sae.threshold.data.fill_(1e3)
    density, x = patch(sae).density, torch.randn(rows, 768, device=device)
    with torch.no_grad():
        for _ in range(20):
            sae(x)
        assert density.last_path == path
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sae(x)
        assert density.last_path == "sparse"


def test_both_ways_count_the_same_entries(device: torch.device) -> None:
    """With those in the window below a threshold, which a step in training stores."""
    found = []
    for path in ("sparse", "dense"):
        sae, x = fire(make("jumprelu", device), 0.5), activations(device)
        density = patch(sae).density
        density.pinned = path
        for _ in range(4):
            step(sae, x)
        density.pinned = None
        step(sae, x)
        found.append(density.known(training=True))
    assert found[0] == found[1] and found[0] is not None
    pre = x @ sae.W_enc - sae.b_dec @ sae.W_enc if sae.cfg.apply_b_dec_to_input else x @ sae.W_enc
    assert found[0].mean == pytest.approx((pre > 0.5 - sae.bandwidth / 2).sum(1).double().mean().item(), abs=0.1)


@pytest.mark.parametrize("kind", ["topk", "batchtopk"])
def test_k_is_known_without_looking(kind: str, device: torch.device) -> None:
    for k, path in ((2, "sparse"), (180, "dense")):
        sae = make(kind, device, k=k)
        density = patch(sae).density
        step(sae, activations(device))
        assert density.last_path == path and density.known(training=True) is None


def test_copies_keep_what_is_pinned(device: torch.device) -> None:
    sae, x = make("jumprelu", device), activations(device)
    patch(sae).density.pinned = "dense"
    again = copy.deepcopy(sae)
    assert type(step(again, x).feature_acts) is torch.Tensor
    # The rest of a SAELens SAE cannot be pickled.
    assert pickle.loads(pickle.dumps(again._gossamer)).report.density.pinned == "dense"
    unpatch(again)
    assert type(step(sae, x).feature_acts) is torch.Tensor


def test_a_run_that_becomes_sparse(device: torch.device) -> None:
    """Both ways in one run, and the losses of SAELens."""
    losses = []
    for patched in (False, True):
        sae = fire(make("jumprelu", device, l0_coefficient=0.02), 0.01)
        density = patch(sae).density if patched else None
        optimizer = torch.optim.Adam(sae.parameters(), lr=1e-3)
        paths, found = [], []
        for at, x in enumerate(training.batches(device, 60)):
            # What a penalty does in thousands of steps.
            sae.threshold.data.add_(0.2 if at > 10 else 0)
            output = step(sae, x)
            optimizer.step()
            found.append(output.losses["mse_loss"].item())
            paths.append(density.last_path if density else "")
        losses.append(torch.tensor(found))
    assert paths[0] == "dense" and paths[-1] == "sparse"
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)


def test_warm_up_takes_both_paths(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    sae, taken = inference.make("jumprelu", device), set()
    density = patch(sae).density
    check = DensityTracker.check_pinned

    def spy(self: DensityTracker, *paths: str) -> None:
        taken.add(self.pinned)
        check(self, *paths)

    monkeypatch.setattr(DensityTracker, "check_pinned", spy)
    gossamer.warm_up(sae, inference.activations(device))
    assert taken == {"sparse", "dense"} and density.pinned is None and density.last_path is None


@pytest.mark.native
def test_small_decoders_are_compiled_once_for_many_numbers_of_rows() -> None:
    sae = inference.make("standard", torch.device("cpu"))
    patch(sae)
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    decode = torch.compile(sae.decode, backend=count, fullgraph=True)
    with torch.no_grad():
        for rows in range(3, 9):
            decode(torch.rand(rows, sae.W_dec.shape[0]))
    assert len(graphs) <= 2


@pytest.mark.native
def test_a_small_pass_within_a_pass_takes_no_turn_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sae = inference.make("standard", torch.device("cpu"))
    density = patch(sae).density
    monkeypatch.setattr("gossamer.integrations.sae_lens.is_small", lambda self, x, name: len(x) == 2)
    x = inference.activations(torch.device("cpu"))

    def inner(module: Any, args: Any, out: Any) -> None:
        if len(out) != 2:
            sae(x[:2])

    with torch.no_grad():
        plain = sae(x)
        sae.hook_sae_input.register_forward_hook(inner)
        density.last_path = None
        assert torch.equal(sae(x), plain) and density.last_path == "sparse"

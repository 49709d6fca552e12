"""The study of coactivation: orders that bring together what fires together."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.sparsity.coactivation import coactivation
from benchmarks.sparsity.order import cluster, propose, tiles
from gossamer import nn


def topical(num_groups: int, topics: int, size: int, seed: int) -> np.ndarray:
    """Groups `[S, topics * size]` that each have the neurons of one topic, scattered over all places."""
    generator = np.random.default_rng(seed)
    place = np.random.default_rng(0).permutation(topics * size)
    bits = np.zeros((num_groups, topics * size), bool)
    for group, topic in enumerate(generator.integers(topics, size=num_groups)):
        bits[group, place[topic * size : (topic + 1) * size]] = True
    return bits


def test_topics_become_tiles() -> None:
    groups, unseen = topical(200, 12, 16, 1), topical(100, 12, 16, 2)
    for order in (cluster(groups, 16), propose(groups, 16)):
        assert np.array_equal(np.sort(order), np.arange(192))
        assert tiles(groups, 16) > 8 and tiles(groups[:, order], 16) == tiles(unseen[:, order], 16) == 1


def test_tiles_by_their_definition() -> None:
    groups = np.random.default_rng(0).random((9, 37)) < 0.1
    wanted = np.mean([len({column // 8 for column in np.flatnonzero(row)}) for row in groups])
    assert tiles(groups, 8) == pytest.approx(wanted) and tiles(groups[:0], 8) == 0


@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (5, 65), (4, 7)])
def test_orders_of_any_size(shape: tuple[int, int]) -> None:
    for density in (0, 0.3, 1):
        groups = np.random.default_rng(1).random(shape) < density
        order = propose(groups, 16)
        assert np.array_equal(np.sort(order), np.arange(shape[1])) and order.dtype == np.int64
        assert tiles(groups[:, order], 16) <= tiles(groups, 16)


class Topics(torch.nn.Module):
    """Blocks of whose neurons each stretch of 32 tokens has those of its topic."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = nn.GatedMLP(16, 128, activation="relu", bias=True, method="gather", device=device)
        self.plain = nn.MLP(16, 128, "relu", method="gather", device=device)
        with torch.no_grad():
            for weight in (self.mlp.gate_proj.weight, self.plain.up_proj.weight):
                weight.copy_(4 * torch.eye(16)[torch.randperm(128) // 8])
            self.mlp.gate_proj.bias.fill_(-1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) + self.mlp(x)


def text(device: torch.device, seed: int = 3) -> Tensor:
    """Each topic twice among the even groups and twice among the odd ones."""
    topics = (
        torch.randperm(16, generator=torch.Generator().manual_seed(seed)).repeat_interleave(64).repeat(2).view(8, 256)
    )
    return torch.eye(16)[topics].to(device)


def test_neurons_move_and_move_back(device: torch.device) -> None:
    model, done = Topics(device), []
    x, before = text(device), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        plain = model(x)
    proposal = coactivation(model, [x, text(device, 4)], tile=8, progress=lambda *step: done.append(step))
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert list(proposal.layers) == ["plain", "mlp"] and not proposal.applied
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for found in proposal.layers.values():
        assert found.union == 8 and found.before > 4 and found.after == 1 and found.predicted == found.before
        assert found.path == "gather" and found.seconds_before > 0 and found.measured > 0
    assert str(proposal).count("\n") == 2 and "gather" in str(proposal)
    proposal.apply()
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain, rtol=1e-5, atol=1e-5)
    order = proposal.layers["mlp"].order
    assert torch.equal(model.mlp.gate_proj.weight, before["mlp.gate_proj.weight"][order])
    assert torch.equal(model.mlp.down_proj.weight, before["mlp.down_proj.weight"][:, order])
    with pytest.raises(ValueError, match=r"Coactivation\.apply: the orders must not be applied yet"):
        proposal.apply()
    # What it is now needs no other order.
    again = coactivation(model, [x], tile=8, measure=False)
    assert all(found.before == found.after == 1 for found in again.layers.values())
    assert np.isnan(again.layers["mlp"].measured)
    proposal.undo()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match=r"Coactivation\.undo: the orders must be applied, but are not"):
        proposal.undo()


def test_what_cannot_be_moved(device: torch.device) -> None:
    model, x = Topics(device), text(device)
    proposal = coactivation(model, [x], measure=False)
    kept, model.mlp.up_proj = model.mlp.up_proj, torch.nn.Sequential(model.mlp.up_proj)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"'mlp\.up_proj' must be the plain nn\.Linear that it was, got Sequential"):
        proposal.apply()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.mlp.up_proj = kept
    model.plain.up_proj.weight = model.mlp.up_proj.weight
    with pytest.raises(ValueError, match=r"weights and biases of 'plain' must be parameters of one layer each"):
        coactivation(model, [x], measure=False)
    with pytest.raises(ValueError, match=r"batches must bring 64 tokens to a block, but none got as many"):
        coactivation(Topics(device), [x[:1, :40]])
    with pytest.raises(ValueError, match=r"coactivation: tile must be"):
        coactivation(model, [x], tile=0)
    assert model.mlp.sparse_block.observer is None


def test_a_model_in_another_order_is_the_same(device: torch.device) -> None:
    pytest.importorskip("transformers")
    from gossamer.integrations.transformers import patch
    from tests.integrations.test_transformers_sparse import make

    ids = torch.randint(1, 97, (8, 32), generator=torch.Generator().manual_seed(1)).to(device)
    for kind in ("Llama, biased", "Phi3", "OPT", "T5, gated"):
        model = make(kind, device)
        extra = {"decoder_input_ids": ids} if kind.startswith("T5") else {}
        batch = {"input_ids": ids, **extra}
        patch(model, sparse=True)
        with torch.no_grad():
            plain = model(**batch).logits
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        proposal = coactivation(model, [batch], tile=8, measure=False)
        for name, found in proposal.layers.items():
            proposal.layers[name] = replace(found, order=torch.randperm(72))
        proposal.apply()
        with torch.no_grad():
            # Sums in another order; a logit is some units, and a GPU has been off by 1.3e-4.
            torch.testing.assert_close(model(**batch).logits, plain, rtol=1e-4, atol=3e-4)
        moved = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state[name])]
        assert len(moved) >= 2 * len(proposal.layers)
        proposal.undo()
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())

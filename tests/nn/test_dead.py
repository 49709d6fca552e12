"""What the modules do for latents that no longer fire, against dense PyTorch."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import nn
from tests.nn import dense

AUX = dense.AUX
KINDS: dict[str, dict[str, Any]] = {
    **{"topk": AUX, "batchtopk": AUX, "matryoshka": AUX},
    **{"transcoder": AUX | {"skip": True}, "jumprelu": {"pre_act_coefficient": 0.05}},
}


def model_with_dead(kind: str, x: Tensor, dead: int, **options: Any) -> Any:
    model = dense.make(kind, x.device, **KINDS[kind] | options)
    dense.kill(model, x, dead)
    return model


# 8 a row are taken, out of 16 that have been silent longest: none, fewer than a row has room for, more, and too many.
@pytest.mark.parametrize("dead", [0, 1, 5, 12, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients(kind: str, dead: int, device: torch.device, generator: torch.Generator) -> None:
    x = dense.sample(40, generator)
    model = model_with_dead(kind, x, dead)
    got, grads = dense.compare(model, *dense.given(model, x))
    assert int(model.dead().sum()) == dead and bool(got.dead_loss > 0) == (dead > 0)
    torch.testing.assert_close(got.loss, got.mse + got.l0_penalty + got.further_mse + got.dead_loss)
    if dead:
        # Whoever fires gets what it gets without the dead, and some of the dead get something.
        gone = model.dead()
        del model.steps_since_fired
        model.register_buffer("steps_since_fired", torch.zeros_like(model.firing_counts))
        without = dense.gradients(model.loss(*dense.given(model, x)), model)
        torch.testing.assert_close(grads["W_dec"][~gone], without["W_dec"][~gone])
        assert grads["W_enc"][:, gone].any() and not without["W_enc"][:, gone].any()


@pytest.mark.parametrize("kind", ["topk", "batchtopk"])
def test_how_many_are_taken_by_default(kind: str, device: torch.device, generator: torch.Generator) -> None:
    """Half of d_in; of BatchTopK as many as a row has."""
    x = dense.sample(40, generator)
    model = model_with_dead(kind, x, 30, aux_k=None, aux_coefficient=1 / 32)
    assert model.aux_k == (dense.D_IN // 2 if kind == "topk" else model.k)
    dense.compare(model, x)
    assert nn.Transcoder(9, 5, 30, 2).aux_k == 4 and nn.TopKSAE(9, 3, 2).aux_k == 3 and nn.TopKSAE(1, 3, 2).aux_k == 1


def test_dead_after_as_many_calls(device: torch.device) -> None:
    model = nn.TopKSAE(4, 8, 1, dead_after=3, device=device)
    x = model.W_dec[2:3].detach().clone()
    for step in range(5):
        assert int(model.dead().sum()) == (7 if step >= 3 else 0)
        model.encode(x)
    assert not model.dead()[2] and model.dead().dtype is torch.bool


def revived(kind: str, device: torch.device, **options: Any) -> tuple[int, int]:
    """(dead before, dead after) 150 steps of training."""
    # The same numbers on every device: how many come back depends on them.
    generator = torch.Generator().manual_seed(0)
    model = dense.make(kind, torch.device("cpu"), **KINDS[kind] | options).to(device)
    dense.kill(model, dense.sample(2000, generator).to(device), 30)
    before = int(model.dead().sum())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        x = dense.sample(64, generator).to(device)
        optimizer.zero_grad()
        model.loss(*dense.given(model, x)).loss.backward()
        optimizer.step()
    return before, int(model.dead().sum())


@pytest.mark.parametrize("kind", ["topk", "batchtopk", "jumprelu"])
def test_dead_latents_come_back(kind: str, device: torch.device) -> None:
    name, coefficient = ("pre_act_coefficient", 0.05) if kind == "jumprelu" else ("aux_coefficient", 3.0)
    before, after = revived(kind, device, **{name: coefficient})
    _, left = revived(kind, device, **{name: 0.0})
    assert before == 30 and after + 8 <= left


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"aux_coefficient": -0.1}, ValueError, "aux_coefficient must be at least 0 and finite, got -0.1"),
        ({"aux_coefficient": None}, TypeError, "aux_coefficient must be a number, got NoneType"),
        ({"aux_k": 0}, ValueError, "aux_k must be at least 1, got 0. aux_coefficient=0 leaves"),
        ({"aux_k": 2.0}, TypeError, "aux_k must be an int, got float"),
        ({"dead_after": 0}, ValueError, "dead_after must be at least 1, got 0"),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    for make in (nn.TopKSAE, nn.BatchTopKSAE):
        with pytest.raises(error, match=f"nn.{make.__name__}: {message}"):
            make(4, 8, 2, **options)
    with pytest.raises(error, match=f"nn.Transcoder: {message}"):
        nn.Transcoder(4, 4, 8, 2, **options)


@pytest.mark.parametrize("kind", ["topk", "batchtopk", "transcoder"])
def test_nothing_is_computed_where_none_is_dead(
    kind: str, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the host learns, some steps late on a GPU; the loss and the gradients are the same to the bit."""
    x = dense.sample(40, generator)
    models = [dense.make(kind, device, **KINDS[kind], dead_after=6) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    calls, chosen = [0, 0], nn.TopKSAE._longest_silent

    def counted(self: Any, count: int) -> Any:
        calls[models.index(self)] += 1
        return chosen(self, count)

    monkeypatch.setattr(type(models[0]), "_longest_silent", counted)
    monkeypatch.setattr(models[1], "_none_is_dead", lambda: False)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
    skipped, dead = 0, []
    for step in range(40):
        before = calls[0]
        losses = [model.loss(*dense.given(model, x)) for model in models]
        dead.append(bool(models[1].dead().any()))
        assert not dead[-1] or calls[0] == before + 1, "a dead latent went without its loss"
        skipped += calls[0] == before
        for ours, theirs in zip(*losses):
            assert torch.equal(ours, theirs)
        if device.type == "cuda":
            torch.cuda.synchronize()
        for optimizer, loss in zip(optimizers, losses):
            optimizer.zero_grad()
            loss.loss.backward()
            optimizer.step()
        for ours, theirs in zip(models[0].parameters(), models[1].parameters()):
            assert torch.equal(ours, theirs)
        if step == 20:
            # As a checkpoint does, or a user: the host must not go on with what it knew.
            for model in models:
                model.steps_since_fired[3] += 100
    assert any(dead) and calls[1] == 40 and skipped >= 3


def test_what_the_host_knows_is_no_part_of_a_copy(device: torch.device, generator: torch.Generator) -> None:
    x = dense.sample(40, generator)
    model = dense.make("topk", device, **AUX)
    model.loss(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not other._silence_known.below(other.steps_since_fired, 1 << 40)
    moved = model.to(torch.float64 if device.type == "cpu" else torch.float32)
    moved.steps_since_fired = moved.steps_since_fired.clone()
    assert not moved._silence_known.below(moved.steps_since_fired, 1 << 40)


def test_without_numbers() -> None:
    """A tensor that has none, as where shapes alone are wanted, is not asked for any."""
    model = nn.TopKSAE(8, 40, 2, device="meta")
    for _ in range(2):
        assert model.loss(torch.empty(5, 8, device="meta")).loss.shape == ()
    assert not model._silence_known.below(model.steps_since_fired, 1 << 40)

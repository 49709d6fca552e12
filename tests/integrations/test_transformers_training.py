"""Patched models of transformers in training: L1, and `Trainer` and accelerate as their users write them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from gossamer.integrations.transformers import (  # noqa: E402
    activity,
    patch,
    patch_attention,
    sparsity_callback,
    unpatch,
)
from gossamer.sparsity import L1Schedule  # noqa: E402
from tests.integrations.models import tokens  # noqa: E402
from tests.integrations.test_transformers_sparse import blocks, make  # noqa: E402

PARTS = {
    "Llama": ("gate_proj", "up_proj"), "Phi3": ("gate_up_proj", None), "Arcee": ("up_proj", None), "OPT": ("fc1", None),
    "Llama, biased": ("gate_proj", "up_proj"),
}  # fmt: skip


def by_hand(model: Any, kind: str, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross-entropy, and L1, L0 and counts by layer, of a model that is not patched."""
    gate, up = PARTS[kind]
    made: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Any:
        return lambda module, args, out: made.setdefault(name.rpartition(".")[2], []).append(out)

    parts = [(n, m) for n, m in model.named_modules() if n.endswith((gate, up or gate))]
    hooks = [module.register_forward_hook(keep(name)) for name, module in parts]
    loss = model(ids, labels=ids).loss
    for hook in hooks:
        hook.remove()
    l1, fired = [], []
    for i, z in enumerate(made[gate]):
        z, other = z.chunk(2, -1) if kind == "Phi3" else (z, made[up][i] if up else None)
        active = F.relu(z).square() if kind in ("Arcee", "Llama, biased") else F.relu(z)
        hidden = active if other is None else active * other
        l1.append(hidden.abs().sum(-1).mean())
        fired.append((active > 0).flatten(0, -2).sum(0))
    counts = torch.stack(fired)
    return loss, torch.stack(l1), counts.sum(1) / ids.numel(), counts


@pytest.mark.parametrize("method", ["auto", "gather", "dense"])
@pytest.mark.parametrize("kind", PARTS)
def test_gradients_with_l1(kind: str, method: str, device: torch.device) -> None:
    options = {"dropout": 0.0} if kind == "OPT" else {}
    model, ids = make(kind, device, **options).train(), tokens(device)
    loss, l1, l0, fired = by_hand(model, kind, ids)
    (loss + 0.1 * l1.mean()).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    patch(model, sparse=method, train=True)
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        out = model(ids, labels=ids)
        found = activity(model)
        torch.testing.assert_close((out.loss, found.l1, found.l0), (loss, l1, l0))
        assert torch.equal(found.fired, fired)
        (out.loss + 0.1 * found.l1.mean()).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, want[name], msg=name, rtol=1e-3, atol=1e-5)
        model.zero_grad()
    copy.deepcopy(model)
    unpatch(model)


def test_misuse_says_what_to_do(device: torch.device) -> None:
    model, ids = make("Llama", device).train(), tokens(device)
    with pytest.raises(ValueError, match="train=True needs sparse=True"):
        patch(model, train=True)
    patch(model, sparse=True, train=True)
    with pytest.raises(ValueError, match=r"block model.layers.0.mlp has no activity. Call the model with gradients"):
        activity(model)
    with pytest.raises(ValueError, match=r"patch\(model, sparse=True, train=True\) comes first, got Linear"):
        activity(torch.nn.Linear(2, 2))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model(ids)
    with pytest.raises(ValueError, match=r'checkpoints must have .*"use_reentrant": False'):
        activity(model)


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"l1": "2e-5"}, TypeError, "l1 must be a number, got str"),
        ({"l1": -1.0}, ValueError, "l1 must be at least 0 and finite, got -1"),
        ({"reinitialize": True}, TypeError, "reinitialize must be a number, got bool"),
        ({"reinitialize": 1.5}, ValueError, r"reinitialize must be in \[0, 1\], got 1.5"),
        ({"log": 3}, TypeError, "log must be a function of scalars and a step, got int"),
    ],
)
def test_a_callback_checks_its_arguments(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"integrations.transformers.sparsity_callback: {message}"):
        sparsity_callback(**{"l1": 1e-5, **given})


@pytest.mark.parametrize("call, name", [(patch, "recompute"), (patch, "train"), (patch_attention, "gates")])
def test_flags_are_bools(call: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"transformers.{call.__name__}: {name} must be True or False, got 'yes'"):
        call(make("Llama", torch.device("cpu")), **{name: "yes"})


def trained(folder: Path, callback: Any, **given: Any) -> tuple[Any, Any]:
    """(trainer, model) after some steps."""
    trainer = trainer_of(folder, callback, **given)
    trainer.train()
    return trainer, trainer.model


def trainer_of(folder: Path, callback: Any, **given: Any) -> Any:
    """Written as users write it."""
    model = make("Llama", torch.device("cpu")).train()
    with torch.no_grad():
        # A neuron that is dead.
        model.model.layers[0].mlp.gate_proj.weight[5] = 0
    patch(model, sparse=True, train=True)
    # Some rows are shorter: the micro-batches of a step have different numbers of tokens.
    ids = torch.randint(1, 97, (32, 12), generator=torch.Generator().manual_seed(0))
    data = []
    for i, row in enumerate(ids):
        labels = row.clone()
        labels[12 - i % 5 :] = -100
        data.append({"input_ids": row, "labels": labels})
    options = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "max_steps": 8, "learning_rate": 1e-2,
        "logging_steps": 4, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
    } | given  # fmt: skip
    return transformers.Trainer(
        model, transformers.TrainingArguments(**options), train_dataset=data, callbacks=[callback]
    )


@pytest.mark.native
def test_trainer_makes_a_model_sparse(tmp_path: Path) -> None:
    seen: list[tuple[dict[str, float], int]] = []
    callback = sparsity_callback(L1Schedule(0.5, warmup=1), log=lambda found, step: seen.append((found, step)))
    trainer, model = trained(tmp_path / "l1", callback, max_steps=40)
    dense, _ = trained(tmp_path / "dense", sparsity_callback(0.0), max_steps=40)
    records = [[r for r in t.state.log_history if "l0" in r] for t in (trainer, dense)]
    assert records[0][-1]["l0"] < 0.5 * records[1][-1]["l0"] and {"dead", "l0/00", "dead/01"} <= records[0][0].keys()
    assert [step for _, step in seen] == list(range(4, 41, 4)) + [40] and seen[0][0]["l0/01"] > 0
    assert not model._forward_hooks


@pytest.mark.native
@pytest.mark.parametrize("another", [False, True])
def test_training_goes_on_after_an_exception(another: bool, tmp_path: Path) -> None:
    """With the same callback, or with another; `unpatch` removes the hook as well."""

    class Stops(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    callback = sparsity_callback(0.5)
    trainer = trainer_of(tmp_path, callback, max_steps=2)
    model = trainer.model
    for _ in range(2):
        trainer.add_callback(Stops)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert len(model._forward_hooks) == 1
        trainer.remove_callback(Stops)
        if another:
            trainer.remove_callback(callback)
            trainer.add_callback(callback := sparsity_callback(0.5))
        trainer.train()
        assert not model._forward_hooks and "l0" in trainer.state.log_history[-1]
    trainer.add_callback(Stops)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    unpatch(model)
    ids = tokens(torch.device("cpu"))
    assert not model._forward_hooks and model(ids, labels=ids).loss.isfinite()


@pytest.mark.native
def test_l1_is_weighted_as_the_cross_entropy_of_micro_batches(tmp_path: Path) -> None:
    """One optimizer step on 16 sequences at once, and in four micro-batches."""
    models = []
    for size in (16, 4):
        given = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 16 // size, "optim": "sgd"}
        _, model = trained(tmp_path / str(size), sparsity_callback(0.5), max_steps=1, max_grad_norm=0.0, **given)
        models.append(model)
    before = make("Llama", torch.device("cpu")).get_parameter("model.layers.0.mlp.gate_proj.weight").detach()
    steps = [m.get_parameter("model.layers.0.mlp.gate_proj.weight").detach() - before for m in models]
    # A micro-batch weighs as many tokens as have a label; L1 is a mean over all.
    assert (steps[0] - steps[1]).norm() < 0.1 * steps[0].norm()
    assert steps[0].norm() > 0


@pytest.mark.native
def test_dead_neurons_get_new_weights(tmp_path: Path) -> None:
    """They move by a tenth of new weights after the step; others follow the optimizer alone."""
    callback = sparsity_callback(0.0, reinitialize=0.1)
    wanted, _ = trained(tmp_path / "never", sparsity_callback(0.0), max_steps=1)
    names = [f"model.layers.{i}.mlp.gate_proj.weight" for i in range(2)]
    _, model = trained(tmp_path / "again", callback, max_steps=1)
    assert callback.tracker.dead.any() and not callback.tracker.dead.all()
    for name, silent in zip(names, callback.tracker.dead):
        a, b = wanted.model.get_parameter(name), model.get_parameter(name)
        assert torch.equal((a != b).any(1), silent)


@pytest.mark.native
def test_an_accelerate_loop(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make("Llama", torch.device("cpu")).train()
    patch(model, sparse="gather", train=True)
    ids = tokens(torch.device("cpu"))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    l0 = []
    for _ in range(12):
        loss = model(ids, labels=ids).loss
        found = activity(model)
        accelerator.backward(loss + 0.5 * found.l1.mean())
        optimizer.step()
        optimizer.zero_grad()
        l0.append(found.l0.mean().item())
    assert l0[-1] < 0.6 * l0[0]
    assert {module.sparse_block.last_path for module in blocks(model)} == {"gather"}

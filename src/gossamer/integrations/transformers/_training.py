"""Training patched models with L1: the activity of their blocks, and a callback of `Trainer` that is the recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gossamer._core import checks
from gossamer.ffn import Activity
from gossamer.integrations.transformers._mlp import check_model, gate_weight
from gossamer.sparsity import DeadNeuronTracker, L1Schedule, reinitialize_, scalars

_ACTIVITY, _CALLBACK = "integrations.transformers.activity", "integrations.transformers.sparsity_callback"


def activity(model: nn.Module) -> Activity:
    """How active the blocks of a model were in its last call with gradients, layer by layer; once for each call.

    Args:
        model: on which `patch(model, sparse=True, train=True)` was called.

    Returns:
        l1, l0 and unlisted `[L]`, fired `[L, N]`, as in `ffn.Activity`; l1 has its gradient.

    Raises:
        TypeError: model is no module.
        ValueError: a block has none since the last call of this function, as under reentrant checkpoints; blocks have
            different sizes; no block keeps its activity.

    >>> loss = model(**batch).loss + 2e-5 * activity(model).l1.mean()  # doctest: +SKIP
    """
    check_model(_ACTIVITY, model)
    found = []
    for name, module in _blocks(model).items():
        own, module.sparse_block.activity = module.sparse_block.activity, None
        if own is None:
            raise ValueError(
                f"{_ACTIVITY}: block {name} has no activity. Call the model with gradients before; checkpoints must "
                'have gradient_checkpointing_kwargs={"use_reentrant": False}; and a block with dropout inside it, a '
                "hook or an adapter computes as its class does."
            )
        found.append(own)
    sizes = {own.fired.shape[0] for own in found}
    if len(sizes) != 1:
        rule = "blocks must have one number of neurons"
        rule = rule if sizes else "patch(model, sparse=True, train=True) comes first"
        raise ValueError(f"{_ACTIVITY}: {rule}, got {sorted(sizes) or type(model).__name__}.")
    return Activity(*map(torch.stack, zip(*found)))


class _Hooked:
    """A callback whose method is a hook of the model that it trains, and the handle of that hook."""

    handle: Any


def remove_l1(model: nn.Module) -> None:
    """Removes the hooks of `sparsity_callback` from a model."""
    for hook in tuple(model._forward_hooks.values()):
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, _Hooked):
            owner.handle.remove()


def sparsity_callback(
    l1: L1Schedule | float, *, reinitialize: float = 0.0, log: Callable[[dict[str, float], int], Any] | None = None
) -> Any:
    """A `transformers.TrainerCallback` that trains a patched model sparse: L1 in the loss, dead neurons, scalars.

    In training the model's loss gets `l1 * mean of activity(model).l1`, with the weight that the cross-entropy of a
    micro-batch has in its step. After each optimizer step dead neurons get new weights. The records that `Trainer`
    logs, its `state.log_history` among them, get those of `sparsity.scalars`. Where an exception ends training, L1
    stays in the loss until the model is trained with a callback of this function again, or until `unpatch(model)`.

    Args:
        l1: the weight of L1, or its schedule by optimizer step.
        reinitialize: the rate of `sparsity.reinitialize_`; 0 leaves dead neurons dead.
        log: called with the scalars and the step whenever `Trainer` logs, as `wandb.log` is.

    Raises:
        TypeError: l1 or reinitialize is no number; log is no function.
        ValueError: l1 is below 0, or reinitialize outside [0, 1]; when training begins: the model has no blocks that
            keep their activity; label smoothing, which computes the loss outside of the model; several GPUs in one
            process.

    Source: Cetin et al., "Sparser, Faster, Lighter Transformer Language Models", equations 2 and 6.

    >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[sparsity_callback(2e-5)])  # doctest: +SKIP
    """
    if not isinstance(l1, L1Schedule):
        checks.number(_CALLBACK, "l1", l1, "Or give a sparsity.L1Schedule.", zero=True)
    checks.number(_CALLBACK, "reinitialize", reinitialize, "The paper's rate is 0.1; 0 switches it off.", zero=True)
    if reinitialize > 1:
        raise ValueError(f"{_CALLBACK}: reinitialize must be in [0, 1], got {reinitialize}. The paper's rate is 0.1.")
    if log is not None and not callable(log):
        raise TypeError(f"{_CALLBACK}: log must be a function of scalars and a step, got {type(log).__name__}.")
    from transformers import TrainerCallback

    class SparsityCallback(_Hooked, TrainerCallback):
        def __init__(self) -> None:
            self.schedule = l1 if isinstance(l1, L1Schedule) else L1Schedule(l1)

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            # Training that an exception ended has not come to on_train_end.
            remove_l1(model)
            self.tracker, self.weight = DeadNeuronTracker(), 0.0
            self.l0: Any = None
            if not _blocks(model):
                raise ValueError(f"{_CALLBACK}: no block keeps its activity: patch(model, sparse=True, train=True).")
            if args.label_smoothing_factor or args.n_gpu > 1:
                what = "label_smoothing_factor" if args.label_smoothing_factor else "n_gpu above 1 (use torchrun)"
                raise ValueError(f"{_CALLBACK}: the loss must be computed by the model in one process, got {what}.")
            self.handle = model.register_forward_hook(self.add_l1, with_kwargs=True)

        def add_l1(self, model: Any, args: Any, given: dict[str, Any], out: Any) -> Any:
            if not (model.training and torch.is_grad_enabled()):
                return out
            found, items = activity(model), given.get("num_items_in_batch")
            self.tracker.add(found.fired)
            self.l0 = found.l0
            share = 1.0 if items is None else (given["labels"][..., 1:] != -100).sum() / items
            loss = out["loss"] + self.weight * share * found.l1.mean()
            out["loss"] = loss
            return out

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.weight = self.schedule(state.global_step)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            dead = self.tracker.step()
            if not reinitialize:
                return
            generator = torch.Generator(dead.device).manual_seed((args.seed << 32) + state.global_step)
            for module, silent in zip(_blocks(model).values(), dead):
                reinitialize_(gate_weight(module), silent, rate=reinitialize, generator=generator)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if self.l0 is None or self.tracker.dead is None or logs is None:
                return
            found = scalars(self.l0, self.tracker.dead)
            for record in (logs, *state.log_history[-1:]):
                record.update(found)
            if log is not None:
                log(found, state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            remove_l1(model)

    return SparsityCallback()


def _blocks(model: nn.Module) -> dict[str, Any]:
    """The modules that keep their activity, by name."""
    found: dict[str, Any] = {n: m for n, m in model.named_modules() if "sparse_block" in m.__dict__}
    return {name: module for name, module in found.items() if module.sparse_block.keeps_activity}

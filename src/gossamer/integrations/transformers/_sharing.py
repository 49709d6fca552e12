"""Layers of a model that use one selection: which they are, and how the selection gets from the first to the others.

The model that calls the layers hands its keyword arguments on to each of them. A hook adds an empty `SharedSelections`
to those of each forward pass: the first layer of a group puts its selection there, the others take it. So two passes
never mix, gradient checkpoints find the selection of their own pass, and no selection outlives its pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.attention import Selection


class SharedSelections:
    """The selections of one forward pass, by the group of layers that uses them.

    Beside each stand the operands that scored it: the indexer's queries, keys, weights and bias, for the losses of the
    other layers; empty unless indexers learn.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[int, ...], tuple[Selection | None, tuple[Tensor, ...]]] = {}

    def put(self, group: tuple[int, ...], selection: Selection | None, scored_by: tuple[Tensor, ...]) -> None:
        """None selects all visible keys."""
        self._of[group] = selection, scored_by

    @staticmethod
    def taken(
        shared: SharedSelections | None, layer: Any, device: torch.device
    ) -> tuple[Selection | None, tuple[Tensor, ...]]:
        """The selection of the first layer of this layer's group."""
        group = layer.group
        if shared is None or group not in shared._of:
            raise ValueError(
                f"integrations.transformers.patch_attention: layer {layer.layer_idx} uses the selection of layer "
                f"{group[0]}, which has made none in this forward pass. Call the model, not the layer alone."
            )
        # In training, layers may be computed again, the last ones first.
        last = layer.layer_idx == group[-1] and not layer.training
        selection, scored_by = shared._of.pop(group) if last else shared._of[group]
        if selection is not None and selection.device != device:
            selection = selection.to(device)
        return selection, tuple(tensor.to(device) for tensor in scored_by)


def groups_of(
    operator: str, model: nn.Module, layers: dict[str, int], share: int | Sequence[Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """The group of each layer that shares, by its name, from the numbers of all layers by their names."""
    callers = {name: _caller(model, name) for name in layers}
    numbers = {caller: [layers[name] for name in layers if callers[name] == caller] for caller in callers.values()}
    if isinstance(share, int) and not isinstance(share, bool) and share >= 1:
        stated = {
            caller: [tuple(of[at : at + share]) for at in range(0, len(of), share)] for caller, of in numbers.items()
        }
    else:
        groups = _stated(operator, share)
        every = [number for group in groups for number in group]
        there = set.intersection(*(set(of) for of in numbers.values())) if numbers else set()
        if len(set(every)) < len(every) or not there.issuperset(every):
            raise ValueError(
                f"{operator}: share must name layers that are replaced, {sorted(there)}, each once, got "
                f"{[list(group) for group in groups]}."
            )
        stated = dict.fromkeys(numbers, groups)
    shares = ((name, group) for name in layers for group in stated[callers[name]] if layers[name] in group)
    found = {name: group for name, group in shares if len(group) > 1}
    for name in found:
        if callers[name] is None:
            raise ValueError(
                f"{operator}: share needs the model that calls the layers, got {type(model).__name__} with {name}. "
                "Give the whole model, or share=1."
            )
    return found


def _stated(operator: str, share: Any) -> list[tuple[int, ...]]:
    """Groups of ascending numbers."""
    try:
        groups = [tuple(group) for group in share]
    except TypeError:
        groups = [()]
    if all(set(map(type, group)) == {int} and list(group) == sorted(group) for group in groups):
        return groups
    raise ValueError(
        f"{operator}: share must be how many layers in a row use one selection, at least 1, or a list of groups of "
        f"layers' numbers, each ascending, got {share!r}."
    )


def _caller(model: nn.Module, name: str) -> str | None:
    """The name of the innermost model of transformers around a layer."""
    from transformers.modeling_utils import PreTrainedModel

    while name:
        name = name.rpartition(".")[0]
        if isinstance(model.get_submodule(name), PreTrainedModel):
            return name
    return None


def share_selections(model: nn.Module, groups: dict[str, tuple[int, ...]]) -> None:
    """Lets the callers of these layers, and no other module, begin each forward pass without selections."""
    callers = {_caller(model, name) for name in groups}
    for name, module in model.named_modules():
        handle = module.__dict__.pop(_HANDLE, None)
        if handle is not None:
            handle.remove()
        if name in callers:
            module.__dict__[_HANDLE] = module.register_forward_pre_hook(_begin, with_kwargs=True)


_HANDLE = "_gossamer_shared_selections"


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "shared_selections": SharedSelections()}

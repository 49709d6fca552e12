"""The way back from `patch` and `patch_attention`."""

from __future__ import annotations

from torch import nn

from gossamer.integrations.transformers import _attention, _mlp, _training


def unpatch(model: nn.Module) -> None:
    """Undoes `patch` and `patch_attention`; indexers and gates are gone. It warns where nothing is patched.

    Args:
        model: the model that was patched, or a module that contains it.

    Raises:
        TypeError: model is no module.
        ValueError: the forward or the class of a patched block has been replaced since, which has to be undone first.
            Nothing is changed then.

    >>> unpatch(model)  # doctest: +SKIP
    """
    operator = "integrations.transformers.unpatch"
    _mlp.check_model(operator, model)
    blocks = _mlp.undo(operator, model)
    for module in model.modules():
        _training.remove_l1(module)
    if not _attention.undo(model) and not blocks:
        _mlp.nothing_changed(operator, model, "not patched")

"""SAEs so small that SAELens's own methods are the fastest, and the shortest way to these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.rowsparse import DensityTracker
from gossamer.sae import decode_path

DIRECT = "_gossamer_direct"
"""The name in a module's dictionary of its `_Direct`."""
_KNOWN_FORWARD = "encode decode use_error_term torch no_grad _disable_hooks hook_sae_error hook_sae_output"
"""The names in a forward that encodes, decodes, and without an error term calls `hook_sae_output` and nothing else."""
_MOST = 256
"""Sizes of x that are kept."""


class _Direct:
    """The x, by their numbers of elements, dtypes and devices, that an SAE without an error term computes as its class
    does, and the bound methods of the patch, which nobody must have replaced."""

    __slots__ = ("_bound", "_density", "decode", "encode", "sizes")

    def __init__(self, own: dict[str, Any], kind: Any, density: DensityTracker) -> None:
        self._bound, self._density = (own.get("encode"), own["decode"]), density
        self.encode, self.decode, self.sizes = kind.encode, kind.decode, set[Any]()

    def serves(self, own: dict[str, Any], x: Any) -> bool:
        if type(x) is not Tensor or torch.compiler.is_dynamo_compiling() or self._density.pinned is not None:
            return False
        if own["_use_error_term"] or (own.get("encode"), own.get("decode")) != self._bound:
            return False
        return (x.numel(), x.dtype, x.device) in self.sizes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def remember(sae: Any, x: Tensor, density: DensityTracker) -> None:
    """Lets later calls with such an x go by the class's functions, if the class's forward has the known steps."""
    kind = type(sae)
    if " ".join(kind.forward.__code__.co_names) == _KNOWN_FORWARD:
        # Copies have None there.
        own = sae.__dict__
        direct = own[DIRECT] = own.get(DIRECT) or _Direct(own, kind, density)
        if len(direct.sizes) < _MOST:
            direct.sizes.add((x.numel(), x.dtype, x.device))


def is_small(self: Any, x: Tensor, name: str) -> bool:
    """Whether the plain product of latents takes hardly longer than a launch, for the rows of x, which is multiplied
    with the parameter `name`; and no path is pinned."""
    if torch.compiler.is_dynamo_compiling():
        # A graph would be compiled anew for each number of rows.
        return False
    state, parameters = self._gossamer, self._parameters
    weight, W_dec = parameters.get(name), parameters.get("W_dec")
    if weight is None or W_dec is None or state.tracker.rows.pinned is not None or type(x) is not Tensor:
        return False
    return (
        decode_path.choose_path(x.numel() // max(weight.shape[0], 1), W_dec.shape[0], W_dec.shape[1], W_dec) == "dense"
    )

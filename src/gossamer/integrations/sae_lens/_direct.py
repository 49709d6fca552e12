"""Calls that SAELens's own methods compute the fastest, and the shortest way to these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks, tuning
from gossamer.ffn import BlockTracker
from gossamer.sae import decode_path

DIRECT = "_gossamer_direct"
"""The name in a module's dictionary of its `Direct`."""
ADDED = 180e-6
"""Seconds of the host by which a packed pass takes longer than SAELens's own: most of them in functions of SAELens and
PyTorch that a hook may replace."""
_KNOWN_FORWARD = "encode decode use_error_term torch no_grad _disable_hooks hook_sae_error hook_sae_output"
"""The names in a forward that encodes, decodes, and without an error term calls `hook_sae_output` and nothing else."""
_MOST = 256
"""Sizes of x that are kept."""
_OPEN: tuple[str | None, int] = None, 1


class Direct:
    """The functions of an SAE's class, for the x that an SAE without an error term computes by these: x, by its number
    of elements, dtype and device, stands in the tracker's `settled`. The bound methods of the patch must not have been
    replaced."""

    __slots__ = ("_bound", "_tracker", "decode", "encode")

    def __init__(self, own: dict[str, Any], kind: Any, tracker: BlockTracker) -> None:
        self._bound, self._tracker = (own.get("encode"), own["decode"]), tracker
        self.encode, self.decode = kind.encode, kind.decode

    def serves(self, own: dict[str, Any], x: Any) -> bool:
        tracker = self._tracker
        if type(x) is not Tensor or torch.compiler.is_dynamo_compiling() or tracker.rows.pinned is not None:
            return False
        if own["_use_error_term"] or (own.get("encode"), own.get("decode")) != self._bound:
            return False
        path, every = tracker.settled.get((x.numel(), x.dtype, x.device), _OPEN)
        if path == "dense":
            if (every and tracker.looked % every == 0) or (x.is_cuda and torch._C._cuda_isCurrentStreamCapturing()):
                return False
            tracker.looked += 1
            tracker.rows.last_path = path
        return path is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def settle(sae: Any, x: Tensor, path: str, every: int) -> None:
    """Lets later calls with such an x go by the class's functions, if the class's forward has the known steps; of a
    "dense" path one of `every` is counted, or none where that is 0."""
    kind, tracker = type(sae), sae._gossamer.tracker
    if torch.compiler.is_compiling() or " ".join(kind.forward.__code__.co_names) != _KNOWN_FORWARD:
        return
    # Copies have None there.
    own = sae.__dict__
    own[DIRECT] = own.get(DIRECT) or Direct(own, kind, tracker)
    if len(tracker.settled) < _MOST and not checks.capturing():
        tracker.settled[x.numel(), x.dtype, x.device] = path, every


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


def pays(rows: int, W_dec: Tensor) -> bool:
    """Whether a packed pass may save the device more time than it adds to the host: at most SAELens's dense decoder and
    four passes over the latents."""
    if not W_dec.is_cuda:
        return True
    size, rates = W_dec.element_size(), tuning.rates(W_dec.get_device())
    rate = 0.9 * rates.half if size == 2 else rates.tf32 if tuning.tf32() else rates.ieee
    product = max(2 * rows * W_dec.numel() / rate, W_dec.numel() * size / rates.copy)
    return product + 4 * rows * W_dec.shape[0] * size / rates.copy > ADDED

"""The state of a sparse feed-forward block that a module keeps from one call to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from gossamer._core.ops import listened, needs_gradient
from gossamer.ffn.activity import Activity
from gossamer.ffn.block import METHODS, NAMES, Block, run
from gossamer.ffn.records import SparseFfn
from gossamer.ffn.sparse_ffn import sparse_ffn
from gossamer.ffn.tracker import BlockTracker


class SparseBlock:
    """The path of a module's block, and the counts that it is chosen by.

    A module has one as an attribute and calls it with its weights, which stay the module's own. Modules of `nn` and
    models that `integrations.transformers.patch` has changed have one; `sparsity` finds them by it. Copies and pickles
    keep the method, and count anew.

    Args:
        method: the path, as in `gated`.
        operator: the name that errors begin with.

    Attributes:
        density: the `BlockTracker` that `"auto"` follows.
        keeps_activity, activity: whether the module keeps the `Activity` of its last call with gradients here, and
            that, or None; copies and pickles have none.
        observer: called with the operands of each call before it is computed, with gradients and without, or None.

    Raises:
        ValueError: an unknown method.

    >>> weights = torch.ones(4, 3), None, torch.ones(4, 3), None, torch.ones(5, 4), None
    >>> SparseBlock("gather")(torch.ones(2, 3), *weights, activation="relu").shape
    torch.Size([2, 5])
    """

    def __init__(self, method: str = "auto", operator: str = "ffn.SparseBlock") -> None:
        self.operator = operator
        self.method = method
        self.density = BlockTracker()
        self.observer: Callable[[Block], Any] | None = None
        self.keeps_activity = False
        self.activity: Activity | None = None

    @property
    def method(self) -> str:
        """The path, as in `gated`; may be set at any time."""
        return self._method

    @method.setter
    def method(self, method: str) -> None:
        if method not in METHODS:
            raise ValueError(f"{self.operator}: method must be one of {', '.join(METHODS)}, got {method!r}.")
        self._method = method

    @property
    def last_path(self) -> str | None:
        """The path last taken of those that `gated` names, or None before there was a call."""
        return self.density.last_path

    def __call__(
        self,
        x: Tensor,
        gate_weight: Tensor,
        gate_bias: Tensor | None,
        up_weight: Tensor | None,
        up_bias: Tensor | None,
        down_weight: Tensor,
        down_bias: Tensor | None,
        *,
        activation: str,
        recompute: bool = False,
        with_activity: bool = False,
    ) -> Any:
        """The block's result `[..., D]` as of `gated`, or of `plain` where up_weight is None; None, and nothing
        computed, where the activation is not sparse, or a gradient is needed and the path computes all. `recompute` is
        for gradients of a gated block that "auto" computes whole, as in `gemm.gated_mlp`. With `with_activity` the
        result is a pair, as of `gated`."""
        operands = (x, gate_weight, gate_bias, None, up_weight, up_bias, down_weight, down_bias)
        if activation not in NAMES:
            return None
        block = Block(*operands, activation, recompute)
        self.observe(block)
        if self.method in ("fused", "dense") and needs_gradient(*operands):
            return None
        return run(self.operator, block, self.method, self.density, with_activity)

    def settled(self, x: Any) -> str | None:
        """The path of a call with x, if it is without gradients, not compiled, and neither counted nor observed; else
        None. Where it is "dense" a module calls its layers itself, which costs nothing beside a module without this
        block; `again` may compute the others; and where that is None, the block is called."""
        # One function that calls few others: in a model, where its code is no longer in the caches, each takes long.
        if type(x) is not Tensor or is_grad_enabled() or is_dynamo_compiling():
            return None
        tracker = self.density
        known = tracker.settled.get(x.numel())
        if known is None or self._method != "auto" or self.observer is not None or tracker.rows.pinned is not None:
            return None
        path, every = known
        if tracker.looked % every == 0 or (x.is_cuda and torch._C._cuda_isCurrentStreamCapturing()):
            return None
        if path == "dense":
            tracker.looked += 1
            tracker.last_path = path
        return path

    def again(self, x: Tensor, weights: Sequence[Any], activation: str) -> Tensor | None:
        """The result of a "gather" call that `settled` names, by the launches of an earlier call on a GPU; None, and
        nothing computed, where there was none, or somebody listens. Weights and biases are those of a call."""
        if not x.is_cuda or listened() or torch._C._is_any_autocast_enabled():
            return None
        flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        call = (flat, *weights[:2], None, *weights[2:], activation == "relu2", False)
        found = sparse_ffn.again(tuple.__new__(SparseFfn, call))
        if found is None:
            return None
        self.density.looked += 1
        self.density.last_path = "gather"
        out: Tensor = found[0]
        return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[1])

    def observe(self, block: Block) -> None:
        """Tells the observer of a call; not of one that a checkpoint repeats in a backward pass."""
        if self.observer is not None and torch._C._current_graph_task_id() == -1:
            with torch.no_grad():
                self.observer(block)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "observer": None, "activity": None}

    def __repr__(self) -> str:
        return f"SparseBlock(method={self.method!r}, last_path={self.last_path!r})"

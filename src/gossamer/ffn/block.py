"""The two kinds of feed-forward block, gated and plain, and the paths through them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from gossamer import gemm
from gossamer._core import autocast, checks, tuning
from gossamer._core.calls import Checked, key_of
from gossamer._core.ops import needs_gradient
from gossamer._core.ranges import span
from gossamer.ffn.costs import MANY, WAITING, Costs, Path, choose_path, costs_of, sample_step
from gossamer.ffn.records import SparseFfn
from gossamer.ffn.sparse_ffn import sparse_ffn
from gossamer.ffn.tracker import BlockTracker
from gossamer.ffn.training import differentiable, with_all
from gossamer.gemm.linear_glu import linear_glu_operator
from gossamer.gemm.records import LinearGlu
from gossamer.rowsparse import Density
from gossamer.rowsparse.formats import linear, threshold_dtype

NAMES = ("relu", "relu2")
"""Of activations, as `gemm.linear_glu` calls them, those that leave most entries 0."""
METHODS = ("auto", *get_args(Path))


class Block(NamedTuple):
    """A block's operands: gate_weight [N, K] is what the activation follows, up_weight [N, K] is None in a plain one;
    down_weight [D, N]; threshold [N] or None; `recompute` as in `gemm.gated_mlp`."""

    x: Tensor
    gate_weight: Tensor
    gate_bias: Tensor | None
    threshold: Tensor | None
    up_weight: Tensor | None
    up_bias: Tensor | None
    down_weight: Tensor
    down_bias: Tensor | None
    activation: str
    recompute: bool = False


class Found(NamedTuple):
    """The findings of the checks of a block, and all that follows from them: M, K, N, D; costs with W_down by rows and
    by columns, which the checks do not look at."""

    m: int
    k: int
    n: int
    d: int
    by_rows: Costs
    by_columns: Costs


_checked: Checked[Found] = Checked()


def run(operator: str, block: Block, method: str, density: BlockTracker | None, with_activity: bool = False) -> Any:
    """The block's result, `[..., D]`, and with `with_activity` its `Activity` beside it; `operator` and the block's
    names are those of the public function."""
    if isinstance(block.x, Tensor) and autocast.enabled(block.x.device):
        check(operator, block, method, density)
        cast = autocast.cast(block.x, block.gate_weight, block.up_weight, block.down_weight)
        names = ("x", "gate_weight", "up_weight", "down_weight")
        block = block._replace(**dict(zip(names, cast)))  # type: ignore[arg-type]
        with autocast.disabled(block.x.device):
            return run(operator, block, method, density, with_activity)
    tensors = block[:8]
    key = key_of(tensors, (method, type(density), tuning.tf32()))
    found = _checked.get(key)
    if found is None:
        sizes = check(operator, block, method, density)
        weights = {"gate_weight": block.gate_weight, "up_weight": block.up_weight, "down_weight": block.down_weight}
        checks.same_dtype(operator, "x", block.x, **weights)
        _, k, n, d = sizes
        cost = costs_of(n, k, d, block.up_weight is not None, block.x)
        found = Found(*sizes, replace(cost, by_rows=True), cost)
        _checked.keep(key, found)
    x = block.x
    if block.threshold is not None:
        dtype = threshold_dtype(block.gate_weight.dtype)
        block = block._replace(threshold=block.threshold.detach().to(dtype).expand(found.n))
    if x.dim() != 2:
        block = block._replace(x=x.reshape(found.m, found.k))
    if needs_gradient(*tensors):
        out, activity = differentiable(
            operator, block, found[:4], method, density, _differentiable, with_activity
        )  # fmt: skip
    elif with_activity:
        out, activity = with_all(block)
    else:
        out = _inferred(operator, block, found, method, density)
    out = out if x.dim() == 2 else out.view(*x.shape[:-1], found.d)
    return (out, activity) if with_activity else out


def _differentiable(block: Block) -> Tensor:
    if block.up_weight is None or block.threshold is not None:
        return _dense(block)
    return gemm.gated_mlp(
        block.x,
        block.gate_weight,
        block.up_weight,
        block.down_weight,
        activation=block.activation,
        gate_bias=block.gate_bias,
        up_bias=block.up_bias,
        down_bias=block.down_bias,
        recompute=block.recompute,
    )


def _inferred(operator: str, block: Block, found: Found, method: str, density: BlockTracker | None) -> Tensor:
    m = found.m
    tracker = density if method == "auto" else None
    cost = found.by_rows if block.down_weight.stride(0) > 1 else found.by_columns
    recorded = False

    def chosen(known: Density | None, eager: bool) -> str:
        return choose_path(known, m, cost, eager, tracker is not None and tracker.repeats)

    if tracker is not None:
        tracker.rows.check_pinned(*METHODS[1:])
        # Nothing reads what a graph would record, and to look takes time.
        # Few rows wait for the host, and a call that is due takes it several times as long as the others.
        every = 8 if m >= MANY else 32 if m > WAITING else 256
        recorded = not checks.capturing() and tracker.due(every)
        method = tracker.path(chosen, due=recorded, key=(m, cost))
        tracker.settle(block.x, method, every)
    elif method == "auto":
        method = chosen(None, not (torch.compiler.is_compiling() or checks.capturing()))
    if method == "fused" and (block.up_weight is None or block.threshold is not None):
        # One product serves gate and up of a ReLU or its square; every other block is computed layer by layer.
        method = "dense"
    with span(f"gossamer::{operator}/{method}"):
        if method == "gather":
            out, nnz = sparse_ffn(SparseFfn(*block[:8], block.activation == "relu2", recorded))
        else:
            hidden = _fused(block) if method == "fused" else _hidden(block)
            out = linear(hidden, block.down_weight, block.down_bias)
            if recorded:
                nnz = (hidden[:: sample_step(m)] != 0).sum(1)
    if recorded:
        tracker.record(nnz, cost.limit)  # type: ignore[union-attr]
    if density is not None:
        density.last_path = method
    return out


def activated(block: Block) -> Tensor:
    """The output of the activation, dense `[..., N]`."""
    z = linear(block.x, block.gate_weight, block.gate_bias)
    if block.threshold is not None:
        silent = z <= block.threshold.clamp(min=0)
        return z.masked_fill(silent, 0) if torch.is_grad_enabled() else z.masked_fill_(silent, 0)
    # In place a product stays in the cache, and nothing is allocated; a tensor with a gradient is not overwritten.
    z = torch.relu(z) if torch.is_grad_enabled() else torch.relu_(z)
    return z.square() if block.activation == "relu2" else z


def _hidden(block: Block) -> Tensor:
    active = activated(block)
    if block.up_weight is None:
        return active
    up = linear(block.x, block.up_weight, block.up_bias)
    return active * up if torch.is_grad_enabled() else active.mul_(up)


def _fused(block: Block) -> Tensor:
    call = LinearGlu(
        block.x, block.gate_weight, block.up_weight, block.gate_bias, block.up_bias, block.activation, False
    )
    return linear_glu_operator(call)[0]


def _dense(block: Block) -> Tensor:
    return linear(_hidden(block), block.down_weight, block.down_bias)


def check(operator: str, block: Block, method: str, density: BlockTracker | None) -> tuple[int, int, int, int]:
    """M, K, N and D; raises where an operand does not fit. The weight that the activation follows is `up_weight` in a
    plain block."""
    plain = block.up_weight is None
    gate, gate_bias = ("up_weight", "up_bias") if plain else ("gate_weight", "gate_bias")
    optional = {gate_bias: block.gate_bias, "threshold": block.threshold, "down_bias": block.down_bias}
    if not plain:
        optional |= {"up_weight": block.up_weight, "up_bias": block.up_bias}
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    operands = {gate: block.gate_weight, "down_weight": block.down_weight, **given}
    checks.floating(operator, x=block.x, **operands)
    if block.x.dim() == 0:
        raise ValueError(f"{operator}: x must have shape [..., K], got a scalar.")
    if block.gate_weight.dim() != 2 or block.gate_weight.shape[1] != block.x.shape[-1]:
        raise ValueError(
            f"{operator}: {gate} must have shape [N, K] with K = {block.x.shape[-1]} like x, "
            f"got {list(block.gate_weight.shape)}."
        )
    n, k = block.gate_weight.shape
    checks.columns(operator, f"{gate}.t()", n)
    if block.up_weight is not None:
        checks.shape(operator, "up_weight", block.up_weight, (n, k), "[N, K]", "like gate_weight")
    if block.down_weight.dim() != 2 or block.down_weight.shape[1] != n:
        raise ValueError(
            f"{operator}: down_weight must have shape [D, N] with N = {n} like {gate}, "
            f"got {list(block.down_weight.shape)}."
        )
    for name, tensor in given.items():
        if name == "down_bias":
            checks.shape(operator, name, tensor, (block.down_weight.shape[0],), "[D]", "like down_weight")
        elif name != "up_weight" and not (name == "threshold" and tensor.dim() == 0):
            letters = "[N] or []" if name == "threshold" else "[N]"
            checks.shape(operator, name, tensor, (n,), letters, f"like {gate}")
    checks.same_device(operator, "x", block.x.device, **operands)
    if method not in METHODS:
        raise ValueError(f"{operator}: method must be one of {', '.join(METHODS)}, got {method!r}.")
    if density is not None and not isinstance(density, BlockTracker):
        raise TypeError(f"{operator}: density must be an ffn.BlockTracker or None, got {type(density).__name__}.")
    return math.prod(block.x.shape[:-1]), k, n, block.down_weight.shape[0]

"""Feed-forward blocks of Hugging Face models, fused or sparse, in place and undone as easily.

`patch` gives each block that it knows, one that computes down(act(gate(x)) * up(x)) or down(act(up(x))) with plain
layers, a subclass of its class, with the same name and another forward; parameters and state dict stay as
they are. Every call looks whether the layers are still plain, for hooks and adapters may come later: then the block
computes as its class does.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from gossamer import gemm
from gossamer._core import checks
from gossamer.ffn import SparseBlock
from gossamer.ffn.block import METHODS, NAMES, Block
from gossamer.ffn.training import with_all
from gossamer.gemm import linear_glu_path
from gossamer.integrations.transformers._layouts import (
    Layout,
    activation_of,
    drops_out,
    layout_of,
    looks_gated,
    why_not_fused,
    why_not_sparse,
)
from gossamer.nn.plain import KEPT, forget_parts, of_parts, weight_and_bias, why_called

_PATCH = "integrations.transformers.patch"


@dataclass(frozen=True)
class Report:
    """The changes of `patch`.

    Args:
        replaced: name of a module -> its class.
        left: name of a module that looks like a feed-forward block -> why it computes as before.
        sparse: the names among `replaced` whose blocks compute their active neurons alone.
        dense: name of a module that was to be sparse, and is not -> why.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    sparse: frozenset[str] = frozenset()
    dense: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = Counter((kind, name in self.sparse) for name, kind in self.replaced.items())
        how = {False: "with gate and up in one product", True: "sparse"}
        lines = [f"{kind}: {count} {how[sparse]}" for (kind, sparse), count in counts.items()]
        lines += [f"{count} not sparse, {why}" for why, count in Counter(self.dense.values()).items()]
        return "\n".join([*lines, *self.lines_of_left()]) or _NONE

    def lines_of_left(self) -> list[str]:
        """One for each reason."""
        first = {why: name for name, why in reversed(self.left.items())}
        return [
            f"{first[why]}{f' (and {count - 1} more)' * (count > 1)}: left as it is, {why}"
            for why, count in Counter(self.left.values()).items()
        ]


_NONE = (
    "no feed-forward block found that can be replaced; known are modules whose forward is down(act(gate(x)) * up(x)), "
    "and with sparse=True down(act(up(x))) of a ReLU or squared ReLU"
)


def patch(model: nn.Module, *, recompute: bool = False, sparse: bool | str = False, train: bool = False) -> Report:
    """Computes gate and up of a model's gated MLPs in one product, and sparse blocks sparse; `unpatch` undoes it.

    Args:
        model: a model of transformers, or any module. A block is known by its forward, not by its class's name:
            down(act(gate(x)) * up(x)), with gate and up in one layer or two, a dropout before down, or multipliers, as
            Llama, Qwen, Gemma, Phi3, T5, Falcon-H1 and some 150 others have it. An MLP with an adapter, quantised or
            distributed parameters, a hook on a part of it or on all modules, or another activation is left, and so is
            one that gets an adapter, a hook or other parameters later.
        recompute: as in `gemm.linear_glu`: whether training computes gate and up again instead of keeping them.
        sparse: whether blocks with a ReLU or squared ReLU multiply the active neurons alone, where nothing drops out;
            under gradients they do so on lists of active entries. Then blocks without a gate are taken as well,
            down(act(up(x))), and those in OPT's layers (without gradients, unless `train`). True goes `method="auto"`
            of `ffn.gated`; the name of a path pins that.
        train: whether sparse blocks keep L1, L0 and the counts of their neurons in calls with gradients, for
            `activity(model)` and `sparsity_callback`. Needs `sparse`.

    Returns:
        The blocks that are replaced, and those that are left and why; `patch` warns where nothing is replaced. `print`
        it. A sparse block has a `ffn.SparseBlock` as `module.sparse_block`, which tells the path that was taken last. A
        model that is patched already is left as it is, with a warning, and its report is made again; `unpatch` it to
        change an option.

    Raises:
        TypeError: model is no module; recompute or train is no bool.
        ValueError: an unknown path; `train` without `sparse`.

    Source: Shazeer 2020, "GLU Variants Improve Transformer"; Cetin et al., "Sparser, Faster, Lighter Transformer
    Language Models".

    >>> print(patch(model))  # doctest: +SKIP
    LlamaMLP: 32 with gate and up in one product
    """
    check_model(_PATCH, model)
    check_flags(_PATCH, recompute=recompute, train=train)
    method = "auto" if sparse is True else sparse if sparse else None
    if method is not None and method not in METHODS:
        raise ValueError(f"{_PATCH}: sparse must be True, False or one of {', '.join(METHODS)}, got {sparse!r}.")
    if train and method is None:
        raise ValueError(f"{_PATCH}: train=True needs sparse=True: blocks that compute all keep no activity.")
    patched = {name: module for name, module in model.named_modules() if isinstance(module, _Patched)}
    if patched:
        nothing_changed(_PATCH, model, "patched already")
        kinds = {name: type(module).__name__ for name, module in patched.items()}
        return Report(kinds, sparse=frozenset(name for name in patched if "sparse_block" in patched[name].__dict__))
    replaced, left, found, dense = {}, {}, set(), {}
    for name, module in model.named_modules():
        kind: Any = type(module)
        layout = layout_of(kind)
        if layout is None:
            if looks_gated(module):
                left[name] = f"the forward of {kind.__name__} is another formula"
            continue
        if layout.plain and (method is None or activation_of(module, layout) is None):
            if why_not_sparse(module, layout) is None:
                left[name] = f"{kind.__name__} would compute sparsely with sparse=True"
            continue
        is_sparse = method is not None and why_not_sparse(module, layout) is None
        why = why_not_sparse(module, layout) if layout.plain else why_not_fused(module, layout)
        if "forward" in module.__dict__:
            why = "its forward has been replaced on this instance"
        elif kind.__new__ is not object.__new__:
            why = f"{kind.__name__} has a __new__ of its own, as classes that fully_shard makes: patch before it"
        if why is not None:
            left[name] = why
            continue
        module.__class__ = _patched(kind, recompute)
        replaced[name] = kind.__name__
        if is_sparse and method is not None:
            module.sparse_block = SparseBlock(method, _PATCH)
            module.sparse_block.keeps_activity = train
            # A step through a larger module's forward takes longer than what it saves for small blocks.
            module.sparse_block.density.repeats = not layout.inline
            found.add(name)
        elif method is not None:
            dense[name] = why_not_sparse(module, layout) or ""
    report = Report(replaced, left, frozenset(found), dense)
    if not replaced:
        warnings.warn(f"{_PATCH}: {report}.", stacklevel=2)
    return report


def undo(operator: str, model: nn.Module) -> bool:
    """Undoes `patch`; whether there was anything to undo."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, _Patched)}
    later = {name or "model": what for name, module in found.items() if (what := _put_on(module)) is not None}
    if later:
        raise ValueError(
            f"{operator}: patched blocks must be as patch left them, but since then "
            f"{'; '.join(f'{name} got {what}' for name, what in later.items())}. Remove that first (a hook of "
            "accelerate with accelerate.hooks.remove_hook_from_module); where it cannot be, as fully_shard, load the "
            "state dict into a new model."
        )
    for module in found.values():
        for name in ("forward", "sparse_block"):
            module.__dict__.pop(name, None)
        forget_parts(module)
        module.__class__ = module._gossamer[0]
    return bool(found)


class _Patched(nn.Module):
    """The second base of the class of a patched block, beside the class that it had."""

    _gossamer: ClassVar[tuple[Any, bool]]
    """The class that it had, and recompute."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        if "_gossamer" not in type(self).__dict__:
            return super().__reduce_ex__(protocol)
        # The class is found under no name, for its own is that of the class that it had.
        return _rebuild, self._gossamer, self.__getstate__()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # Settled paths are those of a dtype and a device.
        forget_parts(self)
        block: SparseBlock | None = self.__dict__.get("sparse_block")
        if block is not None:
            block.density.settled.clear()
        return super()._apply(*args, **kwargs)


@functools.cache
def _patched(kind: Any, recompute: bool) -> type[nn.Module]:
    """A class of blocks with another forward, and the same name."""
    layout = layout_of(kind)
    assert layout is not None
    forward = functools.wraps(kind.forward)((_inline if layout.inline else _alone)(kind, layout, recompute))
    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (_Patched, kind), {**same, "_gossamer": (kind, recompute), "forward": forward})


def _alone(kind: type[nn.Module], layout: Layout, recompute: bool) -> Callable[..., Any]:
    """The forward of a module that is a block and nothing else."""
    argument, plain = list(inspect.signature(kind.forward).parameters)[1], kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        own = self.__dict__
        # In a model each step of the host takes several times as long as in a loop that calls one block, for its code
        # has left the caches; so a call whose path is known asks little.
        known = own["sparse_block"] if "sparse_block" in own else own.get(KEPT)
        if known is not None and args and not kwargs and (path := known.settled(args[0])) is not None:
            if path == "dense":
                return plain(self, *args)
            if path == "gather" and len(args) == 1 and (out := _again(self, args[0], layout)) is not None:
                return out
        given = (*args, *kwargs.values())
        # A call that the class refuses is left to it, too.
        if len(given) == 1 and (not kwargs or argument in kwargs):
            able = _able(self, layout)
            out = None
            if able.sparse and "sparse_block" in own:
                if drops_out(self, layout):
                    _observe(self, given[0], layout)
                else:
                    out = _run(self, given[0], layout, able)
            if out is not None:
                return out
            if able.fused:
                return _compute(self, given[0], layout, able, recompute)
        return kind.forward(self, *args, **kwargs)

    return forward


def _inline(kind: type[nn.Module], layout: Layout, recompute: bool) -> Callable[..., Any]:
    """The forward of a larger module, which calls the block's parts one after the other: the first computes all of it,
    and the others hand it on."""
    plain: Any = kind.forward
    while plain.__code__.co_name == "forward_with_checkpointing":
        # transformers puts this around the forward of each class of layers, and only that of the last does anything.
        plain = plain.__wrapped__

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        block = self.__dict__.get("sparse_block")
        if block is not None and args and block.settled(args[0]) == "dense":
            return plain(self, *args, **kwargs)
        able = _able(self, layout)
        if not (able.sparse and "sparse_block" in self.__dict__):
            return kind.forward(self, *args, **kwargs)
        kept = not torch.is_grad_enabled() or self.sparse_block.keeps_activity
        if kept and not drops_out(self, layout):
            return kind.forward(_View(self, layout, functools.partial(_run, able=able), lambda x: x), *args, **kwargs)
        if self.sparse_block.observer is None:
            return kind.forward(self, *args, **kwargs)
        return kind.forward(_View(self, layout, _observed), *args, **kwargs)

    return forward


def _again(self: Any, x: Tensor, layout: Layout) -> Tensor | None:
    """The result of a sparse block's call whose like was computed before, by its launches; else None."""
    kept = self.__dict__.get(KEPT)
    given = None if kept is None or layout.dropout else kept.parameters(self)
    if given is None or len(given) != (4 if layout.up is None else 6) or not kept.found.sparse:
        return None
    return self.__dict__["sparse_block"].again(x, _weights(self, layout, given=given), kept.found.activation)


class _View:
    """A module with another first part of its block, and another `rest` of it, which hands on the result of the first,
    or with its own. All else is the module's own, which is left as it is."""

    # The layers of transformers checkpoint where they are called by their type's own; this never is.
    forward = None

    def __init__(self, module: nn.Module, layout: Layout, first: Callable[..., Any], rest: Any = None) -> None:
        self._module = module
        setattr(self, layout.gate, functools.partial(first, module, layout=layout))
        if rest is not None:
            setattr(self, layout.activation, rest)
            setattr(self, layout.down, rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _rebuild(kind: Any, recompute: bool) -> nn.Module:
    """A patched block from a pickle, still without its state."""
    # Where a pickle is read, another version of the class may have a forward that is not known here.
    made = kind if layout_of(kind) is None else _patched(kind, recompute)
    return made.__new__(made)


def _put_on(module: _Patched) -> str | None:
    """A change of a patched block after `patch` that keeps it from being undone, or None."""
    if "_gossamer" not in type(module).__dict__:
        return f"the class {type(module).__name__}"
    forward = module.__dict__.get("forward")
    # accelerate, when its hook is removed, leaves the forward of the class on the instance.
    if forward is None or getattr(forward, "__func__", None) is type(module).forward:
        return None
    return "another forward"


def check_model(operator: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{operator}: model must be a torch.nn.Module, got {type(model).__name__}.")


def check_flags(operator: str, **given: bool) -> None:
    for argument, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{operator}: {argument} must be True or False, got {value!r}.")


def nothing_changed(operator: str, model: nn.Module, why: str) -> None:
    """Warns the caller of a public function."""
    warnings.warn(f"{operator}: {type(model).__name__} is {why}; nothing changed.", stacklevel=3)


def _run(self: Any, x: Tensor, layout: Layout, able: _Able) -> Tensor | None:
    """The result of a block's `SparseBlock`, where no entries drop out, or None where the path computes all."""
    weights, name, block = _weights(self, layout), able.activation, self.__dict__["sparse_block"]
    if not (block.keeps_activity and torch.is_grad_enabled()):
        return block(x, *weights, activation=name)
    found = block(x, *weights, activation=name, with_activity=True)
    if found is None:
        found = with_all(_block(self, x, layout))
    out, block.activity = found
    return out


def gate_weight(module: Any) -> Tensor:
    """`[N, K]`, the weight that the activation of a sparse block follows."""
    layout = layout_of(type(module)._gossamer[0])
    assert layout is not None
    return _weights(module, layout)[0]


def _observed(self: Any, x: Tensor, layout: Layout) -> Tensor:
    """The first part of a block that an observer hears of and that its class computes."""
    _observe(self, x, layout)
    return getattr(self, layout.gate)(x)


def _observe(self: Any, x: Tensor, layout: Layout) -> None:
    block = _block(self, x, layout)
    if block.activation in NAMES:
        self.sparse_block.observe(block)


def _block(self: Any, x: Tensor, layout: Layout) -> Block:
    gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias = _weights(self, layout)
    operands = (x, gate_weight, gate_bias, None, up_weight, up_bias, down_weight, down_bias)
    return Block(*operands, _able(self, layout).activation)


class _Able(NamedTuple):
    """The paths that the parts of a block allow now: its `SparseBlock`, `linear_glu`, and a read down layer; and
    the activation's name."""

    sparse: bool
    fused: bool
    reads_down: bool
    activation: str


def _able(self: Any, layout: Layout) -> _Able:
    names = tuple(filter(None, (layout.gate, layout.up, layout.down, layout.activation, layout.dropout)))
    return of_parts(self, names, functools.partial(_find_able, self, layout))


def _find_able(self: Any, layout: Layout) -> _Able:
    return _Able(
        why_not_sparse(self, layout) is None,
        not layout.plain and why_not_fused(self, layout) is None,
        why_called(**{layout.down: self._modules.get(layout.down)}) is None,
        activation_of(self, layout) or "",
    )


def _weights(self: Any, layout: Layout, whole: bool = False, given: Any = None) -> Sequence[Any]:
    """Weights and biases as a `SparseBlock` takes them; `whole`: where one layer has gate and up, its weight stays one,
    if the gate comes first. `given` are the parameters of the layers, if the caller has them."""
    if given is None:
        parts = self._modules  # attributes of a module that are modules are slow to get
        names = filter(None, (layout.gate, layout.up, layout.down))
        given = [tensor for name in names for tensor in weight_and_bias(parts[name])]
    if layout.up is not None:
        return given
    gate_weight, gate_bias, *down = given
    up_weight = up_bias = None
    if not layout.plain:
        order = slice(None) if layout.gate_first else slice(None, None, -1)
        if not (whole and layout.gate_first):
            gate_weight, up_weight = gate_weight.chunk(2)[order]
        gate_bias, up_bias = (None, None) if gate_bias is None else gate_bias.chunk(2)[order]
    return gate_weight, gate_bias, up_weight, up_bias, *down


def _compute(self: Any, x: Tensor, layout: Layout, able: _Able, recompute: bool) -> Tensor:
    gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias = _weights(self, layout, whole=True)
    kept = self.__dict__.get(KEPT)
    watched = torch.is_grad_enabled() or torch.compiler.is_compiling() or checks.capturing()
    if not (watched or kept is None) and (layout.gate_scale or not linear_glu_path.gains(x, gate_weight, up_weight)):
        kept.settle(x)
    scale = getattr(self, layout.gate_scale) if layout.gate_scale else None
    if scale is not None:
        # The kernel has no multiplier of the gate: x and the biases take it, and up gives it back.
        x = x * scale
        gate_bias, up_bias = (None if t is None else t * scale for t in (gate_bias, up_bias))
    options: dict[str, Any] = {"gate_bias": gate_bias, "up_bias": up_bias, "recompute": recompute}
    if able.reads_down and scale is None and not layout.dropout:
        out = gemm.gated_mlp(
            x, gate_weight, up_weight, down_weight, down_bias=down_bias, activation=able.activation, **options
        )
    else:
        hidden = gemm.linear_glu(x, gate_weight, up_weight, activation=able.activation, **options)
        hidden = hidden if scale is None else hidden / scale
        if layout.dropout:
            hidden = getattr(self, layout.dropout)(hidden)
            # T5 may keep this layer alone in float32.
            if isinstance(down_weight, Tensor) and down_weight.dtype not in (hidden.dtype, torch.int8):
                hidden = hidden.to(down_weight.dtype)
        out = self._modules[layout.down](hidden)
    return out * getattr(self, layout.down_scale) if layout.down_scale else out

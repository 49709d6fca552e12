"""Tensors without elements, where SAELens's training code expects dense ones that hardly anybody reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gossamer import sae
from gossamer._core.versions import version_of
from gossamer.rowsparse import Rows

# Attributes that are known without the elements.
_KNOWN = {
    getattr(Tensor, name).__get__ if inspect.isgetsetdescriptor(getattr(Tensor, name)) else getattr(Tensor, name)
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_sparse", "is_cuda", "is_cpu", "is_nested")
    + ("size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "__len__", "get_device")
}


# Methods that wait for a gradient, which goes past the dense tensor.
_WATCHES = {Tensor.retain_grad, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}


def _no_way_back(grad: Tensor) -> None:
    raise RuntimeError(
        "integrations.sae_lens: a gradient arrived at latents or pre-activations that are computed when they are read, "
        "by a way that goes round them (autograd.Function, checkpoint, vmap). Give it tensor.clone() instead."
    )


class Lazy(Tensor):
    """A tensor of a shape, dtype and device whose elements are computed when an operation needs them.

    Every operation of PyTorch that is not told otherwise gets the dense tensor, with its gradient; a compiled function
    leaves its graph for that. One that changes it in place changes the dense one, which is from then on all that
    counts. Code that goes round `__torch_function__` (`autograd.Function.apply`, reentrant checkpoints, vmap) gets the
    values; the gradient has no way back, and raises.
    """

    _make: Callable[[], Tensor]
    _dense: Tensor | None
    _modes: tuple[bool, bool, torch.dtype]

    @staticmethod
    def __new__(
        cls,
        make: Callable[[], Tensor],
        shape: Any,
        dtype: torch.dtype,
        device: torch.device,
        differentiable: bool = False,
    ) -> Any:
        lazy = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=differentiable)
        lazy._make, lazy._dense = make, None
        if differentiable:
            with torch._C.DisableTorchFunctionSubclass():
                Tensor.register_hook(lazy, _no_way_back)
        kind = device.type
        lazy._modes = (torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        return lazy

    def dense(self) -> Tensor:
        """The tensor; computed once, as it would have been computed where this was made."""
        if self._dense is None:
            grad, autocast, dtype = self._modes
            with torch.set_grad_enabled(grad), torch.autocast(self.device.type, dtype, autocast):
                self._dense = self._make()
            assert self._dense.shape == self.shape and self._dense.dtype is self.dtype
        return self._dense

    def _quick(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation that needs no dense tensor, else NotImplemented."""
        return NotImplemented

    @classmethod
    @torch.compiler.disable(reason="the elements of such a tensor are computed where it was made")
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WATCHES and args and isinstance(args[0], Lazy):
            raise RuntimeError(
                f"integrations.sae_lens: {func.__name__} on latents of training_forward_pass would see no gradient, "
                "because the latents are decoded packed. Add a hook at hook_sae_acts_post, which makes them dense, or "
                "unpatch the SAE."
            )
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(args[0] if args else None, Lazy) and args[0]._dense is None:
            result = args[0]._quick(func, args[1:], kwargs)
            if result is not NotImplemented:
                return result
        return func(*tree_map(_materialize, args), **tree_map(_materialize, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Code that goes round __torch_function__, such as autograd's own.
        return func(*tree_map(_materialize, args), **tree_map(_materialize, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.dense())


class Latents(Lazy):
    """Latents `(..., d_sae)` that are packed as `decode` multiplies them; the counts of SAELens's trainer come from the
    entries. The dense tensor is multiplied with the norms of W_dec, if given, which are `scale` now."""

    rows: Rows
    l0: Tensor
    scale: Tensor | None

    @staticmethod
    def __new__(
        cls, rows: Rows, l0: Tensor, dtype: torch.dtype, W_dec: Tensor | None = None, scale: Tensor | None = None
    ) -> Any:
        version = None if W_dec is None else version_of(W_dec)

        def make() -> Tensor:
            # A copy, not a view of an operator's result: it may be changed in place.
            dense = rows.to_dense().to(dtype, copy=True)
            if W_dec is None or scale is None:
                return dense
            # An optimizer may have changed the decoder since: then the latents are still those of before.
            norms = scale
            if W_dec._version == version:
                norm = W_dec.norm(dim=-1)
                norms = scale + (norm - norm.detach())
            return (dense * norms).to(dtype)

        latents = Lazy.__new__(cls, make, rows.shape, dtype, rows.device, rows.requires_grad)
        latents.rows, latents.l0, latents.scale = rows, l0, scale
        return latents

    @property
    def packed(self) -> bool:
        """Whether the entries are still the truth: nobody has had the dense tensor, and could have changed it."""
        return self._dense is None

    def _quick(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func == Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
            return self.rows.requires_grad
        if func is Tensor.bool and not args and not kwargs:
            return _Fired(self, torch.bool)
        return NotImplemented


class _Fired(Lazy):
    """Which latents differ from 0, as bool or as 0.0 and 1.0."""

    latents: Latents

    @staticmethod
    def __new__(cls, latents: Latents, dtype: torch.dtype) -> Any:
        fired = Lazy.__new__(
            cls, lambda: latents.dense().detach().bool().to(dtype), latents.rows.shape, dtype, latents.rows.device
        )
        fired.latents = latents
        return fired

    def _quick(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not self.latents.packed:
            return NotImplemented
        if func is Tensor.float and not args and not kwargs:
            return _Fired(self.latents, torch.float32)
        if func is Tensor.sum and len(args) == 1 and not kwargs and isinstance(args[0], int):
            dtype = torch.int64 if self.dtype is torch.bool else self.dtype
            axis = args[0] % self.dim()
            if axis == self.dim() - 1:
                return self.latents.l0.detach().to(dtype)
            if self.dim() == 2:
                return sae.count_fired(self.latents.rows).to(dtype)
        return NotImplemented


class HiddenPre(Lazy):
    """Pre-activations `[..., d_sae]`, of which losses for dead latents want a few columns: of x - b_dec by `encoder`, a
    weight and a bias, or by W_enc and b_enc; `scaled` with the norms of the decoder's rows."""

    sae: Any
    x: Tensor
    b_dec: Tensor | None

    @staticmethod
    def __new__(
        cls, sae: Any, x: Tensor, b_dec: Tensor | None, scaled: bool, encoder: tuple[Tensor, Tensor] | None = None
    ) -> Any:
        weight, bias = encoder or (sae.W_enc, sae.b_enc)
        operands = [weight, bias, sae.W_dec, sae.b_dec]
        if not x.is_inference():
            operands.append(x)
        versions = [version_of(operand) for operand in operands]

        def make() -> Tensor:
            if [operand._version for operand in operands] != versions:
                raise RuntimeError(
                    "integrations.sae_lens: hidden_pre is computed when it is read, and the input or the weights that "
                    "it follows from have been changed since. Read it before optimizer.step() and before the next "
                    "batch takes the place of this one, or unpatch the SAE."
                )
            pre = hidden._inner() @ weight + bias
            return pre * sae.W_dec.norm(dim=-1) if scaled else pre

        # Products without elements show the dtype by autocast and promotion.
        with torch.no_grad():
            empty = x.new_empty(0, 1) @ weight[:1, :1] + bias[:1]
            dtype = (empty * sae.W_dec[:1, :0].norm(dim=-1)).dtype if scaled else empty.dtype
        needed = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *operands))
        hidden = Lazy.__new__(cls, make, (*x.shape[:-1], sae.W_enc.shape[1]), dtype, x.device, needed)
        hidden.sae, hidden.x, hidden.b_dec = sae, x, b_dec
        return hidden

    def _inner(self) -> Tensor:
        return self.x if self.b_dec is None else self.x - self.b_dec

    def columns(self, which: Tensor) -> Tensor:
        """`[..., len(which)]` of the columns `which`, not scaled."""
        # Its gradient is an addition, where that of indexing sorts first.
        return self._inner() @ self.sae.W_enc.index_select(1, which) + self.sae.b_enc.index_select(0, which)


def _materialize(value: Any) -> Any:
    return value.dense() if isinstance(value, Lazy) else value

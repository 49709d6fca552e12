"""Sparse decoding for sparse autoencoders."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer._core import autocast, checks, tuning
from gossamer._core.calls import Checked, Key, key_of
from gossamer._core.ops import needs_gradient, refuse_second, register, shortcut, undispatched
from gossamer.rowsparse import pack
from gossamer.rowsparse._torch.pack import Overflowed, overflow_error
from gossamer.rowsparse.container import RowSparse
from gossamer.rowsparse.dense_product import dense_product
from gossamer.rowsparse.formats import Rows, empty_ell
from gossamer.rowsparse.matmul import check_weight, gradients, matmul_operator, multiply, repeat, sampled_operator
from gossamer.rowsparse.pack import check_container
from gossamer.rowsparse.transpose import transpose_keys
from gossamer.sae._torch import decode as _cpu
from gossamer.sae.decode_path import break_even, choose_path, named, path_of

_checked: Checked[int] = Checked()
"""Of calls without gradients: their slots, or 0 for the dense product."""
_METHODS = ("auto", "exact", "fixed", "dense")


def decode(
    acts: Tensor | Rows,
    W_dec: Tensor,
    b_dec: Tensor | None = None,
    *,
    method: str = "auto",
    capacity: int | None = None,
    validate: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """acts @ W_dec + b_dec, reading only the decoder rows of features that fired.

    Args:
        acts: `[..., d_sae]` dense, any strides, or a rowsparse container of that shape.
        W_dec: `[d_sae, d_in]`, one row per feature as in SAELens; the dtype and device of acts.
        b_dec: `[d_in]`, added in float32, or None.
        method: `"auto"` is exact for every input, never waits for the device, and turns to dense tiles where acts are
            too dense for gathering, or to the plain product: where that takes less than twice the time to look through
            acts, as with small d_in, or a container has many slots. `"exact"` builds a CSR of the true size, which
            costs one sync. `"fixed"` gives every row `capacity` slots, and is for dense acts. `"dense"` is the plain
            product.
        capacity: slots per row, for `"fixed"`; for `"auto"` with dense acts it overrides the measured break-even.
        validate: `"fixed"` alone: True looks whether a row had more entries than slots, which costs one sync. False
            does not look and **drops** what did not fit; it is there for comparison and for inputs with a known L0.
        out_dtype: dtype of the result; None takes W_dec's. Sums are float32 (float64 for float64).

    Returns:
        `[..., d_in]`, differentiable in acts (at entries that differ from 0; zero elsewhere), W_dec and b_dec.
        Bitwise reproducible. NaN in W_dec shows where it is selected; dense tiles and the plain product spread it.

    Raises:
        ValueError: shapes or devices do not fit, an unknown method, `"fixed"` for a container, capacity below 1, or,
            with `"fixed"` and `validate`, a row with more entries than slots (the message names the largest count).
        TypeError: dtypes differ or are not floating.
        NotImplementedError: `"exact"`, or `"fixed"` with `validate`, under CUDA-graph capture.

    Source: the package jumprelu-sae-kernels (exact, fixed and validated kernels); `"auto"` is new.

    >>> decode(torch.tensor([[0.0, 2.0]]), torch.eye(2), torch.ones(2)).tolist()
    [[1.0, 3.0]]
    """
    key: Key | None = None
    if isinstance(acts, Tensor) and not autocast.enabled(acts.device):
        key = key_of((acts, W_dec, b_dec), (method, validate, out_dtype, tuning.tf32()), (capacity,))
        slots = None if torch.is_grad_enabled() else _checked.get(key)
        if slots is not None:
            if slots == 0:
                return _dense(acts, W_dec, b_dec, out_dtype)
            call, truncate = shortcut(_sae_decode, acts.device), method == "fixed"
            if acts.dim() == 2:
                return call(acts, W_dec, b_dec, slots, truncate, out_dtype)
            out = call(acts.reshape(-1, acts.shape[-1]), W_dec, b_dec, slots, truncate, out_dtype)
            return out.view(*acts.shape[:-1], W_dec.shape[1])
    operator = "sae.decode"
    if isinstance(acts, RowSparse):
        try:
            out = repeat(acts, W_dec, b_dec, out_dtype) if method == "auto" and capacity is None else None
            if out is None:
                return decode_rows(operator, acts, W_dec, b_dec, method, capacity, out_dtype)
        except Overflowed:
            raise overflow_error(operator) from None
        return out if len(acts.shape) == 2 else out.view(*acts.shape[:-1], W_dec.shape[1])
    checks.floating(operator, acts=acts, W_dec=W_dec)
    if acts.dim() == 0 or W_dec.dim() != 2 or W_dec.shape[0] != acts.shape[-1]:
        expected = f"d_sae = {acts.shape[-1]}" if acts.dim() else "acts [..., d_sae]"
        raise ValueError(
            f"{operator}: W_dec must have shape [d_sae, d_in] with {expected} like acts, got {list(W_dec.shape)}."
        )
    n, d = W_dec.shape
    checks.columns(operator, "acts", n)
    check_rest(operator, W_dec, b_dec, method, capacity, out_dtype, acts=acts)
    acts, W_dec = autocast.cast(acts, W_dec)  # type: ignore[assignment]
    checks.same_dtype(operator, "acts", acts, W_dec=W_dec)
    m = acts.numel() // n if n else math.prod(acts.shape[:-1])
    free, truncate = capacity is None and out_dtype in (None, W_dec.dtype), method == "fixed"
    keep = (truncate and validate) or needs_gradient(acts, W_dec, b_dec)
    path = choose_path(m, n, d, W_dec, method, free, keep)
    if path == "dense":
        # The gradient lives at the entries, whichever way the product takes.
        masked = acts.requires_grad and torch.is_grad_enabled()
        _checked.keep(key, 0)
        return _dense(torch.where(acts != 0, acts, 0) if masked else acts, W_dec, b_dec, out_dtype)
    flat = acts.reshape(m, n)
    if path == "csr":
        with named(path):
            out = matmul_operator(*pack(flat, format="csr").packed, W_dec, b_dec, out_dtype)
    else:
        if capacity is None:
            if truncate:
                raise ValueError(
                    f'{operator}: method="fixed" needs capacity, the number of entries a row has room for.'
                )
            capacity = break_even(m, n, d, W_dec)
        slots = min(capacity, n)
        if truncate and validate:
            checks.no_sync(operator, "validate=True", 'Use method="auto", which is exact without a sync.')
            out, _, _, nnz = _sae_decode_lists(flat, W_dec, b_dec, slots, True, out_dtype)
            _check_counts(operator, nnz, capacity)
        elif keep:
            call = undispatched(_sae_decode_lists, flat, W_dec, b_dec)
            out = call(flat, W_dec, b_dec, slots, truncate, out_dtype)[0]
        else:
            out = _sae_decode(flat, W_dec, b_dec, slots, truncate, out_dtype)
            if n:
                _checked.keep(key, slots)
    return out if acts.dim() == 2 else out.view(*acts.shape[:-1], d)


def decode_dense(acts: Tensor, W_dec: Tensor, b_dec: Tensor | None) -> Tensor:
    """acts `[..., d_sae]` @ W_dec + b_dec by the plain product, with the gradient of every latent, 0 or not."""
    acts, W_dec = autocast.cast(acts, W_dec)  # type: ignore[assignment]
    return _dense(acts, W_dec, b_dec, None)


def decode_rows(
    operator: str,
    rows: Rows,
    W_dec: Tensor,
    b_dec: Tensor | None,
    method: str,
    capacity: int | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    check_container(operator, rows, "acts")
    check_weight(operator, rows, W_dec, "W_dec", "[d_sae, d_in]", "acts")
    check_rest(operator, W_dec, b_dec, method, capacity, out_dtype)
    if method == "fixed":
        raise ValueError(
            f'{operator}: method="fixed" packs dense activations, and acts is a {type(rows).__name__}. '
            'Use method="auto", which is exact for every container; rowsparse.pack takes a capacity.'
        )
    if method == "dense":
        return decode(rows.to_dense(), W_dec, b_dec, method=method, out_dtype=out_dtype)
    out = multiply(operator, rows, W_dec, b_dec, out_dtype, "acts", "W_dec")
    return out.view(*rows.shape[:-1], W_dec.shape[1])


def check_rest(
    operator: str,
    W_dec: Tensor,
    b_dec: Tensor | None,
    method: str,
    capacity: int | None,
    out_dtype: torch.dtype | None,
    **others: Tensor,
) -> None:
    checks.float_dtype(operator, "out_dtype", out_dtype, "Convert the result instead.")
    if b_dec is not None:
        checks.floating(operator, b_dec=b_dec)
    checks.same_device(operator, "W_dec", W_dec.device, b_dec=b_dec, **others)
    if b_dec is not None:
        checks.shape(operator, "b_dec", b_dec, (W_dec.shape[1],), "[d_in]", "like W_dec")
    if method not in _METHODS:
        raise ValueError(f"{operator}: method must be one of {', '.join(_METHODS)}, got {method!r}.")
    if capacity is not None:
        checks.positive(operator, "capacity", capacity, "It is the number of entries a row has room for.")


def _dense(acts: Tensor, W_dec: Tensor, b_dec: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    with named("dense"):
        if acts.dim() == 2:
            return dense_product(acts, W_dec, b_dec, out_dtype)
        flat = acts.reshape(acts.shape[:-1].numel(), acts.shape[-1])
        return dense_product(flat, W_dec, b_dec, out_dtype).view(*acts.shape[:-1], W_dec.shape[1])


def _check_counts(operator: str, nnz: Tensor, capacity: int) -> None:
    largest = int(nnz.max()) if nnz.numel() else 0
    if largest > capacity:
        raise ValueError(
            f"{operator}: a row of acts has {largest} entries, more than capacity = {capacity}. "
            f'Raise capacity to {largest}, or use method="auto", which has no limit.'
        )


def _fake(acts: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return weight.new_empty(acts.shape[0], weight.shape[1], dtype=rest[-1] or weight.dtype)


def _context(ctx: Any, inputs: Any, output: Any) -> None:
    acts, weight, bias, capacity, truncate, _ = inputs
    _, values, indices, nnz = output
    ctx.mark_non_differentiable(values, indices, nnz)
    ctx.set_materialize_grads(False)
    # What was dropped has no gradient.
    source, counts = (None, nnz.clamp(max=capacity)) if truncate else (acts, nnz)
    ctx.save_for_backward(source, weight, values, indices, counts)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    acts, weight, values, indices, nnz = ctx.saved_tensors
    grad_acts = grad_weight = grad_bias = products = None
    if ctx.needs_input_grad[1]:
        columns = undispatched(transpose_keys, indices, nnz)(indices, nnz, weight.shape[0])
        sampled = weight if ctx.needs_input_grad[0] else None
        grad_weight, products = gradients(grad, indices, columns, values, nnz, acts, sampled, weight.dtype)
    if ctx.needs_input_grad[0]:
        refuse_second("sae.decode", "A container has them: rowsparse.pack dense acts, or use create_graph=False.")
        call = undispatched(sampled_operator, grad, weight, acts)
        grad_acts = call(grad, weight, indices, nnz, acts, True, True, products)[1].to(values.dtype)
    if ctx.needs_input_grad[2]:
        grad_bias = grad.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(ctx.bias_dtype)
    return grad_acts, grad_weight, grad_bias, None, None, None


_ARGUMENTS = "(Tensor acts, Tensor weight, Tensor? bias, SymInt capacity, bool truncate, ScalarType? out_dtype)"
_sae_decode = register(
    f"sae_decode{_ARGUMENTS} -> Tensor", cpu=_cpu.decode, strided=("acts", "weight"), fake=_fake, path=path_of
)
_sae_decode_lists = register(
    f"sae_decode_lists{_ARGUMENTS} -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu.decode_lists,
    strided=("acts", "weight"),
    fake=lambda acts, *rest: (_fake(acts, *rest), *empty_ell(acts, acts.shape[0], rest[2])),
    setup_context=_context,
    backward=_backward,
    path=partial(path_of, keep=True),
)

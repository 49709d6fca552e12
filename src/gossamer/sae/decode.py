"""Sparse decoding for sparse autoencoders."""

import math
from typing import Any

import torch
from torch import Tensor

from gossamer._core import autocast, checks, tuning
from gossamer._core.calls import Checked, Key, key_of
from gossamer._core.operator import register
from gossamer._core.ops import needs_gradient, refuse_second
from gossamer.rowsparse import Rows
from gossamer.rowsparse._torch.pack import Overflowed, overflow_error
from gossamer.rowsparse.dense_product import dense_product
from gossamer.rowsparse.formats import empty_slots, sums_over_rows
from gossamer.rowsparse.matmul import gradients, multiply, sampled_operator
from gossamer.rowsparse.records import SampledMatmul, TransposeKeys
from gossamer.rowsparse.rows import MOST_SLOTS
from gossamer.rowsparse.transpose import transpose_keys
from gossamer.sae._torch import decode as _cpu
from gossamer.sae.decode_path import PATHS, choose_path, named, path_of, slots_of
from gossamer.sae.records import SaeDecode, SaeDecodeLists

_checked: Checked[int] = Checked()
"""Of calls without gradients: their slots, or 0 for the dense product."""


def decode(
    acts: Tensor | Rows,
    W_dec: Tensor,
    b_dec: Tensor | None = None,
    *,
    capacity: int | None = None,
    out_dtype: torch.dtype | None = None,
    group: Any = None,
) -> Tensor:
    """acts @ W_dec + b_dec, reading only the decoder rows of features that fired.

    Exact for every input, without waiting for the device. Dense acts that are too dense for gathering go through dense
    tiles; where the plain product takes less than twice the time to look through acts, as with small d_in, or where a
    container has many slots, it is the plain product.

    Args:
        acts: `[..., d_sae]` dense, any strides, or `Rows` of that shape.
        W_dec: `[d_sae, d_in]`, one row per feature as in SAELens; the dtype and device of acts.
        b_dec: `[d_in]`, added in float32, or None.
        capacity: entries of a row of dense acts up to which it is gathered; None takes half as many again as take as
            long as a dense product, at most 4,096, and with many rows and gradients at most a 32nd of d_sae.
        out_dtype: dtype of the result; None takes W_dec's. Sums are float32 (float64 for float64).
        group: None, or a `torch.distributed` process group over whose ranks the latents are spread: acts are `Rows` of
            this rank's latents, W_dec is its slice, b_dec is the same on all ranks, and so is the result, after one
            `all_reduce` in float32. The backward pass communicates nothing.

    Returns:
        `[..., d_in]`, differentiable in acts (at entries that differ from 0; zero elsewhere), W_dec and b_dec.
        Bitwise reproducible. NaN in W_dec shows where it is selected; dense tiles and the plain product spread it.

    Raises:
        ValueError: shapes or devices do not fit, capacity is below 1, or `group` is no process group of this process.
        TypeError: dtypes differ or are not floating, or acts are dense beside a group.

    Source: the package jumprelu-sae-kernels.

    >>> decode(torch.tensor([[0.0, 2.0]]), torch.eye(2), torch.ones(2)).tolist()
    [[1.0, 3.0]]
    """
    operator = "sae.decode"
    if group is not None:
        from gossamer.sae.sharded import decode_sharded

        return decode_sharded(acts, W_dec, b_dec, out_dtype, group)
    key: Key | None = None
    if isinstance(acts, Tensor):
        key = key_of((acts, W_dec, b_dec), (out_dtype, tuning.tf32()), (capacity,))
        slots = None if torch.is_grad_enabled() else _checked.get(key)
        if slots is not None:
            if slots == 0:
                return _dense(acts, W_dec, b_dec, out_dtype)
            flat = acts if acts.dim() == 2 else acts.reshape(-1, acts.shape[-1])
            out = _sae_decode(SaeDecode(flat, W_dec, b_dec, slots, out_dtype))
            return out if acts.dim() == 2 else out.view(*acts.shape[:-1], W_dec.shape[1])
    if isinstance(acts, Rows):
        try:
            return decode_rows(operator, acts, W_dec, b_dec, out_dtype)
        except Overflowed:
            raise overflow_error(operator) from None
    checks.floating(operator, acts=acts, W_dec=W_dec)
    if acts.dim() == 0 or W_dec.dim() != 2 or W_dec.shape[0] != acts.shape[-1]:
        expected = f"d_sae = {acts.shape[-1]}" if acts.dim() else "acts [..., d_sae]"
        raise ValueError(
            f"{operator}: W_dec must have shape [d_sae, d_in] with {expected} like acts, got {list(W_dec.shape)}."
        )
    n, d = W_dec.shape
    checks.columns(operator, "acts", n)
    check_rest(operator, W_dec, b_dec, out_dtype, acts=acts)
    if capacity is not None:
        checks.positive(operator, "capacity", capacity, "It is the number of entries up to which a row is gathered.")
    acts, W_dec = autocast.cast(acts, W_dec)  # type: ignore[assignment]
    checks.same_dtype(operator, "acts", acts, W_dec=W_dec)
    m = acts.numel() // n if n else math.prod(acts.shape[:-1])
    free, keep = capacity is None and out_dtype in (None, W_dec.dtype), needs_gradient(acts, W_dec, b_dec)
    if choose_path(m, n, d, W_dec, free, keep) == "dense":
        # The gradient lives at the entries, whichever path the product takes.
        masked = acts.requires_grad and torch.is_grad_enabled()
        _checked.keep(key, 0)
        return _dense(torch.where(acts != 0, acts, 0) if masked else acts, W_dec, b_dec, out_dtype)
    flat = acts.reshape(m, n)
    # Rows with more entries are exact in any case.
    slots = slots_of(m, n, d, W_dec, keep) if capacity is None else capacity
    slots = min(slots, n, max(1, MOST_SLOTS // max(m, 1)))
    if keep:
        out = _sae_decode_lists(SaeDecodeLists(flat, W_dec, b_dec, slots, out_dtype))[0]
    else:
        out = _sae_decode(SaeDecode(flat, W_dec, b_dec, slots, out_dtype))
        if n:
            _checked.keep(key, slots)
    return out if acts.dim() == 2 else out.view(*acts.shape[:-1], d)


def decode_dense(acts: Tensor, W_dec: Tensor, b_dec: Tensor | None) -> Tensor:
    """acts `[..., d_sae]` @ W_dec + b_dec by the plain product, with the gradient of every latent, 0 or not."""
    acts, W_dec = autocast.cast(acts, W_dec)  # type: ignore[assignment]
    return _dense(acts, W_dec, b_dec, None)


def decode_rows(
    operator: str, rows: Rows, W_dec: Tensor, b_dec: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    names, check = ("acts", "W_dec", "[d_sae, d_in]"), lambda: check_rest(operator, W_dec, b_dec, out_dtype)
    out = multiply(operator, rows, W_dec, b_dec, out_dtype, names, check)
    return out.view(*rows.shape[:-1], W_dec.shape[1])


def check_rest(
    operator: str, W_dec: Tensor, b_dec: Tensor | None, out_dtype: torch.dtype | None, **others: Tensor
) -> None:
    checks.float_dtype(operator, "out_dtype", out_dtype, "Convert the result instead.")
    if b_dec is not None:
        checks.floating(operator, b_dec=b_dec)
    checks.same_device(operator, "W_dec", W_dec.device, b_dec=b_dec, **others)
    if b_dec is not None:
        checks.shape(operator, "b_dec", b_dec, (W_dec.shape[1],), "[d_in]", "like W_dec")


def _dense(acts: Tensor, W_dec: Tensor, b_dec: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    with named("dense"):
        if acts.dim() == 2:
            return dense_product(acts, W_dec, b_dec, out_dtype)
        flat = acts.reshape(acts.shape[:-1].numel(), acts.shape[-1])
        return dense_product(flat, W_dec, b_dec, out_dtype).view(*acts.shape[:-1], W_dec.shape[1])


def _fake(call: SaeDecode | SaeDecodeLists) -> Tensor:
    weight = call.weight
    return weight.new_empty(call.acts.shape[0], weight.shape[1], dtype=call.out_dtype or weight.dtype)


def _fake_lists(call: SaeDecodeLists) -> tuple[Tensor, ...]:
    m = call.acts.shape[0]
    return _fake(call), *empty_slots(call.acts, m, m * call.capacity)


def _backward(call: SaeDecodeLists, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    acts, weight, bias, *_ = call
    (values, indices, spans), grad, products = kept, grads[0], None
    found: dict[str, Tensor | None] = {}
    if needs.weight:
        columns = transpose_keys(TransposeKeys(indices, spans, weight.shape[0]))
        sampled = weight if needs.acts else None
        found["weight"], products = gradients(grad, indices, columns, values, spans, acts, sampled, weight.dtype)
    if needs.acts:
        refuse_second("sae.decode", "A container has them: rowsparse.pack dense acts, or use create_graph=False.")
        dense = sampled_operator(SampledMatmul(grad, weight, indices, spans, acts, True, True, products))[1]
        found["acts"] = dense.to(values.dtype)
    if bias is not None and needs.bias:
        found["bias"] = sums_over_rows(grad).to(bias.dtype)
    return found


@register(SaeDecode, cpu=_cpu.decode, fake=_fake, choose_path=path_of, paths=PATHS, repeats=True)
def _sae_decode() -> Any:
    from gossamer.sae._triton.decode import decode

    return decode


@register(
    SaeDecodeLists,
    cpu=_cpu.decode_lists,
    fake=_fake_lists,
    backward=_backward,
    saved=("acts", "weight", "bias"),
    keep=lambda call, results: results[1:],
    differentiable=1,
    repeats=True,
)
def _sae_decode_lists() -> Any:
    from gossamer.sae._triton.decode import decode_lists

    return decode_lists

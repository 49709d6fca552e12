"""rows @ weight."""

from typing import Any

import torch
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.calls import Checked, Key, key_of
from gossamer._core.ops import needs_gradient, register, shortcut, undispatched
from gossamer.rowsparse._torch import matmul as _cpu
from gossamer.rowsparse._torch.sampled_matmul import sampled_matmul as _cpu_sampled
from gossamer.rowsparse.dense_product import dense_product
from gossamer.rowsparse.entries import fitting
from gossamer.rowsparse.linear_source import LinearSource, matmul_linear
from gossamer.rowsparse.matmul_path import choose_path, rows_at_once
from gossamer.rowsparse.pack import parts, unpack_operator
from gossamer.rowsparse.rows import Rows, check_container
from gossamer.rowsparse.transpose import transpose_keys

_checked: Checked[bool] = Checked()
"""Of calls of lists whose source, if any, is dense."""


def matmul(rows: Rows, weight: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """rows @ weight, reading only the weight rows that have an entry (SpMM: SAE decode, sparse down projection).

    On a GPU rows whose slots are more than a few percent of the columns are unpacked for a dense product.

    Args:
        rows: `Rows` of shape `(..., N)`.
        weight: `[N, D]`, the dtype and device of rows, any strides.
        out_dtype: dtype of the result; None takes the weight's. Sums are float32 (float64 for float64).

    Returns:
        `[..., D]`, differentiable in values, source and weight, bitwise reproducible. NaN and Inf in the weight show
        where they are selected; rows that overflowed, or are unpacked, are a dense product, which spreads them.

    Raises:
        ValueError: weight's shape or device does not fit; on the CPU, an index outside [0, N).
        TypeError: rows is no container, or the dtypes differ.

    Source: the package jumprelu-sae-kernels, `sparse_decode_kernel`.

    >>> matmul(pack(torch.tensor([0.0, 2.0])), torch.eye(2)).tolist()
    [0.0, 2.0]
    """
    operator = "rowsparse.matmul"
    out = repeat(rows, weight, None, out_dtype)
    if out is None:
        check_container(operator, rows)
        check_weight(operator, rows, weight)
        checks.float_dtype(operator, "out_dtype", out_dtype, "Convert the result instead.")
        out = multiply(operator, rows, weight, None, out_dtype)
    return out if len(rows.shape) == 2 else out.view(*rows.shape[:-1], weight.shape[1])


def repeat(rows: Any, weight: Any, bias: Any, out_dtype: torch.dtype | None) -> Tensor | None:
    """`multiply`, where a call like this one has come to an end before; None where the call has to be checked."""
    key = list_key(rows, weight, bias)
    if key is None or _checked.get((key, out_dtype)) is None:
        return None
    values, indices, spans, source = rows.packed
    given = (values, indices, spans, source, weight, bias, out_dtype)
    if needs_gradient(values, source, weight, bias):
        return undispatched(matmul_operator, values, source, weight, bias)(*given)
    return shortcut(matmul_operator, weight.device)(*given)


def list_key(rows: Any, *others: Any) -> Key | None:
    """The properties that the checks of a call with a container without a linear source depend on; `others` are tensors
    and None."""
    if type(rows) is not Rows or type(rows.packed.source) is LinearSource:
        return None
    # That the container's parts fit each other has been seen to.
    key = key_of((rows.packed.values, *others), (rows.shape,))
    # It changes dtypes.
    return None if key is None or torch._C._is_any_autocast_enabled() else key


def multiply(
    operator: str,
    rows: Rows,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    argument: str = "rows",
    name: str = "weight",
) -> Tensor:
    """rows @ weight + bias, `[M, D]`, of checked shapes; the names are those of the caller's signature."""
    autocasts = autocast.enabled(weight.device)
    *lists, source = rows.packed
    if (
        isinstance(source, LinearSource)
        and source.dtype is rows.dtype
        and not source.squared
        and not (autocasts or needs_gradient(rows, weight, bias))
    ):
        checks.same_dtype(operator, argument, lists[0], **{name: weight})
        given = source.tensors
        return undispatched(matmul_linear, lists[0], *given, weight, bias)(*lists, *given, weight, bias, out_dtype)
    values, indices, spans, dense = parts(operator, rows, argument)
    if autocasts:
        values, dense, weight = autocast.cast(values, dense, weight)  # type: ignore[assignment]
    checks.same_dtype(operator, argument, values, **{name: weight})
    call = matmul_operator if autocasts else undispatched(matmul_operator, values, weight, bias)
    out = call(values, indices, spans, dense, weight, bias, out_dtype)
    key = list_key(rows, weight, bias)
    _checked.keep(None if key is None else (key, out_dtype), True)
    return out


def check_weight(
    operator: str, rows: Rows, weight: Tensor, name: str = "weight", letters: str = "[N, D]", container: str = "rows"
) -> None:
    """`weight` is a floating [N, D] beside the container; the rest are the words of the caller's signature."""
    checks.floating(operator, **{name: weight})
    checks.matrix(operator, name, weight, letters, 0, rows.num_columns, container)
    checks.same_device(operator, name, weight.device, **{container: rows.packed.values})


def _context(ctx: Any, inputs: Any, output: Any) -> None:
    values, indices, spans, source, weight, bias, _ = inputs
    ctx.save_for_backward(values, indices, spans, source, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    values, indices, spans, source, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grad_values = grad_source = grad_weight = grad_bias = None
    products = None
    if needs[4] and _unpacks(values, spans, source, weight, grad):
        unpacked = undispatched(unpack_operator, values, source)(values, indices, spans, source, weight.shape[0])
        grad_weight = dense_product(unpacked.t(), grad, None, None)
    elif needs[4]:
        columns = undispatched(transpose_keys, indices, spans)(indices, spans, weight.shape[0])
        sampled = weight if needs[0] else None
        grad_weight, products = gradients(grad, indices, columns, values, spans, source, sampled, weight.dtype)
    if needs[3] or (needs[0] and products is None):
        # An element without an entry has no gradient; the maker of the source masks it.
        wanted = source if needs[3] else None
        call = undispatched(sampled_operator, grad, weight, source)
        products, dense = call(grad, weight, indices, spans, wanted, False, False, products)
        grad_source = dense.to(source.dtype) if needs[3] else None
    if needs[0] and products is not None:
        grad_values = products.to(values.dtype)
    if needs[5]:
        grad_bias = grad.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(ctx.bias_dtype)
    return grad_values, None, None, grad_source, grad_weight, grad_bias, None


def _unpacks(values: Tensor, spans: Tensor, source: Tensor | None, weight: Tensor, grad: Tensor) -> bool:
    """Whether the weight's gradient is the dense product of unpacked rows: where `matmul` is, and they fit at once."""
    # A traced tensor is no plain one, and may have no sizes to choose by.
    if torch.is_grad_enabled() or type(grad) is not Tensor or not values.dtype is weight.dtype is grad.dtype:
        return False
    m, n = spans.shape[1], weight.shape[0]
    if choose_path(values, m, source is not None, weight) == "gather":
        return False
    return rows_at_once(m, n, values.element_size(), values, weight, weight, grad) == m


def _fake(values: Tensor, indices: Tensor, spans: Tensor, *rest: Any) -> Tensor:
    _, weight, _, out_dtype = rest
    return weight.new_empty(spans.shape[1], weight.shape[1], dtype=out_dtype or weight.dtype)


def gradients(
    grad: Tensor,
    indices: Tensor,
    columns: tuple[Tensor, Tensor, Tensor],
    values: Tensor,
    spans: Tensor,
    source: Tensor | None,
    weight: Tensor | None,
    dtype: torch.dtype,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(weight gradient [N, D], float32 gradient of values) of rows @ weight, with `columns` from `transpose_keys`.

    Without `weight` there is no gradient of values. It is 0 at overflowed rows. With a `mask` [M, N] those have entries
    where it differs from 0, whatever the source holds elsewhere.
    """
    col_offsets, keys, _ = columns
    call = undispatched(_matmul_bwd, grad, values, source, weight)
    grad_weight, products = call(grad, indices, keys, col_offsets, values, spans, source, weight, dtype, mask)
    return grad_weight, None if weight is None else products


def _bwd_context(ctx: Any, inputs: Any, output: Any) -> None:
    grad, indices, keys, col_offsets, values, spans, source, weight, _, mask = inputs
    assert mask is None, "a caller with a mask refuses second derivatives"
    ctx.save_for_backward(grad, indices, keys, col_offsets, values, spans, source, weight)


def _bwd_backward(ctx: Any, grad_weight: Tensor, grad_products: Tensor) -> tuple[Tensor | None, ...]:
    """Both gradients are linear in each of their factors, as the product itself is."""
    grad, indices, keys, col_offsets, values, spans, source, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grad_weight = grad_weight.to(values.dtype)
    grad_grad = grad_values = grad_source = grad_factor = None
    if needs[0]:
        grad_grad = matmul_operator(values, indices, spans, source, grad_weight, None, grad.dtype)
    if needs[4] or needs[6]:
        sampled, dense = sampled_operator(
            grad, grad_weight, indices, spans, source if needs[6] else None, False, False, None
        )
        grad_values = sampled.to(values.dtype) if needs[4] else None
        grad_source = dense.to(source.dtype) if needs[6] else None
    if weight is not None:
        fits = fitting(spans, indices.shape[0])
        factors = grad_products.to(values.dtype)
        if needs[0]:
            grad_grad = grad_grad + matmul_operator(factors, indices, fits, None, weight, None, grad.dtype)
        if needs[7]:
            dtype = weight.dtype
            grad_factor = _matmul_bwd(grad, indices, keys, col_offsets, factors, spans, None, None, dtype)[0]
    return grad_grad, None, None, None, grad_values, None, grad_source, grad_factor, None, None


def _fake_bwd(grad: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _, _, col_offsets, values, _, _, weight, dtype = rest[:8]
    working = torch.promote_types(grad.dtype, torch.float32)
    products = grad.new_empty((0,) if weight is None else values.shape, dtype=working)
    return grad.new_empty(col_offsets.shape[0] - 1, grad.shape[1], dtype=dtype), products


def _fake_sampled(x: Tensor, weight: Tensor, indices: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    m, n, (_, source, scatter) = x.shape[0], weight.shape[0], rest[:3]
    if scatter:
        return x.new_empty(0), x.new_empty(m, n)
    return x.new_empty(indices.shape), x.new_empty(m if source is not None else 0, n)


def _sampled_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, indices, spans, source, scatter, ctx.masked, products = inputs
    ctx.given = None if products is None else products.dtype
    assert not scatter, "a caller that scatters refuses second derivatives"
    ctx.save_for_backward(x, weight, indices, spans, source)


def _sampled_backward(ctx: Any, grad_values: Tensor, grad_dense: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, indices, spans, source = ctx.saved_tensors
    if source is None:
        grad_source, spans = None, fitting(spans, indices.shape[0])
    else:
        grad_source = torch.where(source != 0, grad_dense, 0) if ctx.masked else grad_dense
    grad_x = grad_weight = grad_products = None
    if ctx.given is not None:
        grad_products, grad_values = grad_values.to(ctx.given), torch.zeros_like(grad_values)
    if ctx.needs_input_grad[0]:
        call = undispatched(matmul_operator, grad_values, grad_source, weight)
        grad_x = call(grad_values, indices, spans, grad_source, weight, None, x.dtype)
    if ctx.needs_input_grad[1]:
        columns = undispatched(transpose_keys, indices, spans)(indices, spans, weight.shape[0])
        grad_weight, _ = gradients(x, indices, columns, grad_values, spans, grad_source, None, weight.dtype)
    return grad_x, grad_weight, None, None, None, None, None, grad_products


matmul_operator = register(
    "matmul(Tensor values, Tensor indices, Tensor spans, Tensor? source, Tensor weight, Tensor? bias, "
    "ScalarType? out_dtype) -> Tensor",
    cpu=_cpu.matmul,
    strided=("source", "weight"),
    fake=_fake,
    setup_context=_context,
    backward=_backward,
)
_matmul_bwd = register(
    "matmul_bwd(Tensor grad, Tensor indices, Tensor keys, Tensor col_offsets, Tensor values, Tensor spans, "
    "Tensor? source, Tensor? weight, ScalarType dtype, Tensor? mask=None) -> (Tensor, Tensor)",
    cpu=_cpu.matmul_bwd,
    strided=("source", "weight", "mask"),
    fake=_fake_bwd,
    setup_context=_bwd_context,
    backward=_bwd_backward,
)
sampled_operator = register(
    "sampled_matmul(Tensor x, Tensor weight, Tensor indices, Tensor spans, Tensor? source, bool scatter, "
    "bool masked, Tensor? products) -> (Tensor, Tensor)",
    cpu=_cpu_sampled,
    strided=("x", "weight", "source"),
    fake=_fake_sampled,
    setup_context=_sampled_context,
    backward=_sampled_backward,
)

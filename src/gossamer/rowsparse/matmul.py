"""rows @ weight."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.calls import Checked, Key, key_of
from gossamer._core.compiling import together
from gossamer._core.operator import register
from gossamer.rowsparse._torch import matmul as _cpu
from gossamer.rowsparse._torch.sampled_matmul import sampled_matmul as _cpu_sampled
from gossamer.rowsparse.dense_product import dense_product
from gossamer.rowsparse.entries import fitting
from gossamer.rowsparse.formats import sums_over_rows
from gossamer.rowsparse.linear_source import LinearSource
from gossamer.rowsparse.matmul_path import choose_path, rows_at_once
from gossamer.rowsparse.pack import parts, unpack_operator
from gossamer.rowsparse.records import Matmul, MatmulBwd, SampledMatmul, TransposeKeys, Unpack
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
    out = multiply("rowsparse.matmul", rows, weight, None, out_dtype)
    return out if len(rows.shape) == 2 else out.view(*rows.shape[:-1], weight.shape[1])


def list_key(rows: Any, *others: Any) -> Key | None:
    """The properties that the checks of a call with a container without a linear source depend on; `others` are tensors
    and None."""
    if type(rows) is not Rows or type(rows.packed.source) is LinearSource:
        return None
    # That the container's parts fit each other has been seen to.
    return key_of((rows.packed.values, *others), (rows.shape,))


def multiply(
    operator: str,
    rows: Rows,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    names: tuple[str, str, str] = ("rows", "weight", "[N, D]"),
    check: Callable[[], None] = lambda: None,
) -> Tensor:
    """rows @ weight + bias, `[M, D]`. `names` are those of the caller's signature, with the weight's shape; `check`
    looks at the bias, unless a call like this one has come to an end before."""
    key = list_key(rows, weight, bias)
    key = None if key is None else (key, out_dtype)
    known, (argument, name, letters) = _checked.get(key), names
    if known is None:
        check_container(operator, rows, argument)
        check_weight(operator, rows, weight, name, letters, argument)
        checks.float_dtype(operator, "out_dtype", out_dtype, "Convert the result instead.")
        check()
    values, indices, spans, dense = parts(operator, rows, argument)
    if known is None:
        if autocast.enabled(weight.device):
            values, dense, weight = autocast.cast(values, dense, weight)  # type: ignore[assignment]
        checks.same_dtype(operator, argument, values, **{name: weight})
    out: Tensor = matmul_operator(Matmul(values, indices, spans, dense, weight, bias, out_dtype))
    if known is None:
        _checked.keep(key, True)
    return out


def check_weight(
    operator: str, rows: Rows, weight: Tensor, name: str = "weight", letters: str = "[N, D]", container: str = "rows"
) -> None:
    """`weight` is a floating [N, D] beside the container; the rest are the words of the caller's signature."""
    checks.floating(operator, **{name: weight})
    checks.matrix(operator, name, weight, letters, 0, rows.num_columns, container)
    checks.same_device(operator, name, weight.device, **{container: rows.packed.values})


@together
def _backward(call: Matmul, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    values, indices, spans, source, weight, bias, _ = call
    (grad,), products = grads, None
    found: dict[str, Tensor | None] = {}
    if needs.weight and _unpacks(values, spans, source, weight, grad):
        unpacked = unpack_operator(Unpack(values, indices, spans, source, weight.shape[0]))
        found["weight"] = dense_product(unpacked.t(), grad, None, None)
    elif needs.weight:
        columns = transpose_keys(TransposeKeys(indices, spans, weight.shape[0]))
        sampled = weight if needs.values else None
        found["weight"], products = gradients(grad, indices, columns, values, spans, source, sampled, weight.dtype)
    if needs.source or (needs.values and products is None):
        # An element without an entry has no gradient; the maker of the source masks it.
        wanted = source if needs.source else None
        products, dense = sampled_operator(SampledMatmul(grad, weight, indices, spans, wanted, False, False, products))
        found["source"] = None if wanted is None else dense.to(wanted.dtype)
    if needs.values and products is not None:
        found["values"] = products.to(values.dtype)
    if bias is not None and needs.bias:
        found["bias"] = sums_over_rows(grad).to(bias.dtype)
    return found


def _unpacks(values: Tensor, spans: Tensor, source: Tensor | None, weight: Tensor, grad: Tensor) -> bool:
    """Whether the weight's gradient is the dense product of unpacked rows: where `matmul` is, and they fit at once."""
    # A traced tensor is no plain one, and may have no sizes to choose by.
    if torch.is_grad_enabled() or type(grad) is not Tensor or not values.dtype is weight.dtype is grad.dtype:
        return False
    m, n = spans.shape[1], weight.shape[0]
    if choose_path(m, values.shape[0], source is not None, weight) == "gather":
        return False
    return rows_at_once(m, n, values.element_size(), values, weight, weight, grad) == m


def _fake(call: Matmul) -> Tensor:
    weight = call.weight
    return weight.new_empty(call.spans.shape[1], weight.shape[1], dtype=call.out_dtype or weight.dtype)


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
    call = MatmulBwd(grad, indices, keys, col_offsets, values, spans, source, weight, dtype, mask)
    grad_weight, products = _matmul_bwd(call)
    return grad_weight, None if weight is None else products


def _bwd_backward(call: MatmulBwd, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    """Both gradients are linear in each of their factors, as the product itself is."""
    grad, indices, keys, col_offsets, values, spans, source, weight, *_ = call
    grad_weight, grad_products = grads
    if grad_weight is None:
        grad_weight = grad.new_zeros(col_offsets.shape[0] - 1, grad.shape[1])
    grad_weight = grad_weight.to(values.dtype)
    found: dict[str, Tensor | None] = {}
    if needs.grad:
        found["grad"] = matmul_operator(Matmul(values, indices, spans, source, grad_weight, None, grad.dtype))
    if needs.values or needs.source:
        wanted = source if needs.source else None
        sampled, dense = sampled_operator(SampledMatmul(grad, grad_weight, indices, spans, wanted, False, False, None))
        found["values"] = sampled.to(values.dtype)
        found["source"] = None if wanted is None else dense.to(wanted.dtype)
    if weight is not None and grad_products is not None:
        fits = fitting(spans, indices.shape[0])
        factors = grad_products.to(values.dtype)
        if needs.grad:
            more = matmul_operator(Matmul(factors, indices, fits, None, weight, None, grad.dtype))
            found["grad"] = found["grad"] + more
        if needs.weight:
            again = MatmulBwd(grad, indices, keys, col_offsets, factors, spans, None, None, weight.dtype, None)
            found["weight"] = _matmul_bwd(again)[0]
    return found


def _fake_bwd(call: MatmulBwd) -> tuple[Tensor, Tensor]:
    grad, working = call.grad, torch.promote_types(call.grad.dtype, torch.float32)
    products = grad.new_empty((0,) if call.weight is None else call.values.shape, dtype=working)
    return grad.new_empty(call.col_offsets.shape[0] - 1, grad.shape[1], dtype=call.dtype), products


def _fake_sampled(call: SampledMatmul) -> tuple[Tensor, Tensor]:
    x, m, n = call.x, call.x.shape[0], call.weight.shape[0]
    if call.scatter:
        return x.new_empty(0), x.new_empty(m, n)
    return x.new_empty(call.indices.shape), x.new_empty(m if call.source is not None else 0, n)


def _keep_sampled(call: SampledMatmul, results: Any) -> tuple[Any, ...]:
    assert not call.scatter, "a caller that scatters refuses second derivatives"
    return (None if call.products is None else call.products.dtype,)


def _sampled_backward(call: SampledMatmul, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    x, weight, indices, spans, source, _, masked, _ = call
    (given,), (grad_values, grad_dense) = kept, grads
    if grad_values is None:
        grad_values = x.new_zeros(indices.shape)
    if source is None:
        grad_source, spans = None, fitting(spans, indices.shape[0])
    elif grad_dense is None:
        grad_source = torch.zeros_like(source)
    else:
        grad_source = torch.where(source != 0, grad_dense, 0) if masked else grad_dense
    found: dict[str, Tensor | None] = {}
    if given is not None:
        found["products"], grad_values = grad_values.to(given), torch.zeros_like(grad_values)
    if needs.x:
        found["x"] = matmul_operator(Matmul(grad_values, indices, spans, grad_source, weight, None, x.dtype))
    if needs.weight:
        columns = transpose_keys(TransposeKeys(indices, spans, weight.shape[0]))
        found["weight"], _ = gradients(x, indices, columns, grad_values, spans, grad_source, None, weight.dtype)
    return found


@register(
    Matmul,
    cpu=_cpu.matmul,
    fake=_fake,
    backward=_backward,
    saved=("values", "indices", "spans", "source", "weight", "bias"),
    repeats=True,
)
def matmul_operator() -> Any:
    from gossamer.rowsparse._triton.matmul import matmul

    return matmul


@register(
    MatmulBwd,
    cpu=_cpu.matmul_bwd,
    fake=_fake_bwd,
    backward=_bwd_backward,
    saved=("grad", "indices", "keys", "col_offsets", "values", "spans", "source", "weight"),
    repeats=True,
)
def _matmul_bwd() -> Any:
    from gossamer.rowsparse._triton.matmul import matmul_bwd

    return matmul_bwd


@register(
    SampledMatmul,
    cpu=_cpu_sampled,
    fake=_fake_sampled,
    backward=_sampled_backward,
    saved=("x", "weight", "indices", "spans", "source"),
    keep=_keep_sampled,
    repeats=True,
)
def sampled_operator() -> Any:
    from gossamer.rowsparse._triton.sampled_matmul import sampled_matmul

    return sampled_matmul

"""(x @ weight.T) at a pattern."""

import math

from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.calls import Checked
from gossamer.rowsparse._torch.pack import refuse_overflow
from gossamer.rowsparse.matmul import check_weight, list_key, sampled_operator
from gossamer.rowsparse.pack import parts
from gossamer.rowsparse.records import SampledMatmul
from gossamer.rowsparse.rows import Rows, check_container, unchecked

_checked: Checked[bool] = Checked()
"""Of calls with a list of entries for each row."""


def sampled_matmul(x: Tensor, weight: Tensor, pattern: Rows) -> Rows:
    """x @ weight.T at the entries of a pattern (SDDMM: sparse up projection, masked gradients).

    On a GPU all of the product is computed where the slots of a row are more than a few percent of the columns.

    Args:
        x: `[..., D]`, float, with the leading dimensions of the pattern.
        weight: `[N, D]`, the dtype and device of x, any strides.
        pattern: `Rows` of shape `(..., N)`; its values do not matter, except that in a row that
            overflowed the pattern is where the source differs from 0.

    Returns:
        A container like `pattern` with the products as values, differentiable in x and
        weight. If the pattern has a source, so has the result: a dense `[M, N]`, written at the overflowed rows.

    Raises:
        ValueError: shapes or devices do not fit; on the CPU, an index outside [0, N), or a row of
            the pattern that overflowed without a source.
        TypeError: pattern is no container, or the dtypes differ.

    Source: Cetin et al., "Sparser, Faster, Lighter Transformer Language Models", the fused up projection.

    >>> pattern = pack(torch.tensor([[0.0, 1.0]]), capacity=1)
    >>> sampled_matmul(torch.tensor([[2.0, 3.0]]), torch.eye(2), pattern).values.tolist()
    [3.0]
    """
    operator = "rowsparse.sampled_matmul"
    key = list_key(pattern, x, weight)
    if _checked.get(key) is None:
        check_container(operator, pattern, "pattern")
        checks.floating(operator, x=x)
        check_weight(operator, pattern, weight, container="pattern")
        checks.same_device(operator, "weight", weight.device, x=x)
        checks.shape(operator, "x", x, (*pattern.shape[:-1], weight.shape[1]), "[..., D]", "like pattern and weight")
        x, weight = autocast.cast(x, weight)  # type: ignore[assignment]
        checks.same_dtype(operator, "x", x, weight=weight)
        _checked.keep(key, True)
    _, indices, spans, source = parts(operator, pattern, "pattern")
    if source is None and checks.host_computes(spans):
        refuse_overflow(operator, spans, indices.shape[0])
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    values, dense = sampled_operator(SampledMatmul(flat, weight, indices, spans, source, False, True, None))
    return unchecked(values, indices, spans, pattern.shape, None if source is None else dense)

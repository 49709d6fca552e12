"""(x @ weight.T) at a pattern."""

import math

from torch import Tensor

from gossamer._core import autocast, checks
from gossamer.rowsparse.formats import Rows
from gossamer.rowsparse.matmul import check_dtypes, check_weight, sampled_operator
from gossamer.rowsparse.pack import listed, parts


def sampled_matmul(x: Tensor, weight: Tensor, pattern: Rows) -> Rows:
    """x @ weight.T at the entries of a pattern (SDDMM: sparse up projection, masked gradients).

    On a GPU all of the product is computed where the slots of a row are more than a few percent of the columns.

    Args:
        x: `[..., D]`, float, with the leading dimensions of the pattern.
        weight: `[N, D]`, the dtype and device of x, any strides.
        pattern: `ELL`, `CSR` or `TwELL` of shape `(..., N)`; its values do not matter, except that in a row that
            overflowed the pattern is where the source differs from 0.

    Returns:
        A container like `pattern` (an `ELL` for a `TwELL`) with the products as values, differentiable in x and
        weight. If the pattern has a source, so has the result: a dense `[M, N]`, written at the overflowed rows.

    Raises:
        ValueError: shapes or devices do not fit; on the CPU, an index outside [0, N).
        TypeError: pattern is no container, or the dtypes differ.

    Source: Cetin et al., "Sparser, Faster, Lighter Transformer Language Models", the fused up projection.

    >>> pattern = pack(torch.tensor([[0.0, 1.0]]), capacity=1)
    >>> sampled_matmul(torch.tensor([[2.0, 3.0]]), torch.eye(2), pattern).values.tolist()
    [[3.0]]
    """
    operator = "rowsparse.sampled_matmul"
    pattern = listed(operator, pattern, "pattern")
    _, indices, offsets, source = parts(operator, pattern)
    checks.floating(operator, x=x)
    check_weight(operator, pattern, weight, container="pattern")
    checks.same_device(operator, "weight", weight.device, x=x)
    checks.shape(operator, "x", x, (*pattern.shape[:-1], weight.shape[1]), "[..., D]", "like pattern and weight")
    if autocast.enabled(x.device):
        x, weight = autocast.cast(x, weight)  # type: ignore[assignment]
    check_dtypes(operator, "x", x, "weight", weight)
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    values, dense = sampled_operator(flat, weight, indices, offsets, source, False, True, None)
    counts = pattern.packed.counts
    return pattern.rebuilt(values, pattern.packed.indices, counts, None if source is None else dense)

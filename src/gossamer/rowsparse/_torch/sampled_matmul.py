"""(x @ weight.T) at the entries of a pattern, on the CPU."""

import torch
from torch import Tensor

from gossamer.rowsparse._torch.pack import dot_entries, overflowed_rows, stored


def sampled_matmul(
    x: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    source: Tensor | None,
    scatter: bool,
    masked: bool,
    products: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Operator `sampled_matmul` -> (values like indices, dense [M, N] that is right at overflowed rows)."""
    m, n = x.shape[0], weight.shape[0]
    slots, rows = stored(indices, offsets, n)
    columns = indices.reshape(-1)[slots].long()
    if products is None:
        products = dot_entries(x, rows, weight, columns)
    else:
        products = products.reshape(-1)[slots]
    products = products.to(x.dtype)
    over = overflowed_rows(indices, offsets) if source is not None else rows.new_empty(0)
    if scatter:
        values, dense = x.new_empty(0), x.new_zeros(m, n)
        dense[rows, columns] = products
    else:
        values, dense = x.new_zeros(indices.numel()), x.new_zeros(m if source is not None else 0, n)
        values[slots] = products
        values = values.view(indices.shape)
    if source is not None and over.numel():
        both = torch.promote_types(x.dtype, weight.dtype)
        product = (x[over].to(both) @ weight.t().to(both)).to(x.dtype)
        dense[over] = torch.where(source[over] != 0, product, 0) if masked else product
    return values, dense

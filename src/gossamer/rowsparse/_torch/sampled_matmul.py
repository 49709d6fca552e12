"""(x @ weight.T) at the entries of a pattern, on the CPU."""

import torch
from torch import Tensor

from gossamer.rowsparse._torch.pack import CHUNK, dot_entries, overflowed_rows, stored
from gossamer.rowsparse.records import SampledMatmul

DENSE = 1 / 64
"""The share of entries from which on all products are computed. On x86 an entry takes 5 ns a column to gather, and a
product of matrices 0.03 to 0.05 ns a multiplication."""


def sampled_matmul(call: SampledMatmul) -> tuple[Tensor, Tensor]:
    """(values like indices, dense [M, N] that is right at overflowed rows)."""
    x, weight, indices, spans, source, scatter, masked, products = call
    m, n = x.shape[0], weight.shape[0]
    slots, rows = stored(indices, spans, n)
    columns = indices[slots].long()
    if products is None:
        products = _at_entries(x, weight, rows, columns)
    else:
        products = products[slots]
    products = products.to(x.dtype)
    over = overflowed_rows(spans, indices.shape[0]) if source is not None else rows.new_empty(0)
    if scatter:
        values, dense = x.new_empty(0), x.new_zeros(m, n)
        dense[rows, columns] = products
    else:
        values, dense = x.new_zeros(indices.numel()), x.new_zeros(m if source is not None else 0, n)
        values[slots] = products
    if source is not None and over.numel():
        both = torch.promote_types(x.dtype, weight.dtype)
        product = (x[over].to(both) @ weight.t().to(both)).to(x.dtype)
        dense[over] = torch.where(source[over] != 0, product, 0) if masked else product
    return values, dense


def _at_entries(x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The products at entries in order of their rows, in float32 at least."""
    m, n, working = x.shape[0], weight.shape[0], torch.promote_types(x.dtype, torch.float32)
    if rows.shape[0] <= DENSE * m * n:
        return dot_entries(x, rows, weight, columns)
    products = torch.empty(rows.shape[0], dtype=working)
    weight, step = weight.to(working), max(1, CHUNK // max(n, 1))
    ends = torch.searchsorted(rows, torch.arange(step, m + step, step)).tolist()
    for at, (first, last) in enumerate(zip([0, *ends], ends)):
        block = x[at * step : (at + 1) * step].to(working) @ weight.t()
        products[first:last] = block[rows[first:last] - at * step, columns[first:last]]
    return products

"""The encoder on the GPU: a product, and what the path does with its pre-activations.

`encode_path.choose_path` names the path. "bound" never writes the pre-activations (`topk`); the others start from them:
"topk" lists candidates and takes the largest (`select`), "topk_rows" and both of BatchTopK find out what rows keep and
emit that (`select`, `batchtopk`, `ranked_rows`), and rowsparse lists the elements that exceed a threshold, in slots
(`encode_rows`) or, where a CSR is wanted, without gaps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.rowsparse._triton.list_entries import Limit, list_all
from gossamer.rowsparse.dense_product import copies_pay, padded, padded_product
from gossamer.sae._triton import batchtopk, select, topk
from gossamer.sae._triton.encode_rows import encode_rows
from gossamer.sae._triton.ranked_rows import ranked_rows
from gossamer.sae.encode_path import Path, choose_path, copies_weight, named, row_stride

_Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def encode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    b_dec: Tensor | None,
    threshold: Tensor | None,
    activation: str,
    k: int,
    bandwidth: float,
    capacity: int | None,
    keep_source: bool,
    scale: Tensor | None = None,
    ste_to_input: bool = False,
) -> _Operands:
    """Operator `sae_encode` -> (values, indices, nnz, source or [0, N], l0)."""
    x = (x if b_dec is None else x - b_dec).to(weight.dtype)
    path = choose_path(activation, len(x), k, capacity, keep_source, weight)
    with named(path):
        if path == "bound":
            values, indices, nnz, l0 = topk.row_topk(x, weight, bias, scale, k)
            return values, indices, nnz, x.new_empty(0, weight.shape[1]), l0
        z, bias = _pre_activations(x, weight, bias, activation)
        more = z.shape[1] - weight.shape[1]
        if more:
            # Columns that no rule keeps: the kernels do not tell them from others.
            bias = None if bias is None else F.pad(bias, (0, more))
            # Not 0, which times -inf is NaN, the largest of all.
            scale = None if scale is None else F.pad(scale, (0, more), value=1.0)
            if threshold is not None:
                # A NaN that stands for all columns would keep these, too.
                threshold = F.pad(threshold, (0, more))
        found = activate(path, z, bias, threshold, k, bandwidth, capacity, keep_source, scale)
        values, indices, nnz, source, l0 = found
        n = weight.shape[1]
        return values, indices, nnz, source[:, :n] if keep_source else source.new_empty(0, n), l0


def _pre_activations(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor | None]:
    """(x @ weight among columns of -inf up to `row_stride`, and the bias that is still to be added)."""
    m, n = x.shape[0], weight.shape[1]
    stride = row_stride(m, n, weight, activation)
    # The product's own epilogue adds in float32 as well, and rounds once.
    added, bias = (bias, None) if bias is not None and bias.dtype is weight.dtype else (None, bias)
    if copies_weight(m, n, weight) or (stride == n == padded(n, weight) and copies_pay(x, weight)):
        z = padded_product(x if x.stride(1) == 1 else x.contiguous(), weight, added, stride)
    elif stride == n:
        z = x @ weight if added is None else torch.addmm(added, x, weight)
    else:
        # cuBLAS leaves the further columns alone.
        z = x.new_empty(m, stride)
        torch.mm(x, weight, out=z[:, :n]) if added is None else torch.addmm(added, x, weight, out=z[:, :n])
    if stride != n:
        z[:, n:] = float("-inf")
    return z, bias


def activate(
    path: Path,
    z: Tensor,
    bias: Tensor | None,
    threshold: Tensor | None,
    k: int,
    bandwidth: float,
    capacity: int | None,
    keep_source: bool,
    scale: Tensor | None,
) -> _Operands:
    """What `encode` returns, from the pre-activations z [M, N] + bias [N]. Without a capacity it is CSR, of BatchTopK's
    k * M entries or of as many as there are, with offsets in place of nnz."""
    m, n = z.shape
    if path == "topk" and z.numel():
        values, indices, nnz, l0 = select.row_topk(z, bias, k, scale)
        return values, indices, nnz, z.new_empty(0, n), l0
    l0 = (torch.zeros if bandwidth else torch.empty)(m, dtype=torch.float32, device=z.device)
    source = z if keep_source else z.new_empty(0, n)
    if path == "csr" and z.numel():
        return *list_all(z, Limit(bias, threshold, bandwidth / 2), l0), source, l0
    if path == "rows" and z.numel():
        assert capacity is not None
        return *encode_rows(z, bias, threshold, capacity, bandwidth, keep_source, l0), source, l0
    slots = (m * k,) if capacity is None else (m, capacity)
    values, indices = z.new_empty(slots), torch.empty(slots, dtype=torch.int32, device=z.device)
    is_csr = capacity is None
    counts = torch.empty(m + is_csr, dtype=torch.int64 if is_csr else torch.int32, device=z.device)
    nnz, offsets = (None, counts) if is_csr else (counts, None)
    if m == 0 or n == 0:
        return values.zero_(), indices.fill_(-1), counts.zero_(), source, l0.zero_()
    if path == "topk_rows":
        ranked_rows(z, bias, scale, select.row_kth(z, bias, k, scale), (values, indices, counts, l0), keep_source)
    else:
        out = (values, indices, nnz, l0)
        found = batchtopk.find(z, bias, k, scale, offsets)
        batchtopk.emit(z, bias, scale, found, out, keep_source, offsets)
        kept = (found.kth, found.need)
        ranked_rows(z, bias, scale, kept, out, keep_source, found.reach, found.length, offsets)
    return values, indices, counts, source, l0

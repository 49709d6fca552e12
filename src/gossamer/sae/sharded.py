"""Sparse encoding and decoding with the latents spread over the processes of a group.

Each rank holds a contiguous slice of the latents: rank 0 the first, rank 1 those after it, and so on. Slices may differ
in size. x, b_dec and the reconstruction are the same on all ranks, and each rank holds its own latents.

The gradients follow from one convention: the ranks compute one loss, the same on each of them. What is copied to all
ranks (x, b_dec) has its gradient summed over them in the backward pass; the sum of the partial reconstructions hands
its gradient, which is the same everywhere, to each rank as it is. So every rank ends with the whole gradient of x and
b_dec, once, and with that of its own slices: nothing is left to be reduced, and nothing may be averaged.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer.gemm.activations import Activation, BatchTopK, JumpReLU, Parameters, TopK, resolve
from gossamer.rowsparse import ELL, Rows
from gossamer.rowsparse.container import unchecked
from gossamer.rowsparse.formats import threshold_dtype
from gossamer.rowsparse.pack import check_container, pack_ell_operator
from gossamer.sae._torch.encode import order_keys_, pre_activations
from gossamer.sae.decode import check_rest, decode_rows
from gossamer.sae.encode import ACTIVATIONS, check_capacity, check_operands, encode_backward, run, save_operands

COMPILES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
_DIGIT = 9  # bits a round of `_kth_key` settles; 63, of a float64, is a multiple of it


def encode_sharded(
    x: Tensor,
    W_enc: Tensor,
    b_enc: Tensor | None = None,
    activation: Activation | str = "relu",
    *,
    b_dec: Tensor | None = None,
    capacity: int | None = None,
    group: Any = None,
) -> ELL:
    """`encode` with the latents spread over the ranks of a group; every rank calls it and gets its own latents.

    Args:
        x: `[..., d_in]`, the same on all ranks.
        W_enc: `[d_in, d_sae_r]`, this rank's slice. Ranks in order hold consecutive latents, not always as many.
        b_enc: `[d_sae_r]`, a slice too.
        activation: as in `encode`, with a threshold or scale of this rank's latents (a scalar threshold is the same on
            all ranks). TopK keeps the k largest of each row over all ranks, BatchTopK the k * M largest of the rows
            over all ranks; a k above the number of all latents keeps what there is. Ties go to the lowest index in the
            whole, NaN counts as largest.
        b_dec: as in `encode`, the same on all ranks.
        capacity: slots per row of this rank's latents. TopK takes none: min(k, d_sae_r) always suffice.
        group: a `torch.distributed` process group; None is all processes.

    Returns:
        `ELL` of shape `(..., d_sae_r)`, with column indices that count from the start of the slice. Gradients are as in
        `encode`, with those of x and b_dec summed over the ranks: all ranks have to call backward, on one loss.

    ReLU and JumpReLU communicate in the backward pass alone. TopK gathers k values of each row and rank, BatchTopK sums
    2, 4 or 7 histograms of 512 counts (for 16, 32 and 64 bits) and gathers a count of each row and
    rank. That is `all_gather` of bytes and `all_reduce` of int64, float32 and float64, which NCCL and gloo have; with
    NCCL the host waits for nothing.

    Raises:
        ValueError: as `encode`, a capacity for TopK, or no process group.
        TypeError: as `encode`.

    Source: Rajamanoharan et al. 2024 (JumpReLU); Gao et al. 2024 (TopK, section on sharded latents); Bussmann et al.
    2024 (BatchTopK). The selection over ranks is new.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> encode_sharded(torch.tensor([[1.0, 3.0, 2.0]]), torch.eye(3), None, gemm.TopK(2)).indices.tolist()
    [[1, 2]]
    >>> torch.distributed.destroy_process_group()
    """
    return _sharded("sae.encode_sharded", x, W_enc, b_enc, activation, b_dec, capacity, group)[0]


def encode_sharded_with_l0(
    x: Tensor,
    W_enc: Tensor,
    b_enc: Tensor | None = None,
    activation: Activation | str = "relu",
    *,
    b_dec: Tensor | None = None,
    capacity: int | None = None,
    group: Any = None,
) -> tuple[ELL, Tensor]:
    """As `encode_sharded`, with the number of values of each row that differ from 0, over all ranks.

    Args:
        x, W_enc, b_enc, activation, b_dec, capacity, group: as in `encode_sharded`.

    Returns:
        `(rows, l0)`, l0 `[...]` in float32, the same on all ranks; one more `all_reduce`, of M numbers. With a
        bandwidth it has the gradient for this rank's thresholds that it has in `encode_with_l0`.

    Raises:
        ValueError, TypeError: as `encode_sharded`.

    Source: Rajamanoharan et al. 2024, "Jumping Ahead", section 3.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> encode_sharded_with_l0(torch.tensor([[1.0, -3.0, 2.0]]), torch.eye(3))[1].tolist()
    [2.0]
    >>> torch.distributed.destroy_process_group()
    """
    rows, l0 = _sharded("sae.encode_sharded_with_l0", x, W_enc, b_enc, activation, b_dec, capacity, group)
    return rows, add_parts(l0, group)


def decode_sharded(rows: Rows, W_dec: Tensor, b_dec: Tensor | None = None, *, group: Any = None) -> Tensor:
    """`decode` with the latents spread over the ranks of a group: the sum of their products, the same on all ranks.

    Args:
        rows: a container of shape `(..., d_sae_r)`, such as `encode_sharded` returns: this rank's latents.
        W_dec: `[d_sae_r, d_in]`, this rank's slice; the dtype and device of rows.
        b_dec: `[d_in]`, the same on all ranks, added once, or None.
        group: a `torch.distributed` process group; None is all processes.

    Returns:
        `[..., d_in]` in the dtype of W_dec, after one `all_reduce` in float32 (float64 for float64). The backward pass
        communicates nothing: rows, W_dec and b_dec get their whole gradients on each rank.

    Raises:
        ValueError: shapes or devices do not fit, or no process group.
        TypeError: rows is no container, or dtypes differ or are not floating.

    Source: the package jumprelu-sae-kernels; the sum over ranks is new.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> decode_sharded(rowsparse.pack(torch.tensor([[0.0, 2.0]])), torch.eye(2), torch.ones(2)).tolist()
    [[1.0, 3.0]]
    >>> torch.distributed.destroy_process_group()
    """
    operator = "sae.decode_sharded"
    check_group(operator, group)
    check_container(operator, rows)
    checks.floating(operator, W_dec=W_dec)
    check_rest(operator, W_dec, b_dec, "auto", None, None)
    dtype = torch.get_autocast_dtype(W_dec.device.type) if autocast.enabled(W_dec.device) else W_dec.dtype
    dtype = torch.float64 if W_dec.dtype is torch.float64 else dtype
    # Rounding each part to half would add an error for each rank.
    part = decode_rows(operator, rows, W_dec, None, "auto", None, torch.promote_types(dtype, torch.float32))
    whole = add_parts(part, group)
    return (whole if b_dec is None else whole + b_dec).to(dtype)


def check_group(operator: str, group: Any) -> tuple[int, int]:
    """(rank, size) of this process in the group."""
    if torch.compiler.is_compiling() and not COMPILES:
        raise NotImplementedError(
            f"{operator}: torch.compile of what spreads over processes needs PyTorch 2.13 or newer, "
            f"got {torch.__version__}, whose gradients of it are wrong. Compile the parts around it."
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{operator}: group must be a process group, and torch.distributed is not initialised. Start with torchrun "
            "and call torch.distributed.init_process_group first; one process needs no shards."
        )
    if dist.get_rank(group) < 0:
        raise ValueError(f"{operator}: group must contain this process, of rank {dist.get_rank()} among all.")
    return dist.get_rank(group), dist.get_world_size(group)


def sum_over(tensor: Tensor, group: Any) -> Tensor:
    """The sum over ranks, anew: in float32 for narrower dtypes, which some backends do not add."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor
    wide = wide.clone(memory_format=torch.contiguous_format)
    if wide.numel():
        dist.all_reduce(wide, group=group)
    return wide.to(tensor.dtype)


def _gather(tensor: Tensor, group: Any) -> Tensor:
    """`[W, *shape]`: the tensors of all ranks, as bytes, so that the dtype is no matter."""
    out = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    if tensor.numel():
        parts = out.flatten(1).view(torch.uint8).unbind()
        dist.all_gather(list(parts), tensor.contiguous().view(-1).view(torch.uint8), group=group)
    return out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        return sum_over(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def copy_to_ranks(tensor: Tensor, group: Any) -> Tensor:
    """What is the same on all ranks and used by each for its part: the gradients of the parts are summed."""
    return _Copy.apply(tensor, group) if tensor.requires_grad else tensor


def add_parts(tensor: Tensor, group: Any) -> Tensor:
    """The sum of the ranks' parts: its gradient, the same on all ranks, is that of each part."""
    return _Sum.apply(tensor, group)


def _sharded(
    operator: str,
    x: Tensor,
    W_enc: Tensor,
    b_enc: Tensor | None,
    activation: Activation | str,
    b_dec: Tensor | None,
    capacity: int | None,
    group: Any,
) -> tuple[ELL, Tensor]:
    """(this rank's latents, its part of l0)"""
    check_group(operator, group)
    activation = resolve(operator, activation, ACTIVATIONS)
    W_enc = check_operands(operator, x, W_enc, b_enc, b_dec, activation.parameters)  # type: ignore[union-attr]
    if type(activation) is TopK and capacity is not None:
        raise ValueError(
            f"{operator}: capacity belongs to the other activations, got {capacity!r} for gemm.TopK, which has "
            "min(k, d_sae_r) slots. Leave it out."
        )
    x = copy_to_ranks(x, group)
    b_dec = None if b_dec is None else copy_to_ranks(b_dec, group)
    if isinstance(activation, TopK):
        # How many latents there are in all is for no rank to know without asking the others.
        if type(activation) is BatchTopK:
            return _batch_topk(operator, x, W_enc, b_enc, activation, b_dec, capacity, group)
        k, n = activation.k, W_enc.shape[1]
        # A rank without latents has nothing to choose from, and takes part all the same.
        own = TopK(min(k, n), activation.scale) if n else "relu"
        rows, _ = run(operator, x, W_enc, b_enc, own, b_dec, None)
        return _keep_largest(rows, k, activation.scale if n else None, group)
    if isinstance(activation, JumpReLU) and activation.threshold.dim() == 0:
        activation = replace(activation, threshold=copy_to_ranks(activation.threshold, group))
    rows, l0 = run(operator, x, W_enc, b_enc, activation, b_dec, capacity)
    return rows, l0.to(threshold_dtype(rows.dtype))


def _keep_largest(rows: ELL, k: int, scale: Tensor | None, group: Any) -> tuple[ELL, Tensor]:
    """Of each rank's largest entries of a row, those among the k largest of the row.

    Entries are in order of column, and ranks in that of their slices: position in what is gathered is global order.
    """
    slots = rows.capacity
    with torch.no_grad():
        ranked, indices, nnz, _ = rows.packed
        if scale is not None and slots:
            ranked = (ranked * scale[indices.clamp(min=0)]).to(ranked.dtype)
        held = torch.arange(slots, device=rows.device) < nnz[:, None]
        ranked = torch.nn.functional.pad(torch.where(held, ranked, 0), (0, k - slots))
        gathered = _gather(ranked, group).movedim(0, 1).flatten(1)
        order = gathered.sort(dim=1, descending=True, stable=True).indices[:, :k]
        kept = torch.zeros_like(gathered, dtype=torch.bool).scatter_(1, order, True) & (gathered != 0)
        first = dist.get_rank(group) * k
        mine = kept[:, first : first + slots]
        counts = mine.sum(1, dtype=torch.int32)
        moved = (~mine).to(torch.uint8).sort(dim=1, stable=True).indices
        filled = torch.arange(slots, device=rows.device) < counts[:, None]
        indices = torch.where(filled, indices.gather(1, moved), -1)
        l0 = counts.to(torch.promote_types(rows.dtype, torch.float32)).view(rows.shape[:-1])
    values = torch.where(filled, rows.packed.values.gather(1, moved), 0)
    return unchecked(ELL, values, indices, counts, rows.shape), l0


def _batch_topk(
    operator: str,
    x: Tensor,
    W_enc: Tensor,
    b_enc: Tensor | None,
    activation: BatchTopK,
    b_dec: Tensor | None,
    capacity: int | None,
    group: Any,
) -> tuple[ELL, Tensor]:
    n = W_enc.shape[1]
    # k may be above the number of this rank's latents.
    slots, may_overflow = check_capacity(operator, Parameters("batchtopk"), capacity, "ell", n)
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    scale = None if activation.scale is None else activation.scale.detach()
    with torch.autocast(x.device.type, enabled=False):
        found = _SelectAmongRanks.apply(flat, W_enc, b_enc, b_dec, activation.k, slots, may_overflow, scale, group)
    values, indices, nnz, source, l0 = found
    shape = (*x.shape[:-1], n)
    return unchecked(ELL, values, indices, nnz, shape, source if may_overflow else None), l0.view(x.shape[:-1])


class _SelectAmongRanks(torch.autograd.Function):
    """The operator `sae_encode` with a selection over ranks: its results and its backward."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        b_dec: Tensor | None,
        k: int,
        capacity: int,
        keep_source: bool,
        scale: Tensor | None,
        group: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        pre = pre_activations(x, weight, bias, b_dec)
        acts = torch.where(_among_largest(pre if scale is None else (pre * scale).to(pre.dtype), k, group), pre, 0)
        values, indices, nnz = pack_ell_operator(acts, capacity)
        l0 = nnz.to(torch.promote_types(acts.dtype, torch.float32))
        return values, indices, nnz, acts if keep_source else acts.new_empty(0, acts.shape[1]), l0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, b_dec, k, capacity, keep_source, scale, _ = inputs
        like = (x, weight, bias, b_dec, None, "batchtopk", k, 0.0, capacity, keep_source, scale, False)
        save_operands(ctx, like, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *encode_backward(ctx, *grads)[:4], *(None,) * 5


def _among_largest(ranked: Tensor, k: int, group: Any) -> Tensor:
    """Bool [M, n]: what is above 0 (or NaN) and among the k * M largest of all ranks, ties by row, rank and column."""
    m, total = ranked.shape[0], k * ranked.shape[0]
    keys = order_keys_(ranked.clamp(min=0))
    # What is among the largest of all is among the largest of its rank.
    largest = keys.flatten().topk(min(total, keys.numel())).values.long()
    kth = _kth_key(largest.flip(0), total, torch.iinfo(keys.dtype).bits - 1, group).clamp(min=1)
    tied = keys == kth
    mine = torch.cat([tied.sum(1), (largest > kth).sum()[None]])
    counts = _gather(mine, group)
    ties, need = counts[:, :m].t(), total - counts[:, m].sum()
    before = (ties.flatten().cumsum(0).view_as(ties) - ties)[:, dist.get_rank(group), None]
    return (keys > kth) | (tied & (tied.cumsum(1, dtype=torch.int32) <= need - before))


def _kth_key(keys: Tensor, k: int, bits: int, group: Any) -> Tensor:
    """int64 []: the k-th largest of the keys of all ranks, 0 if there are fewer; `keys` are this rank's, ascending.

    It is the largest bound that k keys reach, found digit by digit: the ranks add up how many of their keys reach each
    of the bounds that the next digit leaves.
    """
    found = keys.new_zeros(())
    digits = torch.arange(1 << _DIGIT, device=keys.device)
    for shift in range(-(-bits // _DIGIT) * _DIGIT - _DIGIT, -1, -_DIGIT):
        bounds = found + (digits << shift)
        reach = sum_over(keys.shape[0] - torch.searchsorted(keys, bounds), group)
        found = torch.where(reach >= k, bounds, found).amax()
    return found

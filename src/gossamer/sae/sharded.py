"""Sparse encoding and decoding with the latents spread over the processes of a group.

Each rank holds a contiguous slice of the latents: rank 0 the first, rank 1 those after it, and so on. Slices may differ
in size. x, b_dec and the reconstruction are the same on all ranks, and each rank holds its own latents.

The gradients follow from one convention: the ranks compute one loss, the same on each of them. A tensor that is copied
to all ranks (x, b_dec) has its gradient summed over them in the backward pass; the sum of the partial reconstructions
hands its gradient, which is the same everywhere, to each rank as it is. So every rank ends with the whole gradient of x
and b_dec, once, and with that of its own slices: nothing is left to be reduced, and nothing may be averaged.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.ops import refuse_second, returned
from gossamer.gemm.activations import Activation, BatchTopK, JumpReLU, Parameters, TopK, resolve
from gossamer.rowsparse import Rows
from gossamer.rowsparse.formats import equal_spans
from gossamer.rowsparse.pack import default_capacity, pack_operator
from gossamer.rowsparse.records import PackRows
from gossamer.rowsparse.rows import unchecked
from gossamer.sae._torch.encode import order_keys_, pre_activations
from gossamer.sae.decode import check_rest, decode_rows
from gossamer.sae.encode import ACTIVATIONS, check_capacity, check_operands, encode_backward, run
from gossamer.sae.records import SaeEncode

_DIGIT = 9  # bits a round of `_kth_key` settles; 63, of a float64, is a multiple of it


def encode_sharded(
    x: Tensor,
    W_enc: Tensor,
    b_enc: Tensor | None,
    activation: Activation | str,
    b_dec: Tensor | None,
    capacity: int | str | None,
    group: Any,
) -> Rows:
    """`sae.encode` with a group."""
    operator = "sae.encode"
    check_group(operator, group)
    activation = resolve(operator, activation, ACTIVATIONS)
    parameters: Parameters = activation.parameters  # type: ignore[union-attr]
    W_enc = check_operands(operator, x, W_enc, b_enc, b_dec, parameters)
    x = copy_to_ranks(x, group)
    b_dec = None if b_dec is None else copy_to_ranks(b_dec, group)
    if isinstance(activation, TopK):
        # How many latents there are in all no rank knows without asking the others.
        check_capacity(operator, parameters._replace(k=1), capacity, max(W_enc.shape[1], 1))
        if type(activation) is BatchTopK:
            return _batch_topk(x, W_enc, b_enc, activation, b_dec, group)
        k, n = activation.k, W_enc.shape[1]
        # A rank without latents has nothing to choose from, and takes part all the same.
        own = type(activation)(min(k, n), activation.scale) if n else "relu"
        rows = run(operator, x, W_enc, b_enc, own, b_dec, None)
        return _keep_largest(rows, min(k, n), k, activation.scale if n else None, group)
    if isinstance(activation, JumpReLU) and activation.threshold.dim() == 0:
        activation = replace(activation, threshold=copy_to_ranks(activation.threshold, group))
    return run(operator, x, W_enc, b_enc, activation, b_dec, capacity)


def decode_sharded(rows: Any, W_dec: Tensor, b_dec: Tensor | None, out_dtype: torch.dtype | None, group: Any) -> Tensor:
    """`sae.decode` with a group."""
    operator = "sae.decode"
    check_group(operator, group)
    if not isinstance(rows, Rows):
        raise TypeError(
            f"{operator}: acts must be rowsparse.Rows beside a group, got {type(rows).__name__}. "
            "Pack dense latents with rowsparse.pack first."
        )
    checks.floating(operator, W_dec=W_dec)
    check_rest(operator, W_dec, b_dec, out_dtype)
    dtype = torch.get_autocast_dtype(W_dec.device.type) if autocast.enabled(W_dec.device) else W_dec.dtype
    dtype = out_dtype or (torch.float64 if W_dec.dtype is torch.float64 else dtype)
    # Rounding each part to half would add an error for each rank.
    part = decode_rows(operator, rows, W_dec, None, torch.promote_types(dtype, torch.float32))
    whole = add_parts(part, group)
    return (whole if b_dec is None else whole + b_dec).to(dtype)


def check_group(operator: str, group: Any) -> tuple[int, int]:
    """(rank, size) of this process in the group."""
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
        return returned(sum_over(tensor, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def copy_to_ranks(tensor: Tensor, group: Any) -> Tensor:
    """A tensor that is the same on all ranks and used by each for its part: the gradients of the parts are summed."""
    return _Copy.apply(tensor, group) if tensor.requires_grad else tensor


def add_parts(tensor: Tensor, group: Any) -> Tensor:
    """The sum of the ranks' parts: its gradient, the same on all ranks, is that of each part."""
    return _Sum.apply(tensor, group)


def _keep_largest(rows: Rows, slots: int, k: int, scale: Tensor | None, group: Any) -> Rows:
    """Of each rank's largest entries of a row, in `slots` slots, those among the k largest of the row.

    Entries are in order of column, and ranks in that of their slices: position in the gathered tensor is global order.
    """
    m = rows.num_rows
    with torch.no_grad():
        values, indices = (part[: m * slots].view(m, slots) for part in rows.packed[:2])
        ranked = values.detach().abs()
        if scale is not None and slots:
            ranked = (ranked * scale[indices.clamp(min=0)]).to(ranked.dtype)
        held = torch.arange(slots, device=rows.device) < rows.counts[:, None]
        ranked = torch.nn.functional.pad(torch.where(held, ranked, 0), (0, k - slots))
        gathered = _gather(ranked, group).movedim(0, 1).flatten(1)
        order = gathered.sort(dim=1, descending=True, stable=True).indices[:, :k]
        kept = torch.zeros_like(gathered, dtype=torch.bool).scatter_(1, order, True) & (gathered != 0)
        first = dist.get_rank(group) * k
        mine = kept[:, first : first + slots]
        counts = mine.sum(1)
        moved = (~mine).to(torch.uint8).sort(dim=1, stable=True).indices
        filled = torch.arange(slots, device=rows.device) < counts[:, None]
        indices = torch.where(filled, indices.gather(1, moved), -1)
        l0 = counts.to(torch.promote_types(rows.dtype, torch.float32))
    values = torch.where(filled, rows.packed.values[: m * slots].view(m, slots).gather(1, moved), 0)
    return unchecked(values.flatten(), indices.flatten(), equal_spans(counts, slots), rows.shape, None, l0)


def _batch_topk(
    x: Tensor, W_enc: Tensor, b_enc: Tensor | None, activation: BatchTopK, b_dec: Tensor | None, group: Any
) -> Rows:
    n = W_enc.shape[1]
    # k may be above the number of this rank's latents.
    slots = default_capacity(n)
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    scale = None if activation.scale is None else activation.scale.detach()
    with torch.autocast(x.device.type, enabled=False):
        found = _SelectAmongRanks.apply(flat, W_enc, b_enc, b_dec, activation.k, slots, scale, group)
    values, indices, spans, source, l0 = found
    return unchecked(values, indices, spans, (*x.shape[:-1], n), source if slots < n else None, l0)


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
        scale: Tensor | None,
        group: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        pre = pre_activations(x, weight, bias, b_dec)
        acts = torch.where(_among_largest(pre if scale is None else (pre * scale).to(pre.dtype), k, group), pre, 0)
        values, indices, spans = pack_operator(PackRows(acts, capacity))
        l0 = spans[1].to(torch.promote_types(acts.dtype, torch.float32))
        return values, indices, spans, acts if capacity < acts.shape[1] else acts.new_empty(0, acts.shape[1]), l0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, b_dec, ctx.k, *_ = inputs
        ctx.mark_non_differentiable(*output[1:3])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, b_dec, *output[:4])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_second("sae.encode")
        x, weight, bias, b_dec, *kept = ctx.saved_tensors
        call = SaeEncode(x, weight, bias, b_dec, None, "batchtopk", ctx.k, 0.0, None, None, False)
        needs: Any = SaeEncode._make((*ctx.needs_input_grad[:4], *(False,) * 7))
        found = encode_backward(call, kept, grads, needs)
        return *map(found.get, SaeEncode._fields[:4]), *(None,) * 4


def _among_largest(ranked: Tensor, k: int, group: Any) -> Tensor:
    """Bool [M, n]: whether an element is above 0 (or NaN) and among the k * M largest of all ranks, ties by row, rank
    and column."""
    m, total = ranked.shape[0], k * ranked.shape[0]
    keys = order_keys_(ranked.clamp(min=0))
    # The largest of all are among the largest of their rank.
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

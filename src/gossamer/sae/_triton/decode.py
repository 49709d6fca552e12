"""Dense activations times decoder, reading only the decoder rows that fire.

With few rows of activations the time goes into launches, so everything happens in one: the first M * chunks programs
each scan one chunk of a row into the row's list (`pack.scan_chunk`), and the programs after them each gather one slice
of the output from a finished list (`matmul.gather_rows`). A gathering program waits for its row's scanning programs,
which started before it and wait for nobody behind them. Rows with more than `capacity` entries are left to the dense
tiles of `overflow`. With many rows scan and gather are launches of their own, because each of them fills the GPU.
"""

import threading

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton import overflow, pack
from gossamer.rowsparse._triton.matmul import gather_rows, matmul
from gossamer.rowsparse._triton.pack import scan_chunk, wait_and_sum


@triton.jit(do_not_specialize=["epoch"])
def _decode_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, values_ptr, indices_ptr, nnz_ptr, arrived_ptr, flags_ptr, epoch,
    stride_xm, stride_wn, M, N, D, capacity, chunks, slices, tiles,
    BLOCK: tl.constexpr, VEC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, FLAGS: tl.constexpr,
    RUN: tl.constexpr, LEADS: tl.constexpr, TRUNCATE: tl.constexpr,
):  # fmt: skip
    """Programs (row, chunk) that scan, then programs (row, slice) that gather."""
    if LEADS:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    if arrived_ptr is not None:
        if pid == 0:
            overflow.clear_arrived(arrived_ptr, tiles)
    scanning = M * chunks
    if pid < scanning:
        row = (pid // chunks).to(tl.int64)
        scan_chunk(
            x_ptr + row * stride_xm, values_ptr + row * capacity, indices_ptr + row * capacity, nnz_ptr + row,
            flags_ptr + row * chunks, epoch, pid % chunks, chunks, N, capacity, BLOCK, VEC, FLAGS,
        )  # fmt: skip
    else:
        row = ((pid - scanning) // slices).to(tl.int64)
        columns = ((pid - scanning) % slices) * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = columns < D
        flags_ptr += row * chunks
        done = (epoch.to(tl.int64) << 1) + 1
        # The last chunk is done about last: to watch its word alone keeps the waiting out of the scan's way.
        word = tl.load(flags_ptr + chunks - 1, volatile=True)
        while (word >> 31) != done:
            word = tl.load(flags_ptr + chunks - 1, volatile=True)
        count = wait_and_sum(flags_ptr, chunks, done, FLAGS)
        # The list was released before its flags. It is read past the L1, where the reads of a neighbouring row may have
        # left an older copy of a sector that both share.
        tl.debug_barrier()
        if TRUNCATE:
            count = tl.minimum(count, capacity)
        if count <= capacity:
            out = gather_rows(
                values_ptr + row * capacity, indices_ptr + row * capacity, count,
                w_ptr, stride_wn, columns, inside, N, BLOCK_E, BLOCK_D, RUN, ".cg",
            )  # fmt: skip
            if bias_ptr is not None:
                out += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_ptr + row * D + columns, out, mask=inside)


_decode_fwd = launch.Kernel(_decode_fwd_kernel)


class _Space:
    """What one stream's decodes of one shape share: lists, flags, partial sums. None of it leaves the launch."""

    def __init__(self, acts: Tensor, weight: Tensor, capacity: int, chunks: int, overflows: bool) -> None:
        m, n = acts.shape
        self.values = acts.new_empty(m, capacity)
        self.indices = torch.empty(m, capacity, dtype=torch.int32, device=acts.device)
        self.nnz = torch.empty(m, dtype=torch.int32, device=acts.device)
        self.flags, self.epoch = launch.flags.get(m * chunks, acts.device)
        self.overflows = overflows
        self.partial, self.arrived = overflow.workspace(m, n, weight) if overflows else (None, None)


class _Plan:
    """The launches of one shape, bound to all but their pointers, and the space they need on one stream."""

    __slots__ = ("epochs", "lists", "lock", "overflow", "pointers", "scan", "space")

    def __init__(self, space: _Space, scan: launch.Bound, over: launch.Bound | None) -> None:
        # Flags of its own, so that another operator's epochs cannot meet its words.
        space.flags = torch.zeros_like(space.flags)
        self.epochs = launch.Epochs()
        self.lock = threading.Lock()
        self.space, self.scan, self.overflow = space, scan, over
        addresses = [
            None if t is None else t.data_ptr()
            for t in (space.values, space.indices, space.nnz, space.arrived, space.flags, space.partial)
        ]
        self.lists = addresses[:5]
        self.pointers = (addresses[5], addresses[3], addresses[2])


_plans: dict[tuple[object, ...], _Plan] = {}


def _one_launch(
    acts: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, capacity: int, truncate: bool, clear: bool = False
) -> tuple[_Space, launch.Bound | None, launch.Bound | None]:
    (m, n), d = acts.shape, weight.shape[1]
    tile, warps = tuning.decode_tile(m, n, d, weight.element_size())
    chunks, meta = pack.split(tile, n)
    meta["RUN"] = 64 * meta["BLOCK_E"] if out.dtype is torch.float32 and capacity > 256 * meta["BLOCK_E"] else 0
    overflows = capacity < n and not truncate
    meta |= {"LEADS": overflows and tuning.dependent_launch(weight.device), "TRUNCATE": truncate}
    slices = launch.cdiv(d, meta["BLOCK_D"])
    space = _Space(acts, weight, capacity, chunks, overflows)
    if clear:
        space.values.zero_()
        space.indices.fill_(-1)
    key = (m, n, d, capacity, acts.dtype, weight.dtype, acts.stride(0), weight.stride(0), out.dtype)
    key += (bias is None or bias.dtype, truncate)
    args = (acts, weight, bias, out, space.values, space.indices, space.nnz, space.arrived, space.flags, space.epoch)
    args += (acts.stride(0), weight.stride(0), m, n, d, capacity, chunks, slices)
    args += (0 if space.arrived is None else space.arrived.shape[0],)
    scan = _decode_fwd(key, (m * (chunks + slices), 1, 1), args, meta, num_warps=warps, head=10)
    over = None
    if overflows:
        over = overflow.forward(acts, weight, bias, out, space.nnz, capacity, (space.partial, space.arrived))
    return space, scan, over


def decode_lists(
    acts: Tensor, weight: Tensor, bias: Tensor | None, capacity: int, truncate: bool, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operator `sae_decode_lists` -> (out [M, D], values, indices, nnz), the lists as `pack_ell` gives them."""
    m, n = acts.shape
    d = weight.shape[1]
    bias = None if bias is None else bias.contiguous()
    if not tuning.one_launch_decode(m, n) or m == 0 or n == 0 or d == 0:
        values, indices, nnz = pack.pack_ell(acts, capacity)
        return _from_lists(values, indices, nnz, acts, weight, bias, truncate, out_dtype), values, indices, nnz
    acts, weight = pack.rows_contiguous(acts), pack.rows_contiguous(weight)
    out = torch.empty(m, d, dtype=out_dtype or weight.dtype, device=weight.device)
    space, _, _ = _one_launch(acts, weight, bias, out, capacity, truncate, clear=True)
    return out, space.values, space.indices, space.nnz


def _from_lists(
    values: Tensor,
    indices: Tensor,
    nnz: Tensor,
    acts: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    truncate: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    if truncate:
        return matmul(values, indices, nnz.clamp(max=values.shape[1]), None, weight, bias, out_dtype)
    return matmul(values, indices, nnz, acts, weight, bias, out_dtype)


def decode(
    acts: Tensor, weight: Tensor, bias: Tensor | None, capacity: int, truncate: bool, out_dtype: torch.dtype | None
) -> Tensor:
    """Operator `sae_decode`: the output alone. With `truncate` a row's entries past `capacity` are left out.

    Host time is most of a small decode, so everything that follows from shapes is done once and kept as a plan.
    """
    m, n = acts.shape
    if not tuning.one_launch_decode(m, n):
        lists = pack.pack_ell(acts, capacity, clear=False)
        return _from_lists(*lists, acts, weight, bias, truncate, out_dtype)
    if launch.INTERPRET:
        return _decode_and_plan(None, acts, weight, bias, capacity, truncate, out_dtype)
    index = acts.get_device()
    stream = torch._C._cuda_getCurrentRawStream(index)
    key = (m, n, weight.shape, acts.stride(), weight.stride(), acts.dtype, weight.dtype, out_dtype, capacity, truncate)
    key += (index, stream, None if bias is None else (bias.dtype, bias.stride()), tuning.tf32())
    plan = _plans.get(key)
    pointers = (acts.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr())
    if plan is None or not launch.ready(index, pointers[0] | pointers[1] | (pointers[2] or 0)):
        return _decode_and_plan(key, acts, weight, bias, capacity, truncate, out_dtype)
    out = weight.new_empty((m, weight.shape[1]), dtype=out_dtype)
    target = out.data_ptr()
    # The two launches share the counts: another thread's pair on this stream must not come between them.
    with plan.lock:
        plan.scan(stream, *pointers, target, *plan.lists, plan.epochs.next())
        if plan.overflow is not None:
            plan.overflow(stream, *pointers, target, *plan.pointers)
    return out


def _decode_and_plan(
    key: tuple[object, ...] | None,
    acts: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    capacity: int,
    truncate: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Launches, and keeps what repeats it under `key`, unless a copy was needed or a graph records it."""
    (m, n), d = acts.shape, weight.shape[1]
    if m * n * d == 0:
        return decode_lists(acts, weight, bias, capacity, truncate, out_dtype)[0]
    x, w = pack.rows_contiguous(acts), pack.rows_contiguous(weight)
    added = None if bias is None else bias.contiguous()
    out = torch.empty(m, d, dtype=out_dtype or weight.dtype, device=weight.device)
    space, scan, over = _one_launch(x, w, added, out, capacity, truncate)
    if scan is None or (over is None and space.overflows):
        return out
    if x is acts and w is weight and added is bias and launch.may_keep(acts.device):
        launch.keep(_plans, key, _Plan(space, scan, over))
    return out


EXAMPLES = {
    _decode_fwd_kernel: {
        "signature": {
            "x_ptr": "*fp32", "w_ptr": "*fp32", "bias_ptr": None, "out_ptr": "*fp32", "values_ptr": "*fp32",
            "indices_ptr": "*i32", "nnz_ptr": "*i32", "arrived_ptr": "*i32", "flags_ptr": "*i64", "epoch": "i32",
            "stride_xm": "i32", "stride_wn": "i32", "M": "i32", "N": "i32", "D": "i32", "capacity": "i32",
            "chunks": "i32", "slices": "i32", "tiles": "i32",
        },
        "constexprs": {
            "BLOCK": 1024, "VEC": 4, "FLAGS": 64, "BLOCK_E": 32, "BLOCK_D": 32, "RUN": 0, "LEADS": False,
            "TRUNCATE": False,
        },
        "num_warps": 1,
    },
}  # fmt: skip
"""Example signatures for the ahead-of-time compile test."""

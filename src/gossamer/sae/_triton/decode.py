"""Dense activations times decoder, reading only the decoder rows that fire.

With few rows of activations the time goes into launches, so everything happens in one: the first M * chunks programs
each scan one chunk of a row into the row's list (`pack.scan_chunk`), and the programs after them each gather one slice
of the output from a finished list (`matmul.gather_rows`). A gathering program waits for its row's scanning programs,
which started before it and wait for nobody behind them. Rows with more than `capacity` entries are left to the dense
tiles of `overflow`. With many rows scan and gather are launches of their own, because each of them fills the GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.rowsparse._triton import overflow, pack
from gossamer.rowsparse._triton.matmul import gather_rows, matmul
from gossamer.rowsparse._triton.pack import scan_chunk, wait_and_sum


@triton.jit(do_not_specialize=["epoch"])
def _decode_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, values_ptr, indices_ptr, nnz_ptr, flags_ptr, epoch,
    stride_xm, stride_wn, M, N, D, capacity, chunks, slices,
    BLOCK: tl.constexpr, VEC: tl.constexpr, FLAGS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Programs (row, chunk) that scan, then programs (row, slice) that gather."""
    pid = tl.program_id(0)
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
        count = wait_and_sum(flags_ptr, chunks, (epoch.to(tl.int64) << 1) + 1, FLAGS)
        # The volatile reads above saw the flags; this acquire orders the reads of the list behind them.
        tl.atomic_add(flags_ptr, 0, sem="acquire")
        tl.debug_barrier()
        if count <= capacity:
            out = gather_rows(
                values_ptr + row * capacity, indices_ptr + row * capacity, count,
                w_ptr, stride_wn, columns, inside, N, BLOCK_E, BLOCK_D,
            )  # fmt: skip
            if bias_ptr is not None:
                out += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_ptr + row * D + columns, out, mask=inside)


_decode_fwd = launch.Kernel(_decode_fwd_kernel)


def decode_lists(
    acts: Tensor, weight: Tensor, bias: Tensor | None, capacity: int, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operator `sae_decode_lists` -> (out [M, D], values, indices, nnz); slots past a row's count are not written."""
    m, n = acts.shape
    d = weight.shape[1]
    if not tuning.one_launch_decode(m, n) or m == 0 or n == 0 or d == 0:
        values, indices, nnz = pack.pack_ell(acts, capacity, clear=False)
        return matmul(values, indices, nnz, acts, weight, bias, out_dtype), values, indices, nnz
    acts = pack.rows_contiguous(acts)
    weight = pack.rows_contiguous(weight)
    out = torch.empty(m, d, dtype=out_dtype or weight.dtype, device=weight.device)
    values = acts.new_empty(m, capacity)
    indices = torch.empty(m, capacity, dtype=torch.int32, device=acts.device)
    nnz = torch.empty(m, dtype=torch.int32, device=acts.device)
    chunks, meta = pack.split_block(acts)
    meta = {**meta, **tuning.gather_tile(m, d, weight.element_size())}
    slices = launch.cdiv(d, meta["BLOCK_D"])
    flags, epoch = launch.flags.get(m * chunks, acts.device)
    key = (m, n, d, capacity, acts.dtype, weight.dtype, acts.stride(0), weight.stride(0), out.dtype)
    key += (bias is None or bias.dtype,)
    args = (acts, weight, bias, out, values, indices, nnz, flags, epoch)
    args += (acts.stride(0), weight.stride(0), m, n, d, capacity, chunks, slices)
    _decode_fwd(key, (m * (chunks + slices), 1, 1), args, meta, num_warps=tuning.GATHER_WARPS)
    if capacity < n:
        overflow.forward(acts, weight, bias, out, nnz, capacity)
    return out, values, indices, nnz


def decode(acts: Tensor, weight: Tensor, bias: Tensor | None, capacity: int, out_dtype: torch.dtype | None) -> Tensor:
    """Operator `sae_decode`: the output alone."""
    return decode_lists(acts, weight, bias, capacity, out_dtype)[0]


EXAMPLES = {
    _decode_fwd_kernel: {
        "signature": {
            "x_ptr": "*fp32", "w_ptr": "*fp32", "bias_ptr": None, "out_ptr": "*fp32", "values_ptr": "*fp32",
            "indices_ptr": "*i32", "nnz_ptr": "*i32", "flags_ptr": "*i64", "epoch": "i32", "stride_xm": "i32",
            "stride_wn": "i32", "M": "i32", "N": "i32", "D": "i32", "capacity": "i32", "chunks": "i32", "slices": "i32",
        },
        "constexprs": {"BLOCK": 4096, "VEC": 4, "FLAGS": 16, "BLOCK_E": 16, "BLOCK_D": 128},
        "num_warps": 4,
    },
}  # fmt: skip
"""Example signatures for the ahead-of-time compile test."""

"""Dense transposition at the speed of memory, where PyTorch's copy goes element by element."""

import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gossamer._core import launch, tuning
from gossamer.rowsparse.records import DenseTranspose


@launch.kernel(specialize=("M",))
def _dense_transpose_kernel(x_ptr, out_ptr, M, N, stride_m, BLOCK: tl.constexpr, BESIDE: tl.constexpr):
    """Program (tile), along the rows first: a tile in, its transpose out, both in lines of BLOCK elements. With BESIDE
    the kernel before it may still run; this kernel ends after that one, so that a launch that waits for this kernel
    waits for both."""
    if BESIDE:
        gdc_launch_dependents()
    across = tl.cdiv(N, BLOCK)
    rows = (tl.program_id(0) // across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = (tl.program_id(0) % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(
        x_ptr + rows[:, None] * stride_m + columns[None, :],
        mask=(rows[:, None] < M) & (columns[None, :] < N),
        other=0.0,
    )
    mask = (columns[:, None] < N) & (rows[None, :] < M)
    tl.store(out_ptr + columns[:, None] * M + rows[None, :], tl.trans(tile), mask=mask)
    if BESIDE:
        gdc_wait()


def dense_transpose(call: DenseTranspose) -> Tensor:
    """[N, M], contiguous."""
    return turned(call.x)


def turned(x: Tensor) -> Tensor:
    """x.t(), contiguous."""
    m, n = x.shape
    out = x.new_empty(n, m)
    if x.stride(1) != 1:
        return out.copy_(x.t())
    if m and n:
        launch_dense_transpose(x, out, False)
    return out


def launch_dense_transpose(x: Tensor, out: Tensor, beside: bool) -> None:
    """Fills out, [N, M], with x.t(), x with contiguous rows. With `beside`, the copy runs while the kernel launched
    last runs: that kernel must let others begin, be launched after the end of all before it, and write neither x nor
    out, nor read out."""
    m, n = x.shape
    tiles = launch.cdiv(m, 64) * launch.cdiv(n, 64)
    beside = beside and tuning.dependent_launch(x.device)
    meta = {"BLOCK": 64, "BESIDE": beside}
    args = (x, out, m, n, x.stride(0))
    _dense_transpose_kernel((tiles, 1, 1), args, meta, num_warps=4, launch_pdl=beside)


def rows_contiguous(x: Tensor) -> Tensor:
    """x with neighbouring columns side by side in memory; rows may be any distance apart."""
    if x.stride(1) == 1 or x.shape[1] <= 1:
        return x
    return turned(x.t()) if x.stride(0) == 1 else x.contiguous()


EXAMPLES = {_dense_transpose_kernel: {"BLOCK": 64, "BESIDE": False}}

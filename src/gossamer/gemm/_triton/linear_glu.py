"""act(x @ gate_weight.T + gate_bias) * (x @ up_weight.T + up_bias), and what its backward pass needs.

Hopper has one kernel for both products, in `_gluon`. Elsewhere, in float32, and where that kernel cannot read the
operands, gate and up are products of the library, in blocks of rows that bound what is in memory at one time, and a
kernel gates them. A single row is not worth a product: there a program a column reads the weights, as many as there
are, and so as fast as memory gives them, in any dtype. Few rows wait for the weights as well: there a program computes
a tile of the gate and the same tile of up, in two accumulators that meet in registers.

A backward pass that kept nothing computes gate and up again; one that kept the two reads them (`_glu_bwd_kernel`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer._core import launch, tuning
from gossamer.gemm.linear_glu_path import choose_path
from gossamer.gemm.records import GatedMlpBwd, GluBwd, LinearGlu, LinearGluBwd, LinearGluOut
from gossamer.rowsparse.dense_product import multiply_into

BYTES = 1 << 28
"""Of gate and up at one time, where the library multiplies."""
FLAT = 1024
"""Numbers of gate and of up that a program gates. Rows may be shorter than it is worth a program."""


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    """(activation, its slope) at float32 z."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(z)
        return z * s, s * (1 + z * (1 - s))
    elif ACTIVATION == "gelu":
        below = 0.5 * (1 + tl.erf(z * 0.7071067811865476))
        return z * below, below + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(y)) / 2 is sigmoid(2 y).
        s = tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        return z * s, s * (1 + z * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * z * z))
    elif ACTIVATION == "relu":
        return tl.where(z <= 0, 0.0, z), tl.where(z <= 0, 0.0, 1.0)
    elif ACTIVATION == "relu2":
        z = tl.where(z <= 0, 0.0, z)
        return z * z, 2 * z
    elif ACTIVATION == "sigmoid":
        s = tl.sigmoid(z)
        return s, s * (1 - s)
    else:
        return z, tl.full(z.shape, 1.0, tl.float32)


@launch.kernel
def _linear_glu_few_kernel(
    x_ptr, gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, out_ptr, stride_xm, stride_gn, stride_un, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_N columns) of all rows of out, at most BLOCK_M. Rows of x and of the weights are contiguous."""
    m = tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * stride_xm + k[None, :]
    gate_ptrs = gate_ptr + n[None, :] * stride_gn + k[:, None]
    up_ptrs = up_ptr + n[None, :] * stride_un + k[:, None]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = k < K - start
        x = tl.load(x_ptrs + start, mask=(m < M)[:, None] & inside[None, :], other=0.0)
        w_gate = tl.load(gate_ptrs + start, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        w_up = tl.load(up_ptrs + start, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        if UPCAST:
            x, w_gate, w_up = x.to(tl.float32), w_gate.to(tl.float32), w_up.to(tl.float32)
        gate = tl.dot(x, w_gate, gate, input_precision="ieee")
        up = tl.dot(x, w_up, up, input_precision="ieee")
    if gate_bias_ptr is not None:
        gate += tl.load(gate_bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if up_bias_ptr is not None:
        up += tl.load(up_bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    active, _ = activated(gate, ACTIVATION)
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m.to(tl.int64)[:, None] * N + n[None, :], active * up, mask=mask)


@launch.kernel
def _linear_glu_row_kernel(
    x_ptr, gate_ptr, up_ptr, gate_bias_ptr, up_bias_ptr, out_ptr, stride_xk, stride_gn, stride_un, K,
    BLOCK_K: tl.constexpr, VEC: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Program (column) of the only row of out: a lane sums VEC numbers, 16 bytes, of a row of either weight at a
    time."""
    n = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    gate = tl.zeros([BLOCK_K // VEC], tl.float32)
    up = tl.zeros([BLOCK_K // VEC], tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = k < K - start
        x = tl.load(x_ptr + (start + k).to(tl.int64) * stride_xk, mask=inside, other=0.0).to(tl.float32)
        w_gate = tl.load(gate_ptr + n * stride_gn + start + k, mask=inside, other=0.0).to(tl.float32)
        w_up = tl.load(up_ptr + n * stride_un + start + k, mask=inside, other=0.0).to(tl.float32)
        gate += tl.sum(tl.reshape(w_gate * x, [BLOCK_K // VEC, VEC]), 1)
        up += tl.sum(tl.reshape(w_up * x, [BLOCK_K // VEC, VEC]), 1)
    gate, up = tl.sum(gate, 0), tl.sum(up, 0)
    if gate_bias_ptr is not None:
        gate += tl.load(gate_bias_ptr + n).to(tl.float32)
    if up_bias_ptr is not None:
        up += tl.load(up_bias_ptr + n).to(tl.float32)
    active, _ = activated(gate, ACTIVATION)
    tl.store(out_ptr + n, active * up)


@launch.kernel
def _glu_fwd_kernel(gate_ptr, up_ptr, out_ptr, total, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """Program (block of all `total` numbers): the gated product of gate and up, [M, N]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < total
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    active, _ = activated(gate, ACTIVATION)
    tl.store(out_ptr + at, active * up, mask=mask)


@launch.kernel
def _glu_bwd_kernel(
    grad_ptr, gate_ptr, up_ptr, first_ptr, second_ptr, hidden_ptr, stride_dm, stride_dn, N,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Program (row, block of columns): the gradients of gate and up, and where there is a `hidden_ptr` what they gated,
    [M, N]. Each may take the place of what is read, element by element."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    at = row * N + columns
    grad = tl.load(grad_ptr + row * stride_dm + columns * stride_dn, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    active, slope = activated(gate, ACTIVATION)
    tl.store(first_ptr + at, grad * up * slope, mask=mask)
    tl.store(second_ptr + at, grad * active, mask=mask)
    if hidden_ptr is not None:
        tl.store(hidden_ptr + at, active * up, mask=mask)


def row_tile(k: int, element_size: int) -> launch.Tile:
    """Tile of the product of a single row, which takes as long as reading the weights: a program a column, of one warp
    where rows of weights are not cut evenly by more."""
    vector = 16 // element_size
    warps = 4 if k * element_size % 8192 == 0 else 1
    return launch.Tile({"BLOCK_K": (128 * warps if warps > 1 else 64) * vector, "VEC": vector}, warps)


def linear_glu(call: LinearGlu) -> tuple[Tensor, Tensor, Tensor]:
    """(out, gate, up), [M, N] or, without `keep`, the latter two [0, N]."""
    x, gate_weight, up_weight, *_, keep = call
    m, n = x.shape[0], gate_weight.shape[0] // (2 if up_weight is None else 1)
    out = x.new_empty(m, n)
    kept = (torch.empty_like(out), torch.empty_like(out)) if keep else (x.new_empty(0, n), x.new_empty(0, n))
    if m and n:
        _launch_linear_glu(_split(call), None, out, kept if keep else None)
    return out, *kept


def linear_glu_out(call: LinearGluOut) -> None:
    """Fills out."""
    if call.out.numel():
        _launch_linear_glu(_split(LinearGlu(*call[:6], False)), None, call.out, None)


def linear_glu_bwd(call: LinearGluBwd) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, [M, N]; both are computed again."""
    out = call.x.new_empty(call.grad.shape), call.x.new_empty(call.grad.shape)
    if call.grad.numel():
        _launch_linear_glu(_split(LinearGlu(*call[1:], True)), call.grad, None, out)
    return out


def glu_bwd(call: GluBwd) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, [M, N]."""
    grad, gate, up, activation = call
    out = gate.new_empty(gate.shape), up.new_empty(up.shape)
    launch_glu_bwd(grad, gate, up, out, None, activation)
    return out


def gated_mlp_bwd(call: GatedMlpBwd) -> Tensor:
    """The product of activated gate and up, [M, N]."""
    hidden = torch.empty_like(call.gate)
    multiply_into(hidden, call.grad, call.down_weight, None)
    launch_glu_bwd(hidden, call.gate, call.up, (call.gate, call.up), hidden, call.activation)
    return hidden


def _split(call: LinearGlu) -> LinearGlu:
    """The call with two weights."""
    if call.up_weight is not None:
        return call
    gate_weight, up_weight = call.gate_weight.chunk(2, 0)
    return call._replace(gate_weight=gate_weight, up_weight=up_weight)


def _launch_linear_glu(
    call: LinearGlu, grad: Tensor | None, out: Tensor | None, gates: tuple[Tensor, Tensor] | None
) -> None:
    """Fills out and gates, which are gate and up, or with grad their gradients."""
    path = choose_path(call)
    if path in ("row", "tiles"):
        assert out is not None
        (_launch_row if path == "row" else _launch_tiles)(call, out)
    elif path == "hopper":
        from gossamer.gemm._gluon.linear_glu import launch_linear_glu

        launch_linear_glu(call, grad, out, gates)
    else:
        _launch_separate(call, grad, out, gates)


def _launch_row(call: LinearGlu, out: Tensor) -> None:
    x, gate_weight, up_weight, *_, activation, _ = call
    assert up_weight is not None
    k, n = x.shape[1], gate_weight.shape[0]
    tile = row_tile(k, x.element_size())
    strides = (x.stride(1), gate_weight.stride(0), up_weight.stride(0))
    args = (*call[:5], out, *strides, k)
    _linear_glu_row_kernel((n, 1, 1), args, {**tile.sizes, "ACTIVATION": activation}, **tile.options)


def tile_of(m: int, device: torch.device) -> launch.Tile:
    """Tile of up to 128 rows; two accumulators of BLOCK_M x BLOCK_N."""
    hopper = tuning.hopper(device)
    if m <= 16:
        return launch.Tile({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 256 if hopper else 128}, 4, 3)
    rows = 32 if m <= 32 else 64 if m <= 64 else 128
    return launch.Tile({"BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": 64}, 8 if rows == 128 else 4, 4 if hopper else 3)


def _launch_tiles(call: LinearGlu, out: Tensor) -> None:
    x, gate_weight, up_weight, *_, activation, _ = call
    assert up_weight is not None
    (m, k), n, tile = x.shape, gate_weight.shape[0], tile_of(x.shape[0], x.device)
    strides = (x.stride(0), gate_weight.stride(0), up_weight.stride(0))
    meta = {**tile.sizes, "UPCAST": launch.INTERPRET, "ACTIVATION": activation}
    grid = (launch.cdiv(n, tile.sizes["BLOCK_N"]), 1, 1)
    _linear_glu_few_kernel(grid, (*call[:5], out, *strides, m, n, k), meta, **tile.options)


def _launch_separate(
    call: LinearGlu, grad: Tensor | None, out: Tensor | None, gates: tuple[Tensor, Tensor] | None
) -> None:
    """Gate and up by cuBLAS, which writes them where it is told (a launcher is repeated only so), and then gated."""
    x, gate_weight, up_weight, gate_bias, up_bias, activation, _ = call
    assert up_weight is not None
    m, n = x.shape[0], gate_weight.shape[0]
    # Rows that still fill the GPU, and whose gate and up are small, or small beside the result.
    most = m if gates else min(m, max(1024, BYTES // (2 * n * x.element_size()), launch.cdiv(m, 16)))
    gate, up = gates or (x.new_empty(most, n), x.new_empty(most, n))
    for first in range(0, m, most):
        given, result = x, out
        if most < m:
            assert out is not None
            given, result = x[first : first + most], out[first : first + most]
            gate, up = gate[: given.shape[0]], up[: given.shape[0]]
        multiply_into(gate, given, gate_weight.t(), gate_bias)
        multiply_into(up, given, up_weight.t(), up_bias)
        if grad is not None:
            launch_glu_bwd(grad, gate, up, (gate, up), None, activation)
        elif result is not None:
            _launch_glu(gate, up, result, activation)


def _launch_glu(gate: Tensor, up: Tensor, out: Tensor, activation: str) -> None:
    meta = {"BLOCK": FLAT, "ACTIVATION": activation}
    _glu_fwd_kernel((launch.cdiv(gate.numel(), FLAT), 1, 1), (gate, up, out, gate.numel()), meta)


def launch_glu_bwd(
    grad: Tensor, gate: Tensor, up: Tensor, out: tuple[Tensor, Tensor], hidden: Tensor | None, activation: str
) -> None:
    """Fills out with the gradients of gate and up, and hidden with what they gated; any may be what is read."""
    m, n = grad.shape
    if m == 0 or n == 0:
        return
    meta = {"BLOCK": 2048, "ACTIVATION": activation}
    args = (grad, gate, up, *out, hidden, *grad.stride(), n)
    _glu_bwd_kernel((m, launch.cdiv(n, 2048), 1), args, meta)


EXAMPLES = {
    _linear_glu_few_kernel: {
        "up_bias_ptr": None, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128, "UPCAST": False, "ACTIVATION": "silu",
        "num_stages": 3,
    },
    _linear_glu_row_kernel: {"up_bias_ptr": None, "stride_xk": 1, "BLOCK_K": 4096, "VEC": 8, "ACTIVATION": "silu"},
    _glu_fwd_kernel: {"gate_ptr": "*fp32", "up_ptr": "*fp32", "out_ptr": "*fp32", "BLOCK": FLAT, "ACTIVATION": "gelu"},
    _glu_bwd_kernel: {"BLOCK": 2048, "ACTIVATION": "gelu_tanh"},
}  # fmt: skip

"""Encoding to dense latents, for layers whose rows are too full for sparse products to pay."""

import math
from typing import Any

import torch
from torch import Tensor

from gossamer._core.operator import register
from gossamer.gemm.activations import Activation, BatchTopK, JumpReLU, ReLU, TopK, resolve
from gossamer.rowsparse import Density
from gossamer.rowsparse.dense_product import dense_product
from gossamer.rowsparse.formats import threshold_dtype
from gossamer.rowsparse.matmul_path import break_even
from gossamer.rowsparse.pack import default_capacity
from gossamer.sae._torch import encode_dense as _cpu
from gossamer.sae.encode import check_capacity, check_operands, has_window
from gossamer.sae.records import SaeEncodeDense, SaeEncodeDenseBwd


def encode_dense(
    x: Tensor,
    W_enc: Tensor,
    b_enc: Tensor | None = None,
    activation: Activation | str = "relu",
    *,
    b_dec: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The latents of `encode` as a dense tensor: plain products, and one pass over the latents each way.

    Args:
        x, W_enc, b_enc, activation, b_dec: as in `encode`, AbsTopK and GroupMax left out.

    Returns:
        `(acts, l0, fired, nnz)`: acts `[..., d_sae]` in the dtype of W_enc; l0 `[...]` and its gradient as those of
        `encode(...).l0`; fired int64 `[d_sae]`, how many rows each latent fires in; nnz int32 `[...]`, the entries
        that `encode` would store. Differentiable as `encode` is: the gradient of acts counts where a latent fired.
        With a bandwidth -0.0 marks an element in the window below its threshold. The backward pass computes in the
        tensor in which the gradient of acts arrives: that of a product is nobody else's.

    Raises:
        ValueError, TypeError: as `encode`.

    Source: as `encode`.

    >>> encode_dense(torch.tensor([[1.0, -3.0, 2.0]]), torch.eye(3))[0].tolist()
    [[1.0, 0.0, 2.0]]
    """
    operator = "sae.encode"
    parameters = resolve(operator, activation, (ReLU, JumpReLU, TopK, BatchTopK)).parameters
    name, k, bandwidth, ste_to_input, threshold, scale = parameters
    W_enc = check_operands(operator, x, W_enc, b_enc, b_dec, parameters)
    n, leading = W_enc.shape[1], x.shape[:-1]
    check_capacity(operator, parameters, None, n)
    if threshold is not None:
        threshold = threshold.to(threshold_dtype(W_enc.dtype)).expand(n)
    window = bandwidth if bandwidth is not None and has_window(threshold, ste_to_input) else 0.0
    scale = None if scale is None else scale.detach()
    flat = x.reshape(math.prod(leading), x.shape[-1])
    call = SaeEncodeDense(flat, W_enc, b_enc, b_dec, threshold, name, k, window, scale, ste_to_input)
    acts, l0, fired, nnz = _encode_dense(call)
    return acts.view(*leading, n), l0.view(leading), fired, nnz.view(leading)


WIDEST = 2
"""How many times the slots that rows have by default they have at most where earlier ones filled these."""


def slots(known: Density | None, d_sae: int) -> int | None:
    """Slots per row by the entries of earlier rows: room for a quarter more than the fullest held, and no fewer than
    by default, which None stands for. Powers of 2, so that a run has few shapes."""
    least = default_capacity(d_sae)
    wanted = 0 if known is None else known.largest + known.largest // 4
    return None if wanted <= least else min(1 << (wanted - 1).bit_length(), most_slots(d_sae))


def most_slots(d_sae: int) -> int:
    """The most that `slots` gives: entries beyond them overflow whatever is known."""
    return min(WIDEST * default_capacity(d_sae), d_sae)


def choose_path(
    known: Density | None, m: int, W_dec: Tensor, expected: int | None, *, training: bool, times: float = 1.0
) -> str:
    """`"sparse"` or `"dense"`, whichever is faster for m rows: by the entries that a row is expected to have, or by
    what a tracker knows. Before it knows anything the path is dense in training and sparse in inference. `times`
    multiplies the break-even, where the dense path is a slower one than `encode_dense`."""
    d_sae, d_out = W_dec.shape
    gpu = W_dec.device.type == "cuda"
    # On x86 0.3 to 0.5 of it were measured, at 64 to 512 rows.
    limit = (1 if gpu else 0.4) * break_even(m, d_sae, d_out, W_dec)
    if expected is not None:
        entries: float = expected
    elif known is None:
        return "dense" if training else "sparse"
    else:
        entries = known.light / max(known.rows, 1) + limit * again(known, training, gpu)
    return "dense" if entries > times * limit else "sparse"


def again(known: Density, training: bool, on_gpu: bool) -> float:
    """The cost of dense products of rows that overflowed, in break-evens. On a GPU the forward pass multiplies whole
    blocks of neighbours, which costs more than `encode_dense` saves, and the backward pass lists such rows."""
    share = known.over / max(known.rows, 1)
    if not on_gpu:
        return 1.5 * share
    return (0.5 if training else 1.5) + 2.6 * share if known.over else 0.0


def _fake(call: SaeEncodeDense) -> tuple[Tensor, ...]:
    weight, m, n = call.weight, call.x.shape[0], call.weight.shape[1]
    l0 = weight.new_empty(m, dtype=threshold_dtype(weight.dtype))
    fired, nnz = weight.new_empty(n, dtype=torch.int64), weight.new_empty(m, dtype=torch.int32)
    return weight.new_empty(m, n), l0, fired, nnz


def _backward(call: SaeEncodeDense, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor | None]:
    x, weight, bias, b_dec, threshold, *_ = call
    (acts,), (grad, grad_l0, *_) = kept, grads
    if call.bandwidth == 0:
        threshold = None
    if grad is None and (grad_l0 is None or threshold is None):
        return {}
    if grad is None:
        grad = torch.zeros_like(acts)
    if grad_l0 is None:
        grad_l0 = grad.new_zeros(1, dtype=threshold_dtype(acts.dtype)).expand(len(acts))
    # Of this size there are then two tensors and not three: the gradient that a product's backward pass made has no
    # other reader.
    grad_pre = grad.contiguous()
    sums, grad_threshold = _bwd_(
        SaeEncodeDenseBwd(grad_pre, acts, grad_l0, threshold, call.bandwidth, call.ste_to_input)
    )
    found: dict[str, Tensor | None] = {}
    if needs.x:
        found["x"] = (grad_pre @ weight.t()).to(x.dtype)
    if needs.weight:
        inner = (x if b_dec is None else x - b_dec).to(weight.dtype)
        # In the layout of the parameter, or autograd would copy it into that.
        by_latent = weight.stride(0) == 1 and weight.stride(1) == weight.shape[0]
        found["weight"] = (grad_pre.t() @ inner).t() if by_latent else inner.t() @ grad_pre
    if b_dec is not None and needs.b_dec:
        # Every row passes through the one W_enc: the sum over rows comes first.
        found["b_dec"] = -dense_product(sums[None], weight.t(), None, b_dec.dtype)[0]
    if bias is not None and needs.bias:
        found["bias"] = sums.to(bias.dtype)
    if threshold is not None and needs.threshold:
        found["threshold"] = grad_threshold
    return found


def _fake_bwd(call: SaeEncodeDenseBwd) -> tuple[Tensor, Tensor]:
    acts, n, dtype = call.acts, call.acts.shape[1], threshold_dtype(call.acts.dtype)
    return acts.new_empty(n, dtype=dtype), acts.new_empty(n if call.bandwidth else 0, dtype=dtype)


@register(
    SaeEncodeDense,
    cpu=_cpu.encode_dense,
    fake=_fake,
    backward=_backward,
    saved=("x", "weight", "bias", "b_dec", "threshold"),
    keep=lambda call, results: results[:1],
    differentiable=2,
    once_differentiable="sae.encode",
    repeats=True,
)
def _encode_dense() -> Any:
    from gossamer.sae._triton.encode_dense import encode_dense

    return encode_dense


@register(SaeEncodeDenseBwd, cpu=_cpu.encode_dense_bwd_, fake=_fake_bwd, repeats=True)
def _bwd_() -> Any:
    from gossamer.sae._triton.encode_dense import encode_dense_bwd_

    return encode_dense_bwd_

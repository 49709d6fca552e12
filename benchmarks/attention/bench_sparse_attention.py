"""`attention.sparse_attention` beside dense attention: forward, training, and decoding, on drifting selections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.engine import Case, Provider, error_beside_mean
from benchmarks.inputs import random_selection
from gossamer.attention import Selection, sparse_attention


def cases(
    device: torch.device,
    quick: bool,
    *,
    lengths: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    batch: int = 1,
) -> Iterator[Case]:
    """16 heads of 128, 2,048 keys a query or half of what there is, bfloat16; small float32 cases for `quick` and on
    the CPU. Selections drift as real ones do, or are drawn for each query by itself."""
    small = quick or device.type == "cpu"
    dtype = dtype or (torch.float32 if small else torch.bfloat16)
    if small:
        for T in lengths or (256,):
            for training in (False, True):
                yield attention_case(T, 4, 2, 32, min(64, T // 2), dtype, training, batch)
                yield attention_case(T, 4, 2, 32, min(64, T // 2), dtype, training, batch, "random")
        yield decode_case(2048, 4, 2, 32, 64, dtype, batch)
        return
    for T in lengths or (1024, 2048, 4096, 8192, 32768, 131072):
        yield attention_case(T, 16, 16, 128, min(2048, T // 2), dtype, False, batch)
        if T <= 32768:
            yield attention_case(T, 16, 16, 128, min(2048, T // 2), dtype, True, batch)
            yield attention_case(T, 16, 16, 128, min(2048, T // 2), dtype, False, batch, "random")
        if T <= 8192:
            yield attention_case(T, 16, 16, 128, min(2048, T // 2), dtype, True, batch, "random")
    yield attention_case(32768, 16, 4, 128, 2048, dtype, True, batch)
    for G in (16, 4):
        yield decode_case(131072, 16, G, 128, 2048, dtype, batch)


def scattered(T: int, k: int, batch: int, device: torch.device, generator: torch.Generator) -> Selection:
    """A causal selection of some k keys for each query, all drawn by themselves: neighbours share what chance gives."""
    step = max(64, (1 << 27) // (batch * T) // 64 * 64)
    words = []
    for first in range(0, T, step):
        rows = torch.arange(first, min(first + step, T), device=device)[:, None]
        seen = torch.arange(T, device=device) <= rows
        drawn = torch.rand(batch, len(rows), T, device=device, generator=generator)
        words.append(Selection.from_mask(seen & (drawn * (rows + 1) < k)).words)
    # The keys of a block's queries if no key is taken twice: nobody may promise less.
    return Selection(torch.cat(words, 2), T)


LAST = 512
"""Queries and keys at the end, which are all that is looked at in a sweep, and where T is above 8,192: these queries
see all keys, and no query before them sees these keys."""


def attention_case(
    T: int,
    H: int,
    G: int,
    D: int,
    k: int,
    dtype: torch.dtype,
    training: bool,
    B: int,
    kind: str = "drifting",
    *,
    beside: str | None = None,
) -> Case:
    """A case of a sweep is timed `beside` one peer."""

    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        drawn = (torch.randn(B, n, T, D, device=device, generator=generator).to(dtype) for n in (H, G, G, H))
        if kind == "random":
            return [(*drawn, scattered(T, k, B, device, generator))]
        return [(*drawn, random_selection(T, k, batch=B, device=device, generator=generator))]

    run = _trained if training else _inferred
    # Head 0 of everything is looked at: float64 for all of them would take longer than everything that is timed.
    first = 0 if beside is None and T <= 8192 else max(0, T - LAST) // 64 * 64
    result, reference = partial(_first_head, first), partial(_exact, training=training, first=first)
    # Each way by itself shows where the choice between them should change.
    ways = ("tiles", "lists") if T <= 8192 and beside is None else ()
    peers = [
        Provider(
            dense_name(dtype), run(dense), result=partial(_dense_result, training=training, first=first),
            capturable=True,
        ),
        Provider(
            MASKED, run(_masked), prepare=lambda q, k, v, grad, selection: (q, k, v, grad, selection.to_mask()),
            result=result, capturable=True,
        ),
    ]  # fmt: skip
    products = 7 if training else 2
    return Case(
        room="attention",
        name=f"sparse_attention{'_training' if training else ''}{'_random' if kind == 'random' else ''}",
        parameters={"B": B, "T": T, "H": H, "G": G, "D": D, "k": k},
        dtype=dtype,
        make=make,
        providers=(
            Provider("gossamer", run(sparse_attention), ours=True, result=result, capturable=True),
            *(
                Provider(f"gossamer, {path}", run(partial(sparse_attention, path=path, causal=True)), result=result,
                         devices=("cuda",), capturable=True)
                for path in ways
            ),
            *(peer for name, peer in zip((DENSE, MASKED), peers)
              if beside == name or (beside is None and (name == DENSE or T <= 8192))),
        ),
        reference=reference,
        bytes=B * ((2 * H + 2 * G) * T * D * dtype.itemsize * (2 if training else 1) + T * T // 8),
        flops=B * products * 2 * H * D * sum(min(t + 1, k) for t in range(T)),
        grad=training,
        sweep="T",
        error=error_beside_mean,
        # Weights and their gradients are rounded to 16 bits for the products of a backward pass.
        budget=(2e-2 if dtype.itemsize == 2 else 4e-5) if training else None,
    )  # fmt: skip


DENSE, MASKED = "dense SDPA", "dense SDPA, the selection as mask"


def _inferred(forward: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def call(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, selection: Any) -> tuple[Tensor, ...]:
        return (forward(q, k, v, selection),)

    return call


def _trained(forward: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def call(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, selection: Any) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = forward(*leaves, selection)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return call


def dense_name(dtype: torch.dtype) -> str:
    """The name of `dense`: with cuDNN pinned it says so."""
    return "dense SDPA, cuDNN" if dtype.itemsize == 2 and torch.cuda.is_available() else DENSE


def pinned(x: Tensor) -> Any:
    """A context for `scaled_dot_product_attention` of x, in which only cuDNN computes it, for PyTorch's own choice can
    be half as fast on Hopper. On a CPU, and in float32, which cuDNN does not compute, PyTorch chooses."""
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if x.is_cuda and x.element_size() == 2 else nullcontext()


def dense(q: Tensor, k: Tensor, v: Tensor, selection: Any) -> Tensor:
    with pinned(q):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """In 16 bits every head of q gets its own k and v: fast kernels know masks or shared heads, not both."""
    sharing = q.shape[1] // k.shape[1]
    if sharing > 1 and q.element_size() == 2:
        k, v, sharing = k.repeat_interleave(sharing, 1), v.repeat_interleave(sharing, 1), 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=sharing > 1)


def _first_head(first: int, output: tuple[Tensor, ...], *_: Any) -> tuple[Tensor, ...]:
    return tuple(x[:1, 0, first:] for x in output)


def _dense_result(
    output: tuple[Tensor, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    selection: Selection,
    training: bool,
    first: int,
) -> tuple[Tensor, ...]:
    """Dense attention attends to all keys, so its error is that against its own reference."""
    own = _exact(q, k, v, grad, None, training, first)
    wanted = _exact(q, k, v, grad, selection, training, first)
    return tuple(a + (b.double() - c) for a, b, c in zip(wanted, _first_head(first, output), own))


def _exact(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, selection: Selection | None, training: bool, first: int
) -> tuple[Tensor, ...]:
    """Head 0 in float64, a few queries at a time; of k and v, the gradients of all heads of q that share it. From
    query and key `first` on, a multiple of 64: earlier queries do not see later keys."""
    heads = q.shape[1] // k.shape[1] if training else 1
    T, step, scale = q.shape[2], 512, q.shape[3] ** -0.5
    keys, values = k[0, 0].double(), v[0, 0].double()
    outs, dqs = [], []
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    bits = torch.arange(64, device=q.device)[:, None]
    for head in range(heads):
        for begin in range(first, T, step):
            rows = torch.arange(begin, min(begin + step, T), device=q.device)
            keep = torch.arange(T, device=q.device) <= rows[:, None]
            if selection is not None:
                words = selection.words[0, 0, begin // 64 : -(-(begin + len(rows)) // 64)]
                keep = ((words[:, None] >> bits) & 1).flatten(0, 1)[: len(rows)].bool()
            x, g = (t[0, head, begin : begin + step].double() for t in (q, grad))
            p = (x @ keys.t() * scale).masked_fill(~keep, -torch.inf).softmax(-1)
            out = p @ values
            outs += [out] if head == 0 else []
            if training:
                ds = p * (g @ values.t() - (g * out).sum(-1, keepdim=True)) * scale
                dqs += [ds @ keys] if head == 0 else []
                dk += ds.t() @ x
                dv += p.t() @ g
    whole = (torch.cat(outs)[None],)
    return (*whole, torch.cat(dqs)[None], dk[None, first:], dv[None, first:]) if training else whole


def decode_case(T: int, H: int, G: int, D: int, k: int, dtype: torch.dtype, B: int) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        q, keys, values = (
            torch.randn(B, *n, D, device=device, generator=generator).to(dtype) for n in ((H, 1), (G, T), (G, T))
        )
        taken = torch.rand(B, 1, T, device=device, generator=generator).topk(k, -1).indices
        return [(q, keys, values, Selection.from_indices(taken, T))]

    def reference(q: Tensor, keys: Tensor, values: Tensor, selection: Selection | None) -> tuple[Tensor]:
        keys, values = (x.double().repeat_interleave(H // G, 1) for x in (keys, values))
        s = q.double() @ keys.transpose(2, 3) * D**-0.5
        if selection is not None:
            s = s.masked_fill(~selection.to_mask(), -torch.inf)
        return (s.softmax(-1) @ values,)

    def dense(q: Tensor, keys: Tensor, values: Tensor, selection: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=H != G)

    def dense_result(output: Tensor, q: Tensor, keys: Tensor, values: Tensor, selection: Any) -> tuple[Tensor]:
        own, wanted = reference(q, keys, values, None)[0], reference(q, keys, values, selection)[0]
        return (wanted + (output.double() - own),)

    return Case(
        room="attention",
        name="sparse_decode",
        parameters={"B": B, "T": T, "H": H, "G": G, "D": D, "k": k},
        dtype=dtype,
        make=make,
        providers=(
            Provider("gossamer", sparse_attention, ours=True, capturable=True),
            Provider("dense SDPA", dense, result=dense_result, capturable=True),
        ),
        reference=reference,
        bytes=B * 2 * G * k * D * dtype.itemsize,
        flops=B * 4 * H * k * D,
    )

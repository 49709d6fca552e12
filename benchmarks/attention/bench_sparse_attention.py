"""`attention.sparse_attention` beside dense attention: forward, training, and decoding, on drifting selections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gossamer.attention import Selection, sparse_attention, sparse_decode
from gossamer.cli.bench import Case, Provider
from gossamer.testing import random_selection


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """B 1, 16 heads of 128, 2,048 keys a query, bfloat16; small float32 cases for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        yield _attention(256, 4, 2, 32, 64, torch.float32, False)
        yield _attention(256, 4, 2, 32, 64, torch.float32, True)
        yield _decode(2048, 4, 2, 32, 64, torch.float32)
        return
    for T in (4096, 8192, 32768, 131072):
        yield _attention(T, 16, 16, 128, 2048, torch.bfloat16, False)
    for T, G in ((4096, 16), (8192, 16), (32768, 16), (32768, 4)):
        yield _attention(T, 16, G, 128, 2048, torch.bfloat16, True)
    for G in (16, 4):
        yield _decode(131072, 16, G, 128, 2048, torch.bfloat16)


def _attention(T: int, H: int, G: int, D: int, k: int, dtype: torch.dtype, training: bool) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        drawn = (torch.randn(1, n, T, D, device=device, generator=generator).to(dtype) for n in (H, G, G, H))
        return [(*drawn, random_selection(T, k, device=device, generator=generator))]

    run = _trained if training else _inferred
    # Head 0 of everything is looked at: float64 for all of them would take longer than everything that is timed.
    reference = partial(_exact, training=training)
    masked = (
        Provider(
            "SDPA, the selection as mask",
            run(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=H != G)),
            prepare=lambda q, k, v, grad, selection: (q, k, v, grad, selection.to_mask()),
            result=_first_head,
        ),
    )
    products = 7 if training else 2
    return Case(
        room="attention",
        name="sparse_attention_training" if training else "sparse_attention",
        parameters={"T": T, "H": H, "G": G, "D": D, "k": k},
        dtype=dtype,
        make=make,
        providers=(
            Provider("gossamer", run(sparse_attention), ours=True, result=_first_head),
            Provider("dense SDPA", run(_dense), result=partial(_dense_result, training=training)),
            *(masked if T <= 8192 else ()),
        ),
        reference=reference,
        bytes=(2 * H + 2 * G) * T * D * dtype.itemsize * (2 if training else 1) + T * T // 8,
        flops=products * 2 * H * D * sum(min(t + 1, k) for t in range(T)),
        grad=training,
        sweep="T",
        error=_error,
    )


def _error(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """Largest error of a row, over the mean norm of rows: the gradient of a query with one key is a zero that cancels,
    which no relative error can judge."""
    errors = [(a.double() - b).norm(dim=-1).max() / b.norm(dim=-1).mean() for a, b in zip(got, want, strict=True)]
    return float(torch.stack(errors).max().nan_to_num(nan=torch.inf))


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


def _dense(q: Tensor, k: Tensor, v: Tensor, selection: Any) -> Tensor:
    """cuDNN's attention first: PyTorch's own choice can be half as fast on Hopper."""
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _first_head(output: tuple[Tensor, ...], *_: Any) -> tuple[Tensor, ...]:
    return tuple(x[:, 0] for x in output)


def _dense_result(
    output: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, grad: Tensor, selection: Selection, training: bool
) -> tuple[Tensor, ...]:
    """Dense attention attends to all keys, so its error is that against its own reference."""
    own = _exact(q, k, v, grad, None, training)
    wanted = _exact(q, k, v, grad, selection, training)
    return tuple(a + (b.double() - c) for a, b, c in zip(wanted, _first_head(output), own))


def _exact(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, selection: Selection | None, training: bool
) -> tuple[Tensor, ...]:
    """Head 0 in float64, a few queries at a time; of k and v, the gradients of all heads of q that share it."""
    heads = q.shape[1] // k.shape[1] if training else 1
    T, step, scale = q.shape[2], 512, q.shape[3] ** -0.5
    keys, values = k[0, 0].double(), v[0, 0].double()
    outs, dqs = [], []
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    bits = torch.arange(64, device=q.device)[:, None]
    for head in range(heads):
        for first in range(0, T, step):
            rows = torch.arange(first, min(first + step, T), device=q.device)
            keep = torch.arange(T, device=q.device) <= rows[:, None]
            if selection is not None:
                words = selection.words[0, 0, first // 64 : -(-(first + len(rows)) // 64)]
                keep = ((words[:, None] >> bits) & 1).flatten(0, 1)[: len(rows)].bool()
            x, g = (t[0, head, first : first + step].double() for t in (q, grad))
            p = (x @ keys.t() * scale).masked_fill(~keep, -torch.inf).softmax(-1)
            out = p @ values
            outs += [out] if head == 0 else []
            if training:
                ds = p * (g @ values.t() - (g * out).sum(-1, keepdim=True)) * scale
                dqs += [ds @ keys] if head == 0 else []
                dk += ds.t() @ x
                dv += p.t() @ g
    whole = (torch.cat(outs)[None],)
    return (*whole, torch.cat(dqs)[None], dk[None], dv[None]) if training else whole


def _decode(T: int, H: int, G: int, D: int, k: int, dtype: torch.dtype) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        q, keys, values = (
            torch.randn(1, *n, D, device=device, generator=generator).to(dtype) for n in ((H, 1), (G, T), (G, T))
        )
        taken = torch.rand(1, 1, T, device=device, generator=generator).topk(k, -1).indices
        return [(q, keys, values, Selection.from_indices(taken, T, capacity=k))]

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
        parameters={"T": T, "H": H, "G": G, "D": D, "k": k},
        dtype=dtype,
        make=make,
        providers=(
            Provider("gossamer", sparse_decode, ours=True, capturable=True),
            Provider("dense SDPA", dense, result=dense_result, capturable=True),
        ),
        reference=reference,
        bytes=2 * G * k * D * dtype.itemsize,
        flops=4 * H * k * D,
    )

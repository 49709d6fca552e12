"""The steps of a layer that have no case of their own: its projections with rotary embeddings and gates, those of the
indexer, the indexer's loss, and its gradient straight through a selection.

Each query's results depend on no later one, so that the last 64 queries are what is checked, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import Case, Provider, error_beside_mean
from benchmarks.inputs import random_selection
from gossamer.attention import Selection, indexer_loss, sparse_attention
from gossamer.nn import GatedSparseAttention

ROWS, HEADS, WIDTH = 64, 4, 64
"""Queries that are checked; the indexer's heads, and their width."""
PLAIN = 4096
"""Length up to which the plain way's matrices of T by T are made."""


def cases(
    device: torch.device,
    quick: bool,
    *,
    lengths: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    batch: int = 1,
) -> Iterator[Case]:
    """The published layer: hidden size 2,048, 16 heads of 128, k 2,048; a small one for `quick` and on the CPU."""
    small = quick or device.type == "cpu"
    width, heads = (64, 4) if small else (2048, 16)
    dtype = dtype or (torch.float32 if small else torch.bfloat16)
    for T in lengths or ((256,) if small else (1024, 4096, 32768)):
        yield _projections(T, width, heads, dtype, batch)
        yield _of_indexer(T, width, heads, dtype, batch)
        k = min(width, T // 2)
        yield _training("indexer_loss", _loss, _plain_loss, T, heads, width // heads, k, dtype, batch)
        yield _training("straight_through", _through, _plain_through, T, heads, width // heads, k, dtype, batch)


def _layer(
    T: int, width: int, heads: int, dtype: torch.dtype, B: int, device: torch.device, generator: torch.Generator
) -> list[tuple[Any, ...]]:
    torch.manual_seed(0)
    layer = GatedSparseAttention(width, heads, k_base=T, k_min=1, k_max=T)
    for gate in (layer.value_gate, layer.output_gate):
        assert gate is not None
        torch.nn.init.normal_(gate.gate_proj.weight, std=width**-0.5)
    return [(layer.to(device, dtype), torch.randn(B, T, width, device=device, generator=generator).to(dtype))]


def _last(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The last tokens of `[B, T, ...]`."""
    return tuple(x[:, -ROWS:] for x in tensors)


def _step(
    name: str, T: int, width: int, heads: int, out: int, dtype: torch.dtype, B: int,
    ours: Callable[..., tuple[Tensor, ...]], plain: Callable[..., tuple[Tensor, ...]],
) -> Case:  # fmt: skip
    """A case of products of x with `out` rows of weights; `plain` takes the first position as well."""

    def reference(layer: GatedSparseAttention, x: Tensor) -> tuple[Tensor, ...]:
        return plain(copy.deepcopy(layer).double(), x[:, -ROWS:].double(), max(0, T - ROWS))

    return Case(
        room="attention",
        name=name,
        parameters={"B": B, "T": T, "hidden": width, "H": heads},
        dtype=dtype,
        make=partial(_layer, T, width, heads, dtype, B),
        providers=(
            Provider("gossamer", ours, ours=True, result=lambda made, *_: _last(made)),
            Provider("plain PyTorch", partial(plain, first=0), result=lambda made, *_: _last(made)),
        ),
        reference=reference,
        bytes=(B * T * (width + out) + width * out) * dtype.itemsize,
        flops=2 * B * T * width * out,
        sweep="T",
    )


def _projections(T: int, width: int, heads: int, dtype: torch.dtype, B: int) -> Case:
    def ours(layer: GatedSparseAttention, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v, gate, _ = layer.project(x, indexer=False)
        assert gate is not None
        return *(t.transpose(1, 2) for t in (q, k, v)), gate

    def plain(layer: GatedSparseAttention, x: Tensor, first: int) -> tuple[Tensor, ...]:
        split = (-1, layer.head_dim)
        q, k, v = (p(x).unflatten(-1, split) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        assert layer.value_gate is not None and layer.output_gate is not None
        v = v * layer.value_gate.gate_proj(x).sigmoid().view_as(v)
        angles = layer.rotary_emb(torch.arange(first, first + x.shape[1], device=x.device))
        cos, sin = (angle[:, None].to(x.dtype) for angle in angles)
        q, k = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k))
        return q, k, v, layer.output_gate.gate_proj(x).sigmoid()

    return _step("projections_rotary_gates", T, width, heads, 5 * width, dtype, B, ours, plain)


def _of_indexer(T: int, width: int, heads: int, dtype: torch.dtype, B: int) -> Case:
    def ours(layer: GatedSparseAttention, x: Tensor) -> tuple[Tensor, ...]:
        q, k, w = layer.index(x)
        return q.transpose(1, 2), k, w

    def plain(layer: GatedSparseAttention, x: Tensor, first: int) -> tuple[Tensor, ...]:
        of = layer.indexer
        return of.idx_q_proj(x).unflatten(-1, (of.num_heads, of.head_dim)), of.idx_k_proj(x), of.idx_w_proj(x)

    return _step("indexer_projections", T, width, heads, HEADS * WIDTH + WIDTH + HEADS, dtype, B, ours, plain)


def _loss(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, index: Any, selection: Selection, lse: Tensor) -> Tensor:
    return indexer_loss(q, k, *index, selection=selection, lse=lse, causal=True)


def _through(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, index: Any, selection: Selection, lse: Tensor) -> Tensor:
    return (sparse_attention(q, k, v, selection, indexer=index, causal=True) * grad).sum()


def _scores(index: Any) -> Tensor:
    """[B, queries, T] of q_idx `[B, n, queries, d]`."""
    q, k, w, bias = index
    z = q @ k[:, None].transpose(2, 3) * q.shape[3] ** -0.5 + bias[:, None, None]
    return (z.sigmoid() * w.sigmoid().transpose(1, 2)[..., None]).sum(1)


def _plain_loss(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, index: Any, taken: Tensor, lse: Any = None) -> Tensor:
    """Of all queries, or of the last ones, whose part in the mean over all is the same."""
    s = (q.detach() @ k.detach().transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(~taken, -torch.inf)
    wanted = s.softmax(-1).mean(1)
    logs = _scores(index).masked_fill(~taken[:, 0], -torch.inf).log_softmax(-1)
    parts = torch.where(wanted > 0, wanted * (wanted.log() - logs), 0)
    return parts.sum() / (len(q) * k.shape[2])


def _plain_through(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, index: Any, taken: Tensor, lse: Any = None) -> Tensor:
    scores = _scores(index)[:, None]
    s = q @ k.transpose(2, 3) * q.shape[3] ** -0.5 + (scores - scores.detach())
    return ((s.masked_fill(~taken, -torch.inf).softmax(-1) @ v) * grad).sum()


def _bits(selection: Selection, rows: Tensor) -> Tensor:
    """bool [B, 1, rows, T]."""
    return ((selection.words[:, :, rows // 64] >> (rows % 64)[:, None]) & 1).bool()


def _training(
    name: str, ours: Callable[..., Tensor], plain: Callable[..., Tensor], T: int, H: int, D: int, k: int,
    dtype: torch.dtype, B: int,
) -> Case:  # fmt: skip
    """Gradients of the indexer's queries and weights, of a number that follows from its scores; for the gradient
    straight through, attention's forward pass is part of it, and its own gradients are not."""

    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        def drawn(*shape: int) -> Tensor:
            return torch.randn(B, *shape, device=device, generator=generator).to(dtype)

        index = (drawn(HEADS, T, WIDTH), drawn(T, WIDTH), drawn(T, HEADS), drawn(HEADS)[0])
        selection = random_selection(T, k, batch=B, device=device, generator=generator)
        return [(*(drawn(H, T, D) for _ in range(4)), index, selection)]

    def call(number: Callable[..., Tensor], q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *before, index, taken, lse = rest
        leaves = tuple(x.detach().requires_grad_() for x in index)
        return torch.autograd.grad(number(q, *before, leaves, taken, lse), leaves)

    def prepare(q: Tensor, keys: Tensor, v: Tensor, grad: Tensor, index: Any, selection: Selection) -> tuple[Any, ...]:
        lse = sparse_attention(q, keys, v, selection, return_lse=True, causal=True)[1]
        return q, keys, v, grad, index, selection, lse

    def prepare_plain(*inputs: Any) -> tuple[Any, ...]:
        rows = torch.arange(T, device=inputs[0].device)
        taken = _bits(inputs[-1], rows) & torch.ones(T, T, dtype=torch.bool, device=rows.device).tril()
        return *inputs[:-1], taken, None

    def result(grads: tuple[Tensor, ...], *_: Any) -> tuple[Tensor, ...]:
        return grads[0][:, :, -ROWS:], grads[2][:, -ROWS:]

    def reference(
        q: Tensor, keys: Tensor, v: Tensor, grad: Tensor, index: Any, selection: Selection
    ) -> tuple[Tensor, ...]:
        rows = torch.arange(max(0, T - ROWS), T, device=q.device)
        taken = _bits(selection, rows) & (torch.arange(T, device=q.device) <= rows[:, None])
        queries = (q[:, :, rows].double(), keys.double(), v.double(), grad[:, :, rows].double())
        wide = (index[0][:, :, rows].double(), index[1].double(), index[2][:, rows].double(), index[3].double())
        return result(call(plain, *queries, wide, taken, None))

    kept = sum(min(t + 1, k) for t in range(T))
    return Case(
        room="attention",
        name=name,
        parameters={"B": B, "T": T, "H": H, "D": D, "k": k, "Hi": HEADS, "Di": WIDTH},
        dtype=dtype,
        make=make,
        providers=(
            Provider("gossamer", partial(call, ours), ours=True, prepare=prepare, result=result, capturable=True),
            Provider(
                "plain PyTorch", partial(call, plain), prepare=prepare_plain, result=result,
                devices=("cpu", "cuda") if T <= PLAIN else (),
            ),
        ),
        reference=reference,
        bytes=B * (4 * H * T * D * dtype.itemsize + T * T // 8),
        flops=2 * B * kept * ((H * D if name == "indexer_loss" else 3 * H * D) + 3 * HEADS * WIDTH),
        grad=True,
        sweep="T",
        error=error_beside_mean,
        budget=2e-2 if dtype.itemsize == 2 else 2e-4,
    )  # fmt: skip

"""Selection and attention together, from the indexer's inputs to the result: for one layer, and for several that share
one selection, beside dense attention of as many layers.

Queries of the indexer drift so slowly that 64 neighbours select some 1.4 times as many keys as each, as in trained
models. Results are checked at the last 64 queries of the first head, in float64, over the keys that each way selects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.bench_select_topk import drifting
from benchmarks.attention.bench_sparse_attention import dense, dense_name
from benchmarks.engine import Case, Provider
from gossamer import attention

ROWS = 64
INDEXER_HEADS, INDEXER_WIDTH = 4, 64
SHARED = 4
"""Layers that use one selection."""


def cases(
    device: torch.device,
    quick: bool,
    *,
    lengths: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    batch: int = 1,
) -> Iterator[Case]:
    """16 heads of 128, k 2,048, in bfloat16; small float32 ones for `quick` and on the CPU."""
    if quick or device.type == "cpu":
        for T in lengths or (512,):
            for layers in (1, SHARED):
                yield _case(T, 4, 32, min(64, T // 8 * 4), layers, dtype or torch.float32, batch)
        return
    for T in lengths or (1024, 2048, 4096, 8192, 32768, 131072):
        for layers in (1, SHARED):
            yield _case(T, 16, 128, min(2048, T // 8 * 4), layers, dtype or torch.bfloat16, batch)


def _case(T: int, H: int, D: int, k: int, layers: int, dtype: torch.dtype, B: int) -> Case:
    def make(device: torch.device, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        """q, k and v, the same for every layer, and q_idx, k_idx, w and bias."""
        drawn = [torch.randn(B, H, T, D, device=device, generator=generator).to(dtype) for _ in range(3)]
        q = drifting((B, INDEXER_HEADS, T, INDEXER_WIDTH), 2, device, generator, share=0.9997)
        keys = drifting((B, T, INDEXER_WIDTH), 1, device, generator)
        w = drifting((B, T, INDEXER_HEADS), 1, device, generator, share=0.9997)
        bias = torch.randn(INDEXER_HEADS, device=device, generator=generator)
        return [(*drawn, *(x.to(dtype) for x in (q, keys, w)), bias)]

    def ours(granularity: int, q: Tensor, keys: Tensor, v: Tensor, *index: Tensor) -> Any:
        selection = attention.select_topk(*index, k=k, granularity=granularity, causal=True)
        for _ in range(layers):
            out = attention.sparse_attention(q, keys, v, selection, causal=True)
        return out

    def everything(q: Tensor, keys: Tensor, v: Tensor, *index: Tensor) -> Any:
        for _ in range(layers):
            out = dense(q, keys, v, None)
        return out

    def exact(granularity: int | None, q: Tensor, keys: Tensor, v: Tensor, *index: Tensor) -> Tensor:
        seen = torch.ones(ROWS, T, dtype=torch.bool, device=q.device).tril(T - ROWS)
        if granularity is not None:
            q_idx, k_idx, w, bias = index
            last = q_idx[:1, :, -ROWS:], k_idx[:1], w[:1, -ROWS:], bias
            # The keys that the last queries select depend on no query before them.
            seen = attention.select_topk(*last, k=k, granularity=granularity, causal=True).to_mask()[0, 0]
        scores = q[0, 0, -ROWS:].double() @ keys[0, 0].double().t() * D**-0.5
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[0, 0].double())[None]

    def result(granularity: int | None, out: Tensor, *inputs: Tensor) -> tuple[Tensor]:
        """Over other keys than the reference what counts is the error against the same in float64."""
        own = out[:1, 0, -ROWS:].double()
        return (own if granularity == 1 else exact(1, *inputs) + (own - exact(granularity, *inputs)),)

    return Case(
        room="attention",
        name="selected_attention" if layers == 1 else "selected_attention_shared",
        parameters={"B": B, "T": T, "H": H, "D": D, "k": k, "layers": layers},
        dtype=dtype,
        make=make,
        providers=(
            Provider("gossamer", partial(ours, 1), ours=True, result=partial(result, 1), capturable=True),
            Provider(
                "gossamer, units of four", partial(ours, 4), ours=True, result=partial(result, 4), capturable=True
            ),
            Provider(dense_name(dtype), everything, result=partial(result, None), capturable=True),
        ),
        reference=lambda *inputs: (exact(1, *inputs),),
        bytes=B * (4 * layers * H * T * D * dtype.itemsize + T * T // 8),
        flops=B * (INDEXER_HEADS * T * T * INDEXER_WIDTH + layers * 4 * H * D * sum(min(t + 1, k) for t in range(T))),
        sweep="T",
    )

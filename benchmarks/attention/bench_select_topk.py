"""`attention.select_topk` from the indexer's inputs, and `attention.indexer_scores`, at the shapes of one layer.

Queries, keys and weights are correlated from position to position, as hidden states are. Scores are those of the gated
indexer, or of a ReLU, as in DeepSeek-V3.2, with as many heads as there. A selection is judged by the
sum of its exact scores, row by row, for rows 64 apart: a key taken instead of a better one shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import Case, Provider
from gossamer import attention

HEADS, D = 4, 64
_SLAB = 1 << 23
"""Scores that the plain way holds at a time."""


def cases(
    device: torch.device, quick: bool, *, lengths: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> Iterator[Case]:
    """4 heads of 64 columns, for a ReLU also 64 of 128, k 2,048, in bfloat16; a small float32 one for `quick` and on
    the CPU."""
    if quick or device.type == "cpu":
        for T in lengths or (512,):
            for granularity in (1, 4):
                yield select_case(T, min(64, T // 8 * 4), dtype or torch.float32, granularity)
            yield select_case(T, min(64, T // 8 * 4), dtype or torch.float32, relu=True)
            yield _adaptive(T, min(64, T // 8 * 4), dtype or torch.float32)
            for relu in (False, True):
                yield _scores(T, dtype or torch.float32, relu)
        return
    for T in lengths or (1024, 2048, 4096, 8192, 32768, 131072):
        for granularity in (1, 4):
            yield select_case(T, min(2048, T // 8 * 4), dtype or torch.bfloat16, granularity)
        yield _adaptive(T, min(2048, T // 8 * 4), dtype or torch.bfloat16)
        for heads, d in ((HEADS, D), (64, 128)) if T in (8192, 32768) else ():
            yield select_case(T, 2048, dtype or torch.bfloat16, 1, heads, d, relu=True)
    for relu in (False, True):
        yield _scores(4096, dtype or torch.bfloat16, relu)


def drifting(
    shape: tuple[int, ...], dim: int, device: torch.device, generator: torch.Generator, share: float = 0.98
) -> Tensor:
    """Standard normal numbers, each `share` of its neighbour along `dim` and the rest new."""
    x = torch.randn(shape, device=device, generator=generator) * (1 - share**2) ** 0.5
    reach = 1
    # The rest behind that many steps is less than a ten-thousandth.
    while reach < min(shape[dim], 10 / (1 - share)):
        older = torch.zeros_like(x)
        older.narrow(dim, reach, shape[dim] - reach).copy_(x.narrow(dim, 0, shape[dim] - reach))
        x, reach = x + share**reach * older, 2 * reach
    return x


def _inputs(
    T: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator, heads: int = HEADS, d: int = D,
    relu: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of the indexer; without a bias for a ReLU."""
    q = drifting((1, heads, T, d), 2, device, generator).to(dtype)
    k = drifting((1, T, d), 1, device, generator).to(dtype)
    w = drifting((1, T, heads), 1, device, generator).to(dtype)
    return (q, k, w) if relu else (q, k, w, torch.randn(heads, device=device, generator=generator))


def _rows(rows: Tensor, q: Tensor, k: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Scores [rows, T] in the dtype of q, of a ReLU where there is no bias, -inf where a key is not seen."""
    x = torch.einsum("hqd,kd->hqk", q[0, :, rows], k[0]) * q.shape[3] ** -0.5
    if bias is None:
        scores = torch.einsum("hqk,qh->qk", x.relu_(), w[0, rows])
    else:
        x = x + bias[:, None, None].to(q.dtype)
        scores = (w[0, rows].sigmoid().t()[..., None] * x.sigmoid()).sum(0)
    return scores.masked_fill(torch.arange(k.shape[1], device=k.device) > rows[:, None], -torch.inf)


def _sample(q: Tensor) -> Tensor:
    """Last rows of blocks of 64."""
    return torch.arange(63, q.shape[2], 64, device=q.device)


def _sums(selection: attention.Selection, *inputs: Tensor) -> tuple[Tensor]:
    """Exact scores of what is selected, summed, at the sampled rows."""
    rows = _sample(inputs[0])
    out = torch.empty(1, len(rows), dtype=torch.float64, device=rows.device)
    # The last block may end before its row 63.
    for part, words in zip(rows.split(64), selection.words[0, 0, : len(rows)].split(64)):
        scores = _rows(part, *(x.double() for x in inputs))
        # Row 63 of a block is its words' sign.
        out[0, part // 64] = scores.where(words < 0, 0).sum(1)
    return (out,)


def _best(scores: Tensor, k_top: int, granularity: int) -> Tensor:
    """bool like scores: the keys that a query sees, of its k highest or of its k / granularity best units."""
    T = scores.shape[1]
    units = torch.nn.functional.pad(scores, (0, -T % granularity), value=-torch.inf).unflatten(1, (-1, granularity))
    best = units.amax(2).topk(min(k_top // granularity, units.shape[1])).indices
    taken = torch.zeros(units.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, True)
    return taken.repeat_interleave(granularity, 1)[:, :T] & scores.isfinite()


def _plain(k_top: int, granularity: int, *inputs: Tensor) -> attention.Selection:
    """Scores and `torch.topk`, a slab of rows at a time, into a dense mask."""
    T = inputs[0].shape[2]
    rows = torch.arange(T, device=inputs[0].device).split(max(1, _SLAB // T))
    mask = torch.cat([_best(_rows(part, *inputs), k_top, granularity) for part in rows])
    return attention.Selection.from_mask(mask[None])


def select_case(
    T: int, k_top: int, dtype: torch.dtype, granularity: int = 1, heads: int = HEADS, d: int = D, relu: bool = False
) -> Case:
    """Selection of k_top keys, beside the scores in memory and `torch.topk` of them."""

    def reference(*inputs: Tensor) -> tuple[Tensor]:
        wide = [x.double() for x in inputs]
        scores = [_rows(part, *wide) for part in _sample(wide[0]).split(64)]
        return (torch.cat([part.where(_best(part, k_top, granularity), 0).sum(1) for part in scores])[None],)

    options: dict[str, Any] = {"bias": None, "activation": "relu"} if relu else {}
    return Case(
        room="attention",
        name="select_topk_relu" if relu else "select_topk" if granularity == 1 else "select_topk_units",
        parameters={"T": T, "k": k_top, "Hi": heads, "Di": d},
        dtype=dtype,
        make=lambda device, generator: [_inputs(T, dtype, device, generator, heads, d, relu)],
        providers=(
            Provider(
                "gossamer",
                lambda *inputs: attention.select_topk(
                    *inputs, k=k_top, granularity=granularity, causal=True, **options
                ),
                ours=True,
                result=_sums,
                capturable=True,
            ),
            Provider(
                "dense scores, torch.topk",
                lambda *inputs: _plain(k_top, granularity, *inputs),
                result=_sums,
                devices=("cpu", "cuda") if T <= 32768 else (),
            ),
        ),
        reference=reference,
        bytes=T * T // 8 + (heads + 1) * T * d * dtype.itemsize,
        flops=heads * T * T * d,
        sweep="T",
        # Keys whose scores are nearly equal may be taken for each other, a larger part of few.
        budget=max(1e-3, 0.05 / k_top),
    )


def _adaptive(T: int, k_top: int, dtype: torch.dtype) -> Case:
    """As `select_topk`, each query with a number of keys that follows from the entropy of its scores."""
    rule = attention.AdaptiveK("entropy", max(k_top // 8, 1), k_top, min(2 * k_top, T))

    def best(scores: Tensor) -> Tensor:
        log = scores.float().log_softmax(1) if scores.dtype != torch.float64 else scores.log_softmax(1)
        seen = scores.isfinite()
        entropy = -(log.exp() * log).where(seen, 0).sum(1)
        k = rule.k_base * (0.5 + entropy / (seen.sum(1) + 1).log())
        order = scores.sort(dim=1, descending=True).indices
        taken = torch.arange(T, device=scores.device) < k.clamp(rule.k_min, rule.k_max).long()[:, None]
        return torch.zeros_like(seen).scatter(1, order, taken) & seen

    def plain(q: Tensor, k: Tensor, w: Tensor, bias: Tensor) -> attention.Selection:
        rows = torch.arange(T, device=q.device).split(max(1, _SLAB // T))
        mask = torch.cat([best(_rows(part, q, k, w, bias)) for part in rows])
        return attention.Selection.from_mask(mask[None])

    def reference(q: Tensor, k: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor]:
        scores = [_rows(part, q.double(), k.double(), w.double(), bias.double()) for part in _sample(q).split(64)]
        return (torch.cat([part.where(best(part), 0).sum(1) for part in scores])[None],)

    return Case(
        room="attention",
        name="select_topk_adaptive",
        parameters={"T": T, "k": k_top, "Hi": HEADS, "Di": D},
        dtype=dtype,
        make=lambda device, generator: [_inputs(T, dtype, device, generator)],
        providers=(
            Provider(
                "gossamer",
                lambda *inputs: attention.select_topk(*inputs, k=rule, causal=True),
                ours=True,
                result=_sums,
                capturable=True,
            ),
            Provider("dense scores, sorted", plain, result=_sums, devices=("cpu", "cuda") if T <= 32768 else ()),
        ),
        reference=reference,
        bytes=T * T // 8 + (HEADS + 1) * T * D * dtype.itemsize,
        flops=HEADS * T * T * D,
        sweep="T",
        # A number of keys next to an integer may be rounded either way.
        budget=max(5e-3, 2 / k_top),
    )


def _scores(T: int, dtype: torch.dtype, relu: bool = False) -> Case:
    def finite(scores: Tensor, *_: Tensor) -> tuple[Tensor]:
        return (scores.where(scores.isfinite(), 0),)

    def every(*inputs: Tensor) -> Tensor:
        return _rows(torch.arange(T, device=inputs[0].device), *inputs)[None]

    options: dict[str, Any] = {"activation": "relu"} if relu else {}
    return Case(
        room="attention",
        name="indexer_scores_relu" if relu else "indexer_scores",
        parameters={"T": T, "Hi": HEADS, "Di": D},
        dtype=dtype,
        make=lambda device, generator: [_inputs(T, dtype, device, generator, relu=relu)],
        providers=(
            Provider(
                "gossamer",
                lambda *inputs: attention.indexer_scores(*inputs, causal=True, **options),
                ours=True,
                result=finite,
                capturable=True,
            ),
            Provider("torch", every, result=finite, capturable=True),
        ),
        reference=lambda *inputs: finite(every(*(x.double() for x in inputs))),
        bytes=T * T * dtype.itemsize,
        flops=HEADS * T * T * D,
    )

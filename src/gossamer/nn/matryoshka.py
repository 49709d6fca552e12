"""Autoencoders whose first latents are an autoencoder by themselves."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.nn.sae import BatchTopKSAE, Reviving, TopKSAE
from gossamer.rowsparse import Rows
from gossamer.rowsparse.rows import unchecked
from gossamer.sae.decode import decode_dense


class Nested(Reviving):
    """The base of autoencoders of nested widths, which share one selection of latents."""

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        k: int,
        *,
        widths: Sequence[int] | None = None,
        inner_weights: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_in, d_sae, k, **options)
        operator = f"nn.{type(self).__name__}"
        for name, given in (("widths", widths), ("inner_weights", inner_weights)):
            if not isinstance(given, Sequence | None):
                raise TypeError(f"{operator}: {name} must be a list or a tuple, got {type(given).__name__}.")
        widths = sorted({max(d_sae // 4, 1), d_sae}) if widths is None else widths
        for width in widths:
            checks.positive(operator, "widths", width, "Each is a number of latents.")
        if any(narrow >= wide for narrow, wide in pairwise(widths)) or tuple(widths[-1:]) != (d_sae,):
            raise ValueError(f"{operator}: widths must ascend and end with d_sae = {d_sae}, got {tuple(widths)}.")
        inner = len(widths) - 1
        weights = [0.5 / max(inner, 1)] * inner if inner_weights is None else inner_weights
        if len(weights) != inner:
            raise ValueError(
                f"{operator}: inner_weights must have a number for each of {len(widths)} widths but the last, got "
                f"{len(weights)}."
            )
        for weight in weights:
            checks.number(operator, "inner_weights", weight, "0 leaves a width out of the loss.", zero=True)
        self.widths, self.inner_weights = tuple(widths), tuple(weights)

    def reconstructions(self, rows: Rows | Tensor) -> list[Tensor]:
        """The reconstructions `[..., d_in]` of x by each width, the narrowest first, in float32 at least.

        Args:
            rows: latents `(..., d_sae)`, as `encode` returns them. A container that may have overflowed, as in
                evaluation mode, or of a batch's selection over ranks (`shard_sae`), is completed first, which waits for
                the device once.
        """
        parts = self._parts(rows, self._wide)
        return list(accumulate([parts[0] + self.b_dec, *parts[1:]]))

    def _whole_pass(self, x: Tensor) -> None:
        # `by_width` indexes by counts, which no kernel of a walk has written.
        self._latents(x, self._slots)

    def _parts(self, rows: Rows | Tensor, out_dtype: torch.dtype | None) -> Tensor:
        """`[W, ..., d_in]`: the decoded entries from each width to the next."""
        if isinstance(rows, Tensor):
            sizes = [wide - narrow for narrow, wide in pairwise((0, *self.widths))]
            pieces = zip(rows.split(sizes, -1), self.W_dec.split(sizes))
            return torch.stack([decode_dense(acts, W_dec, None) for acts, W_dec in pieces])
        here = self.latents
        widths = [min(max(width - here.start, 0), len(here)) for width in self.widths]
        return self._placement.decode(by_width(rows.complete(), widths), self.W_dec, None, out_dtype)

    def _terms(self, x: Tensor, target: Tensor, rows: Any, l0: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if not self.training or len(self.widths) == 1:
            return super()._terms(x, target, rows, l0)
        # The parts in the weights' dtype, as one width is decoded: twice the bytes would be read for each gradient.
        whole, further, mse = _Nested.apply(target, self.b_dec, self._parts(rows, None), self.inner_weights)
        return whole.to(rows.dtype), {"mse": mse, "further_mse": further}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, widths={self.widths}"


class MatryoshkaSAE(Nested, TopKSAE):
    """A `TopKSAE` of nested widths: its first latents reconstruct x too, without the latents behind them.

    All widths share one selection of k latents a row. In training the squared error of each width is part of the loss.
    So frequent features come to lie in front, and latents further back do not absorb them. The reconstruction of a
    width is that of the width before plus the latents between: each entry is read once, however many widths there are.

    Args:
        d_in, d_sae, k: as in `TopKSAE`.
        widths: how many of the first latents each width has, ascending; the last is d_sae. None takes a quarter of
            d_sae, and d_sae.
        inner_weights: of the squared error of each width but the last, whose weight is 1. None shares 0.5 among
            them; as published, all are 1. Larger weights bring more of the frequent features to the front, and leave
            fewer latents of the whole to single features.
        options: the other keyword arguments of `TopKSAE`.

    Raises:
        ValueError: widths that do not ascend from 1 or more to d_sae, another number of weights, a weight below 0, or
            as `TopKSAE`.
        TypeError: a width that is no int, widths or weights that are no list or tuple, or as `TopKSAE`.

    Attributes:
        widths, inner_weights: tuples.
        W_enc, W_dec, b_enc, b_dec, firing_counts, steps_since_fired: as in `TopKSAE`.

    Source: Bussmann et al. 2025, "Learning Multi-Level Features with Matryoshka Sparse Autoencoders".

    >>> model = MatryoshkaSAE(4, 16, k=2, widths=(4, 16))
    >>> len(model.reconstructions(model.encode(torch.randn(3, 4))))
    2
    """


class MatryoshkaBatchTopKSAE(Nested, BatchTopKSAE):
    """A `BatchTopKSAE` of nested widths: `MatryoshkaSAE` with one selection of k * M latents of a batch.

    That is the published selection. Rows that need more latents get more, but the widths then compete for the entries
    of a batch: on rows of a known dictionary it finds fewer atoms than `MatryoshkaSAE` (docs/training.md).

    Args:
        d_in, d_sae, k: as in `BatchTopKSAE`.
        widths, inner_weights: as in `MatryoshkaSAE`.
        options: the other keyword arguments of `BatchTopKSAE`.

    Raises:
        ValueError, TypeError: as `MatryoshkaSAE` and `BatchTopKSAE`.

    Attributes:
        widths, inner_weights: tuples; the others are those of `BatchTopKSAE`.

    Source: Bussmann et al. 2025, as `MatryoshkaSAE`.

    >>> MatryoshkaBatchTopKSAE(4, 16, k=2).loss(torch.randn(3, 4)).loss.backward()
    """


class _Nested(torch.autograd.Function):
    """(the whole reconstruction `[..., D]`, the weighted squared errors of the inner widths `[]`, that of the last
    `[]`), means over rows, in float32 at least.

    One residual is carried from width to width, and one gradient back: autograd would read and write each width's
    several times.
    """

    @staticmethod
    def forward(
        ctx: Any, target: Tensor, b_dec: Tensor, parts: Tensor, inner_weights: Sequence[float]
    ) -> tuple[Tensor, ...]:
        bias = b_dec.to(torch.promote_types(b_dec.dtype, torch.float32))
        before = target - bias
        residuals = before.new_empty(parts.shape)
        for part, residual in zip(parts, residuals):
            before = torch.sub(before, part, out=residual)
        count = max(target.shape[:-1].numel(), 1)
        squares = torch.linalg.vector_norm(residuals, dim=-1, keepdim=True).square()
        *inner, mse = (squares.flatten(1).sum(1) / count).unbind()
        further = torch.zeros_like(mse)
        for error, weight in zip(inner, inner_weights):
            further = torch.add(further, error, alpha=weight)
        ctx.dtypes, ctx.scales = (target.dtype, b_dec.dtype, parts.dtype), [2 * w / count for w in (*inner_weights, 1)]
        ctx.save_for_backward(residuals)
        ctx.set_materialize_grads(False)
        # Not the target less the last residual: numbers of x far above their reconstruction would round it.
        return sum(parts[1:], parts[0] + bias), further, mse.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, whole: Tensor | None, further: Tensor | None, mse: Tensor | None) -> tuple[Any, ...]:
        (residuals,), (target, b_dec, parts) = ctx.saved_tensors, ctx.dtypes
        pull = start = residuals.new_zeros(()).expand(residuals.shape[1:]) if whole is None else whole
        found = residuals.new_empty(residuals.shape, dtype=parts)
        for at in reversed(range(len(residuals))):
            grad = further if at < len(residuals) - 1 else mse
            if grad is not None:
                pull = torch.addcmul(pull, residuals[at], grad, value=-ctx.scales[at])
            found[at] = pull
        grad_target = (start - pull).to(target) if ctx.needs_input_grad[0] else None
        return grad_target, pull.reshape(-1, pull.shape[-1]).sum(0).to(b_dec), found, None


def by_width(rows: Rows, widths: Sequence[int]) -> Rows:
    """`(W, ..., N)`: of each row the entries from one width to the next. They lie side by side, because columns ascend
    in a row, so that the buffers stay as they are."""
    values, indices, (starts, counts), _ = rows.packed
    inner = [width for width in widths if width < rows.num_columns]
    # Of all slots before each one, those with a column below the width, of each width. One sum runs over all of them:
    # PyTorch's sums over a few long rows are slow.
    below = torch.cat([indices < width for width in inner or (0,)])
    before = torch.nn.functional.pad(below.cumsum(0), (1, 0))
    at = starts + len(indices) * torch.arange(len(inner), device=starts.device)[:, None]
    ends = before[at + counts] - before[at]
    ends = torch.cat([torch.zeros_like(counts)[None], ends, counts.expand(len(widths) - len(inner), -1)])
    cut = torch.stack([(starts + ends[:-1]).flatten(), ends.diff(dim=0).flatten()])
    return unchecked(values, indices, cut, (len(widths), *rows.shape))

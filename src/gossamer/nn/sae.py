"""Sparse autoencoders as modules."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer import sae
from gossamer._core import checks
from gossamer.rowsparse import ELL


class SAELoss(NamedTuple):
    """What `loss` returns; every tensor on the device, none of them waited for.

    Args:
        loss: `[]`, mse + l0_penalty: call `backward()` on it.
        mse: `[]`, the squared error of a row, summed over d_in, mean over rows.
        l0_penalty: `[]`, l0_coefficient times l0; 0 for TopK.
        l0: `[]`, float32, values of a row that differ from 0, mean over rows, without a gradient.
        reconstruction: `[..., d_in]`.
    """

    loss: Tensor
    mse: Tensor
    l0_penalty: Tensor
    l0: Tensor
    reconstruction: Tensor


class _SAE(torch.nn.Module):
    """Parameters with SAELens's names and layouts, and what both autoencoders share."""

    firing_counts: Tensor
    steps_since_fired: Tensor

    def __init__(self, d_in: int, d_sae: int, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        super().__init__()
        operator = f"nn.{type(self).__name__}"
        checks.positive(operator, "d_in", d_in, "It is the size of the vectors to encode.")
        checks.positive(operator, "d_sae", d_sae, "It is the number of latents.")
        checks.float_dtype(operator, "dtype", dtype, "Biases and thresholds are float32 at least in any case.")
        self.d_in, self.d_sae = d_in, d_sae
        directions = torch.randn(d_sae, d_in, device=device)
        directions = (directions / directions.norm(dim=1, keepdim=True)).to(dtype or torch.get_default_dtype())
        self.W_dec = torch.nn.Parameter(directions)
        self.W_enc = torch.nn.Parameter(directions.t().clone(memory_format=torch.contiguous_format))
        self.b_enc = torch.nn.Parameter(torch.zeros(d_sae, dtype=self._wide, device=device))
        self.b_dec = torch.nn.Parameter(torch.zeros(d_in, dtype=self._wide, device=device))
        self.register_buffer("firing_counts", torch.zeros(d_sae, dtype=torch.int64, device=device))
        self.register_buffer("steps_since_fired", torch.zeros(d_sae, dtype=torch.int64, device=device))

    @property
    def _wide(self) -> torch.dtype:
        """The dtype of biases, thresholds and statistics."""
        return torch.promote_types(self.W_dec.dtype, torch.float32)

    def encode(self, x: Tensor) -> ELL:
        """x `[..., d_in]` -> latents `(..., d_sae)`; see `sae.encode`. In training mode it counts what fires."""
        return self._encode(x)[0]

    def decode(self, rows: ELL) -> Tensor:
        """Latents `(..., d_sae)` -> reconstruction `[..., d_in]`; see `sae.decode`."""
        return sae.decode(rows, self.W_dec, self.b_dec)

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., d_in]` -> reconstruction `[..., d_in]`."""
        return self.decode(self.encode(x))

    def _encode(self, x: Tensor) -> tuple[ELL, Tensor]:
        """(latents, l0 of each row)"""
        raise NotImplementedError

    def _latents(self, x: Tensor, **options: Any) -> tuple[ELL, Tensor]:
        """The one place that encodes: where the latents are spread over processes, it is another function."""
        return sae.encode_with_l0(x, self.W_enc, self.b_enc, **options)

    def _counted(self, rows: ELL, l0: Tensor) -> tuple[ELL, Tensor]:
        if self.training:
            with torch.no_grad():
                fired = sae.count_fired(rows)
                self.firing_counts += fired
                self.steps_since_fired.copy_(torch.where(fired > 0, 0, self.steps_since_fired + 1))
        return rows, l0

    def _loss(self, x: Tensor, l0_coefficient: float) -> SAELoss:
        rows, l0 = self._encode(x)
        reconstruction = self.decode(rows)
        error = (reconstruction.to(self._wide) - x.to(self._wide)).square()
        mse, l0 = error.sum(-1).mean(), l0.mean()
        penalty = l0_coefficient * l0
        return SAELoss(mse + penalty, mse, penalty, l0.detach(), reconstruction)


class TopKSAE(_SAE):
    """A sparse autoencoder that keeps the k largest latents of each row.

    Decoder rows start with unit norm and the encoder as their transpose. Biases are made in float32 whatever `dtype`
    is, and stay so under autocast; `module.to(dtype)` converts them with all the rest, so give `dtype` here instead.

    Args:
        d_in: size of the vectors to encode.
        d_sae: number of latents.
        k: latents to keep per row.
        dtype: of the weights; None takes PyTorch's default.
        device: of the parameters.

    Raises:
        ValueError: a size below 1, or k above d_sae.
        TypeError: a size that is no int, or a dtype that is not floating.

    Attributes:
        W_enc, W_dec, b_enc, b_dec: `[d_in, d_sae]`, `[d_sae, d_in]`, `[d_sae]`, `[d_in]`. b_dec is subtracted from x
            before it is encoded.
        firing_counts: int64 `[d_sae]`, how many rows each latent fired in while training.
        steps_since_fired: int64 `[d_sae]`, for how many calls of `encode` while training each latent has been silent.

    Source: Gao et al. 2024, "Scaling and evaluating sparse autoencoders".

    >>> TopKSAE(4, 16, k=2)(torch.randn(3, 4)).shape
    torch.Size([3, 4])
    """

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        k: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_in, d_sae, dtype, device)
        checks.positive("nn.TopKSAE", "k", k, "It is the number of latents to keep per row.")
        if k > d_sae:
            raise ValueError(f"nn.TopKSAE: k must be at most d_sae = {d_sae}, got {k}.")
        self.k = k

    def _encode(self, x: Tensor) -> tuple[ELL, Tensor]:
        return self._counted(*self._latents(x, activation="topk", k=self.k, b_dec=self.b_dec))

    def loss(self, x: Tensor) -> SAELoss:
        """The reconstruction loss of x `[..., d_in]`; the L0 penalty is 0."""
        return self._loss(x, 0.0)

    def extra_repr(self) -> str:
        return f"d_in={self.d_in}, d_sae={self.d_sae}, k={self.k}"


class BatchTopKSAE(_SAE):
    """A sparse autoencoder that keeps the k * M largest latents of a batch of M rows: k on average, as rows need them.

    In training mode a batch competes for its k * M entries, and a running mean follows the smallest value that gets
    one. In evaluation mode that mean is a threshold, and what a row keeps does not depend on the others.
    Initialisation and dtypes are those of `TopKSAE`.

    Args:
        d_in: size of the vectors to encode.
        d_sae: number of latents.
        k: latents to keep per row, on average.
        threshold_rate: how much of a batch goes into the running mean. The first batch sets it.
        capacity: slots per row of the latents, as in `sae.encode`. Rows beyond it stay exact but cost as much as dense.
        dtype: of the weights; None takes PyTorch's default.
        device: of the parameters.

    Raises:
        ValueError: a size below 1, k above d_sae, or a threshold_rate outside (0, 1].
        TypeError: a size that is no int, or a dtype that is not floating.

    Attributes:
        W_enc, W_dec, b_enc, b_dec: as in `TopKSAE`.
        threshold: float32 `[]`, the running mean of the smallest value kept; 0 before the first batch. Rows that
            overflowed do not count for it.
        firing_counts, steps_since_fired: as in `TopKSAE`.

    Source: Bussmann et al. 2024, "BatchTopK Sparse Autoencoders".

    >>> BatchTopKSAE(4, 16, k=2).eval()(torch.randn(3, 4)).shape
    torch.Size([3, 4])
    """

    threshold: Tensor

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        k: int,
        *,
        threshold_rate: float = 0.01,
        capacity: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_in, d_sae, dtype, device)
        checks.positive("nn.BatchTopKSAE", "k", k, "It is the mean number of latents to keep per row.")
        if k > d_sae:
            raise ValueError(f"nn.BatchTopKSAE: k must be at most d_sae = {d_sae}, got {k}.")
        checks.number("nn.BatchTopKSAE", "threshold_rate", threshold_rate, "It is the share of one batch.")
        if threshold_rate > 1:
            raise ValueError(f"nn.BatchTopKSAE: threshold_rate must be at most 1, got {threshold_rate}.")
        if capacity is not None:
            checks.positive("nn.BatchTopKSAE", "capacity", capacity, "It is the number of slots per row.")
        self.k, self.threshold_rate, self.capacity = k, threshold_rate, capacity
        self.register_buffer("threshold", torch.zeros((), dtype=self._wide, device=device))

    def _encode(self, x: Tensor) -> tuple[ELL, Tensor]:
        chosen = {"k": self.k} if self.training else {"threshold": self.threshold}
        rows, l0 = self._latents(
            x,
            activation="batchtopk" if self.training else "jumprelu",
            b_dec=self.b_dec,
            capacity=self.capacity,
            **chosen,
        )
        if self.training:
            with torch.no_grad():
                self._follow(rows)
        return self._counted(rows, l0)

    def _follow(self, rows: ELL) -> None:
        """Moves the threshold towards the smallest value kept, without waiting for the device."""
        smallest = self._smallest(rows)
        moved = torch.where(self.threshold > 0, torch.lerp(self.threshold, smallest, self.threshold_rate), smallest)
        self.threshold.copy_(torch.where(smallest.isfinite(), moved, self.threshold))

    def _smallest(self, rows: ELL) -> Tensor:
        """[], inf where nothing is held."""
        held = (rows.values > 0) & (rows.nnz_per_row <= rows.capacity)[:, None]
        smallest = torch.where(held, rows.values, torch.inf).to(self._wide).amin() if rows.values.numel() else torch.inf
        return torch.as_tensor(smallest, dtype=self._wide, device=self.threshold.device)

    def loss(self, x: Tensor) -> SAELoss:
        """The reconstruction loss of x `[..., d_in]`; the L0 penalty is 0."""
        return self._loss(x, 0.0)

    def extra_repr(self) -> str:
        return f"d_in={self.d_in}, d_sae={self.d_sae}, k={self.k}"


class JumpReLUSAE(_SAE):
    """A sparse autoencoder that keeps latents above a threshold each latent learns.

    Thresholds are trained by straight-through estimates with a rectangle of width `bandwidth` as kernel, towards a
    small reconstruction error and a small L0. Initialisation and dtypes are those of `TopKSAE`.

    Args:
        d_in: size of the vectors to encode.
        d_sae: number of latents.
        bandwidth: width of the window around its threshold in which a latent trains it.
        l0_coefficient: what a latent that fires costs in the loss, where the squared error is summed over d_in.
        initial_threshold: of every latent.
        capacity: slots per row of the latents, as in `sae.encode`. Rows beyond it stay exact but cost as much as dense.
        dtype: of the weights; None takes PyTorch's default.
        device: of the parameters.

    Raises:
        ValueError: a size below 1, a bandwidth or initial threshold that is not above 0, or an l0_coefficient below 0.
        TypeError: a size that is no int, or a dtype that is not floating.

    Attributes:
        W_enc, W_dec, b_enc, b_dec: `[d_in, d_sae]`, `[d_sae, d_in]`, `[d_sae]`, `[d_in]`. b_dec is not subtracted
            from x.
        log_threshold: `[d_sae]`, the parameter behind `threshold`.
        firing_counts, steps_since_fired: as in `TopKSAE`.

    Source: Rajamanoharan et al. 2024, "Jumping Ahead: Improving Reconstruction Fidelity with JumpReLU Sparse
    Autoencoders".

    >>> JumpReLUSAE(4, 16).loss(torch.randn(3, 4)).loss.backward()
    """

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        *,
        bandwidth: float = 0.001,
        l0_coefficient: float = 0.001,
        initial_threshold: float = 0.001,
        capacity: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_in, d_sae, dtype, device)
        checks.number("nn.JumpReLUSAE", "bandwidth", bandwidth, "It is the width of a window.")
        checks.number("nn.JumpReLUSAE", "initial_threshold", initial_threshold, "Its logarithm is trained.")
        checks.number("nn.JumpReLUSAE", "l0_coefficient", l0_coefficient, "0 leaves L0 alone.", zero=True)
        if capacity is not None:
            checks.positive("nn.JumpReLUSAE", "capacity", capacity, "It is the number of slots per row.")
        self.bandwidth, self.l0_coefficient, self.capacity = bandwidth, l0_coefficient, capacity
        start = torch.full((d_sae,), math.log(initial_threshold), dtype=self._wide, device=device)
        self.log_threshold = torch.nn.Parameter(start)

    @property
    def threshold(self) -> Tensor:
        """`[d_sae]`, above 0."""
        return self.log_threshold.exp()

    def _encode(self, x: Tensor) -> tuple[ELL, Tensor]:
        return self._counted(
            *self._latents(
                x,
                activation="jumprelu",
                threshold=self.threshold,
                bandwidth=self.bandwidth,
                capacity=self.capacity,
            )
        )

    def loss(self, x: Tensor) -> SAELoss:
        """Reconstruction loss plus L0 penalty of x `[..., d_in]`."""
        return self._loss(x, self.l0_coefficient)

    def extra_repr(self) -> str:
        return f"d_in={self.d_in}, d_sae={self.d_sae}, bandwidth={self.bandwidth}, l0_coefficient={self.l0_coefficient}"

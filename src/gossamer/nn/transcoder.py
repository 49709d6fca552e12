"""Transcoders as modules."""

from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.nn.jumprelu import JumpReLUSAE
from gossamer.nn.sae import BatchTopKSAE, Reviving, SAELoss, SparseAutoencoder
from gossamer.rowsparse import Rows


class Transcoding(SparseAutoencoder):
    """The base of autoencoders whose target is not x: before a class that selects latents among the bases."""

    W_skip: torch.nn.Parameter | None

    def __init__(self, d_in: int, d_out: int, d_sae: int, *args: Any, skip: bool = False, **options: Any) -> None:
        checks.positive(f"nn.{type(self).__name__}", "d_out", d_out, "It is the size of the vectors to reconstruct.")
        super().__init__(d_in, d_sae, *args, **options)
        self.d_out = d_out
        self.W_dec = torch.nn.Parameter(self.W_dec.new_zeros(d_sae, d_out))
        self.register_parameter("b_dec", torch.nn.Parameter(self.b_enc.new_zeros(d_out)))
        # Registered where there is none, too: other code takes a module apart by its parameters.
        self.register_parameter("W_skip", torch.nn.Parameter(self.W_dec.new_zeros(d_out, d_in)) if skip else None)

    @property
    def _centre(self) -> None:
        """Nothing: b_dec is of the other space."""

    def loss(self, x: Tensor, y: Tensor) -> SAELoss:
        """The loss of y `[..., d_out]` reconstructed from x `[..., d_in]`.

        Raises:
            TypeError: y is no floating tensor.
            ValueError: y has another shape.
        """
        operator = f"nn.{type(self).__name__}"
        checks.floating(operator, x=x, y=y)
        checks.shape(operator, "y", y, (*x.shape[:-1], self.d_out), "[..., d_out]", "with the rows of x")
        checks.same_device(operator, "x", x.device, y=y)
        return self._loss(x, y)

    def _output(self, x: Tensor, rows: Rows | Tensor) -> Tensor:
        out = super()._output(x, rows)
        return out if self.W_skip is None else out + torch.nn.functional.linear(x, self.W_skip)

    def extra_repr(self) -> str:
        skip = "" if self.W_skip is None else ", skip=True"
        return super().extra_repr().replace(", d_sae=", f", d_out={self.d_out}, d_sae=", 1) + skip


class Transcoder(Transcoding, Reviving):  # type: ignore[misc]
    """Reconstructs one thing from another through the k largest latents of each row: an MLP's output from its input.

    `forward` takes x `[..., d_in]` to y `[..., d_out]`; `decode` leaves the skip out. Encoder columns start with unit
    norm and the decoder at 0, so that training begins at b_dec and not at noise. Dtypes are those of `TopKSAE`.

    Args:
        d_in, d_sae, k: as in `TopKSAE`.
        d_out: size of the vectors to reconstruct.
        skip: whether x also reaches the output by a matrix, W_skip, beside the latents.
        options: the other keyword arguments of `TopKSAE`.

    Raises:
        ValueError: a size below 1, k above d_sae, or an aux_coefficient below 0.
        TypeError: a size that is no int, or a dtype that is not floating.

    Attributes:
        W_enc, W_dec, b_enc, b_dec: `[d_in, d_sae]`, `[d_sae, d_out]`, `[d_sae]`, `[d_out]`. Nothing is subtracted from
            x before it is encoded.
        W_skip: `[d_out, d_in]`, 0 at the start, or None.
        firing_counts, steps_since_fired: as in `TopKSAE`.

    Source: Dunefsky et al. 2024, "Transcoders Find Interpretable LLM Feature Circuits"; Paulo et al. 2025,
    "Transcoders Beat Sparse Autoencoders for Interpretability" (skip), and EleutherAI's sparsify for the start.

    >>> Transcoder(4, 6, 16, k=2)(torch.randn(3, 4)).shape
    torch.Size([3, 6])
    """

    def __init__(self, d_in: int, d_out: int, d_sae: int, k: int, *, skip: bool = False, **options: Any) -> None:
        super().__init__(d_in, d_out, d_sae, k, skip=skip, **options)


class BatchTopKTranscoder(Transcoding, BatchTopKSAE):  # type: ignore[misc]
    """A `Transcoder` that selects latents as `BatchTopKSAE` does: k on average over a batch.

    Args:
        d_in, d_out, d_sae, k, skip: as in `Transcoder`.
        options: the other keyword arguments of `BatchTopKSAE`.

    Raises:
        ValueError, TypeError: as `Transcoder` and `BatchTopKSAE`.

    Attributes:
        W_enc, W_dec, b_enc, b_dec, W_skip: as in `Transcoder`; the others are those of `BatchTopKSAE`.

    Source: Bussmann et al. 2024 for the selection, and that of `Transcoder`.

    >>> BatchTopKTranscoder(4, 6, 16, k=2).loss(torch.randn(3, 4), torch.randn(3, 6)).loss.backward()
    """

    def __init__(self, d_in: int, d_out: int, d_sae: int, k: int, *, skip: bool = False, **options: Any) -> None:
        super().__init__(d_in, d_out, d_sae, k, skip=skip, **options)


class JumpReLUTranscoder(Transcoding, JumpReLUSAE):  # type: ignore[misc]
    """A `Transcoder` whose latents have thresholds that they learn, as those of `JumpReLUSAE`.

    L0 follows from `l0_coefficient`: `target_l0` alone steers the L0 of an autoencoder, by the scale of x, and a
    target has another.

    Args:
        d_in, d_out, d_sae, skip: as in `Transcoder`.
        options: the keyword arguments of `JumpReLUSAE`.

    Raises:
        ValueError: a `target_l0` without an `l0_coefficient`, or as `Transcoder` and `JumpReLUSAE`.
        TypeError: as `Transcoder` and `JumpReLUSAE`.

    Attributes:
        W_enc, W_dec, b_enc, b_dec, W_skip: as in `Transcoder`; the others are those of `JumpReLUSAE`.

    Source: Rajamanoharan et al. 2024 for the thresholds, and that of `Transcoder`.

    >>> JumpReLUTranscoder(4, 6, 16).loss(torch.randn(3, 4), torch.randn(3, 6)).loss.backward()
    """

    def __init__(self, d_in: int, d_out: int, d_sae: int, *, skip: bool = False, **options: Any) -> None:
        if options.get("target_l0") is not None and options.get("l0_coefficient") is None:
            raise ValueError(
                f"nn.JumpReLUTranscoder: its L0 is not steered, got target_l0 = {options['target_l0']}. "
                'Give l0_coefficient in its place, or both with penalty="quadratic".'
            )
        super().__init__(d_in, d_out, d_sae, skip=skip, **options)

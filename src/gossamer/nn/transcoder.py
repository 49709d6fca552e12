"""Transcoders as modules."""

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.nn.sae import Reviving, SAELoss
from gossamer.rowsparse import Rows


class Transcoder(Reviving):
    """Reconstructs one thing from another through the k largest latents of each row: an MLP's output from its input.

    Encoder columns start with unit norm and the decoder at 0, so that training begins at b_dec and not at noise.
    Dtypes are those of `TopKSAE`.

    Args:
        d_in: size of the vectors to encode.
        d_out: size of the vectors to reconstruct.
        d_sae: number of latents.
        k: latents to keep per row.
        skip: whether x also reaches the output by a matrix, W_skip, beside the latents.
        aux_coefficient, aux_k, dead_after: as in `TopKSAE`; aux_k None is half of d_out.
        dtype: of the weights; None takes PyTorch's default.
        device: of the parameters.

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

    W_skip: torch.nn.Parameter | None

    def __init__(
        self,
        d_in: int,
        d_out: int,
        d_sae: int,
        k: int,
        *,
        skip: bool = False,
        aux_coefficient: float = 1 / 32,
        aux_k: int | None = None,
        dead_after: int = 2500,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        checks.positive("nn.Transcoder", "d_out", d_out, "It is the size of the vectors to reconstruct.")
        super().__init__(d_in, d_sae, dtype, device, d_out)
        self._set_k(k, aux_coefficient, aux_k, dead_after)
        self.d_out = d_out
        # Registered where there is none, too: other code takes a module apart by its parameters.
        self.register_parameter("W_skip", torch.nn.Parameter(self.W_dec.new_zeros(d_out, d_in)) if skip else None)

    @property
    def _centre(self) -> None:
        """Nothing: b_dec is of the other space."""

    def decode(self, rows: Rows) -> Tensor:
        """Latents `(..., d_sae)` -> their sum of decoder rows and b_dec, `[..., d_out]`, without the skip."""
        return super().decode(rows)

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., d_in]` -> reconstruction of y `[..., d_out]`."""
        return super().forward(x)

    def loss(self, x: Tensor, y: Tensor) -> SAELoss:  # type: ignore[override]
        """The loss of y `[..., d_out]` reconstructed from x `[..., d_in]`; the L0 penalty is 0.

        Raises:
            TypeError: y is no floating tensor.
            ValueError: y has another shape.
        """
        checks.floating("nn.Transcoder", x=x, y=y)
        checks.shape("nn.Transcoder", "y", y, (*x.shape[:-1], self.d_out), "[..., d_out]", "with the rows of x")
        checks.same_device("nn.Transcoder", "x", x.device, y=y)
        return self._loss(x, y)

    def _output(self, x: Tensor, rows: Rows | Tensor) -> Tensor:
        out = super()._output(x, rows)
        return out if self.W_skip is None else out + torch.nn.functional.linear(x, self.W_skip)

    def extra_repr(self) -> str:
        skip = "" if self.W_skip is None else ", skip=True"
        return f"d_in={self.d_in}, d_out={self.d_out}, d_sae={self.d_sae}, k={self.k}{skip}{self._placement}"

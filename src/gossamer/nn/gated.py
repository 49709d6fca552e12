"""Autoencoders that decide apart from each other whether a latent fires and how much."""

from typing import Any

import torch
from torch import Tensor

from gossamer import gemm
from gossamer.nn.sae import mean
from gossamer.nn.standard import Penalised
from gossamer.sae.encode_dense import encode_dense
from gossamer.sae.squared_error import squared_error


class GatedSAE(Penalised):
    """A sparse autoencoder whose latents have a gate and a magnitude, with encoder columns in common.

    With z = (x - b_dec) @ W_enc a latent fires where its gate z + b_gate is above 0, and its value is
    relu(z * exp(r_mag) + b_mag). That is a JumpReLU with thresholds b_mag - exp(r_mag) * b_gate, and is computed so.
    The L1 penalty is on the gates, and does not shrink values. A gate learns by a second reconstruction, from
    relu(z + b_gate) with a decoder that this error does not train. Training encodes twice.

    The penalty weighs gates with the norms of decoder rows, and its gradient reaches the gates alone: as if the norms
    were held at 1. Initialisation and dtypes are those of `StandardSAE`.

    Args:
        d_in, d_sae, dead_after, dtype, device: as in `StandardSAE`.
        l1_coefficient: as in `StandardSAE`, but None is 1.5.

    Raises:
        ValueError, TypeError: as `StandardSAE`.

    Attributes:
        W_enc, W_dec, b_dec, firing_counts, steps_since_fired, capacity: as in `StandardSAE`.
        b_gate, b_mag, r_mag: `[d_sae]`, 0 at the start.

    Source: Rajamanoharan et al. 2024, "Improving Dictionary Learning with Gated Sparse Autoencoders".

    >>> GatedSAE(4, 16).loss(torch.randn(32, 4)).further_mse.backward()
    """

    b_gate: torch.nn.Parameter
    b_mag: torch.nn.Parameter
    r_mag: torch.nn.Parameter

    usual_l1_coefficient = 1.5

    def __init__(self, d_in: int, d_sae: int, **options: Any) -> None:
        super().__init__(d_in, d_sae, **options)
        self.b_gate = self._parameters.pop("b_enc")  # type: ignore[assignment]
        self.b_mag, self.r_mag = (torch.nn.Parameter(torch.zeros_like(self.b_gate)) for _ in range(2))

    @property
    def threshold(self) -> Tensor:
        """`[d_sae]`, above which a latent fires."""
        return self.b_mag - self.r_mag.exp() * self.b_gate

    @property
    def _encoder(self) -> tuple[Tensor, Tensor]:
        return self.W_enc * self.r_mag.exp().to(self.W_enc.dtype), self.b_mag

    def _options(self) -> dict[str, Any]:
        return {"activation": gemm.JumpReLU(self.threshold.detach()), "b_dec": self.b_dec}

    def _terms(self, x: Tensor, target: Tensor, rows: Any, l0: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        reconstruction = self._output(x, rows)
        if not self.training:
            return reconstruction, {}
        options: dict[str, Any] = {"activation": "relu", "b_dec": self.b_dec}
        if isinstance(rows, Tensor):
            gates: Any = encode_dense(x, self.W_enc, self.b_gate, **options)[0]
        else:
            gates, _ = self._placement.encode(x, self.W_enc, self.b_gate, capacity=self._slots, **options)
        error = squared_error(target, self._decoded(gates, self.W_dec.detach(), self._output_bias.detach()))
        norms = self._decoder_norms(self.W_dec.detach())
        return reconstruction, {"l0_penalty": self._l1(gates, norms), "further_mse": mean(error)}

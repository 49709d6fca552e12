"""Autoencoders made sparse by an L1 penalty."""

from typing import Any

import torch
from torch import Tensor

from gossamer import gemm
from gossamer._core import checks
from gossamer.nn.sae import SAELoss, SparseAutoencoder, mean
from gossamer.rowsparse import Rows, matmul
from gossamer.sae.encode_dense import encode_dense
from gossamer.sae.squared_error import squared_error


class Penalised(SparseAutoencoder):
    """The base of autoencoders with an L1 penalty: their settings, and the penalty."""

    usual_l1_coefficient: float

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        *,
        l1_coefficient: float | None = None,
        dead_after: int = 2500,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_in, d_sae, dtype, device)
        if l1_coefficient is None:
            l1_coefficient = self.usual_l1_coefficient
        operator = f"nn.{type(self).__name__}"
        checks.number(operator, "l1_coefficient", l1_coefficient, "0 leaves the penalty out.", zero=True)
        checks.positive(operator, "dead_after", dead_after, "It is a number of calls of encode.")
        self.l1_coefficient, self.dead_after = l1_coefficient, dead_after
        with torch.no_grad():
            # Half of all latents fire at first: at full length they would explain x many times over.
            self.W_enc.mul_(0.1)
            self.W_dec.mul_(0.1)

    def _l1(self, rows: Rows | Tensor, norms: Tensor) -> Tensor:
        """The sum of the values of a row times norms `[latents]`, mean over rows, coefficient included."""
        if isinstance(rows, Tensor):
            total = (rows * norms).sum(-1)
        else:
            total = matmul(rows, norms[:, None].to(rows.dtype), out_dtype=self._wide)
        return self._placement.add_parts(self.l1_coefficient * mean(total))

    def loss(self, x: Tensor) -> SAELoss:
        """The loss of x `[..., d_in]`."""
        return self._loss(x, x)

    def extra_repr(self) -> str:
        return f"d_in={self.d_in}, d_sae={self.d_sae}, l1_coefficient={self.l1_coefficient}{self._placement}"


class StandardSAE(Penalised):
    """A sparse autoencoder with ReLU and an L1 penalty: latents above 0 are kept.

    The penalty is l1_coefficient times the sum over latents of value * norm of the decoder row. The norms are free, and
    the penalty leaves nothing to gain from them. Weights start at a tenth of those of `TopKSAE`; dtypes are the same.

    Args:
        d_in, d_sae, dead_after, dtype, device: as in `TopKSAE`.
        l1_coefficient: weight of the penalty, where the squared error is summed over d_in. It has the unit of x: for 10
            times x take 10 times as much. None is 0.6, for rows whose features have a length of about 1.

    Raises:
        ValueError: a size below 1, or an l1_coefficient below 0.
        TypeError: a size that is no int, or a dtype that is not floating.

    Attributes:
        W_enc, W_dec, b_enc, b_dec, firing_counts, steps_since_fired: as in `TopKSAE`.
        capacity: slots per row, as in `sae.encode`; None, which may be changed, takes them by earlier rows.

    Source: Bricken et al. 2023, "Towards Monosemanticity"; Conerly et al. 2024, "Update on how we train SAEs" (the
    norms in the penalty).

    >>> StandardSAE(4, 16).loss(torch.randn(32, 4)).loss.backward()
    """

    usual_l1_coefficient = 0.6

    def _options(self) -> dict[str, Any]:
        return {"activation": "relu", "b_dec": self.b_dec}

    def _terms(self, x: Tensor, target: Tensor, rows: Any, l0: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._output(x, rows), {"l0_penalty": self._l1(rows, self._decoder_norms(self.W_dec))}


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

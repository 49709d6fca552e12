"""Autoencoders made sparse by an L1 penalty."""

from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.nn.sae import SAELoss, SparseAutoencoder, mean
from gossamer.rowsparse import Rows, matmul


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
        d_in: size of the vectors to encode.
        d_sae: number of latents.
        l1_coefficient: weight of the penalty, where the squared error is summed over d_in. It has the unit of x: for 10
            times x take 10 times as much. None is 0.6, for rows whose features have a length of about 1.
        dead_after: for how many calls of `encode` in training a latent is silent before `dead()` names it.
        dtype: of the weights; None takes PyTorch's default.
        device: of the parameters.

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

"""Sparse autoencoders whose latents have thresholds that they learn."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from gossamer import gemm, sae
from gossamer._core import checks
from gossamer._core.recompute import recomputed, remembered
from gossamer.nn import _recipe
from gossamer.nn.sae import SAELoss, SparseAutoencoder, mean
from gossamer.rowsparse import Rows

Result = TypeVar("Result")
_BIASES = ("b_enc", "b_dec")


class JumpReLUSAE(SparseAutoencoder):
    """A sparse autoencoder that keeps latents above a threshold each latent learns.

    Thresholds are trained by straight-through estimates with a rectangle of width `bandwidth` as kernel, towards a
    small reconstruction error and a small L0. Initialisation and dtypes are those of `TopKSAE`.

    With a `target_l0` the module finds everything else. The first call of `loss` in training, or `initialize_`, looks
    at x. It finds the power of 2 that `loss` multiplies x with, so that one bandwidth and one learning rate fit any
    data, and starts thresholds where L0 is several times its target. Weights, biases, thresholds and latents are in
    units of x all the same. Then L0 comes down in `warm_up` calls and is held at the target from one call to the next,
    on the device. Without a target every number is yours, and nothing
    moves but by the optimizer.

    Three published penalties are `penalty="step"` (Rajamanoharan et al. 2024), `penalty="quadratic"` (Gemma Scope 2)
    and `penalty="tanh", ste_to_input=True, pre_act_coefficient=3e-6` (Conerly et al. 2025).

    Args:
        d_in, d_sae, dead_after, dtype, device: as in `TopKSAE`.
        target_l0: latents a row should have, on average. With an `l0_coefficient` it is that of `"quadratic"` alone,
            and nothing is steered.
        bandwidth: width of the window around its threshold in which a latent trains it; None is 0.05 with a target, in
            units of the scaled x, and 0.001 without.
        l0_coefficient: weight of the penalty in the loss, where the squared error is summed over d_in; None is steered
            with a target, and 0.001 without.
        penalty: `"step"` is L0; `"quadratic"` 2 / target_l0 * (L0 - target_l0)^2 of each row; `"tanh"` the sum over
            latents of tanh(tanh_scale * value * norm of its decoder row).
        warm_up: in how many calls of `loss` L0 comes down to its target and the penalty rises.
        tanh_scale: for `"tanh"`.
        ste_to_input: whether the straight-through estimate reaches the pre-activations too, not the threshold alone.
        pre_act_coefficient: weight of a loss that pulls dead latents to their thresholds: the sum over them of
            relu(threshold - pre-activation) * norm of the decoder row, among the 2 * d_in that were silent longest.
        initial_threshold: of every latent; None takes it from the data with a target, and is 0.001 without. With a
            target it is in units of the scaled x.
        capacity: slots per row of the latents, as in `sae.encode`. Rows beyond it stay exact but cost as much as dense.
            With None `loss` and `forward` take up to twice the usual number where earlier rows would have filled that.

    Raises:
        ValueError: a size below 1, a bandwidth, scale or initial threshold that is not above 0, a coefficient below 0,
            an unknown penalty, `"quadratic"` without a target, or a target beside a coefficient of another penalty.
        TypeError: a size that is no int, or a dtype that is not floating.

    Attributes:
        W_enc, W_dec, b_enc, b_dec: `[d_in, d_sae]`, `[d_sae, d_in]`, `[d_sae]`, `[d_in]`, in units of x. b_dec is not
            subtracted from x.
        threshold: `[d_sae]`, above 0, in units of x.
        log_threshold: `[d_sae]`, the parameter behind `threshold`.
        scaled_b_enc, scaled_b_dec: the parameters behind b_enc and b_dec, `input_scale` times as large; there only if
            L0 is steered. An optimizer changes biases by steps of one size: these fit it in any units of x.
        input_scale: float32 `[]`, the power of 2 with which `loss` multiplies x; there only if L0 is steered.
        steering: float32 `[3]`, likewise: calls of `loss` (-1 before `initialize_`), the logarithm of a factor on all
            thresholds, L0 of the last call.
        firing_counts, steps_since_fired: as in `TopKSAE`.

    Source: Rajamanoharan et al. 2024, "Jumping Ahead: Improving Reconstruction Fidelity with JumpReLU Sparse
    Autoencoders"; Google DeepMind 2025, "Gemma Scope 2"; Conerly et al. 2025, "Dictionary Learning Optimization
    Techniques". How L0 is steered is new.

    >>> JumpReLUSAE(4, 16, target_l0=2).loss(torch.randn(32, 4)).loss.backward()
    """

    _wide_tensors = ("log_threshold", "input_scale", "steering")
    scaled_b_enc: Tensor
    scaled_b_dec: Tensor
    input_scale: Tensor
    steering: Tensor

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        *,
        target_l0: float | None = None,
        bandwidth: float | None = None,
        l0_coefficient: float | None = None,
        penalty: str = "step",
        warm_up: int = 300,
        tanh_scale: float = 4.0,
        ste_to_input: bool = False,
        pre_act_coefficient: float = 0.0,
        dead_after: int = 2500,
        initial_threshold: float | None = None,
        capacity: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_in, d_sae, dtype, device)
        self.target_l0, self.l0_coefficient, self.penalty = target_l0, l0_coefficient, penalty
        self._check_target()
        found = _recipe.BANDWIDTH if self.steered else 0.001
        self.bandwidth = found if bandwidth is None else bandwidth
        if not self.steered and l0_coefficient is None:
            self.l0_coefficient = 0.001
        self.initial_threshold = 0.001 if initial_threshold is None and not self.steered else initial_threshold
        self.warm_up, self.tanh_scale, self.capacity = warm_up, tanh_scale, capacity
        self.ste_to_input, self.pre_act_coefficient, self.dead_after = ste_to_input, pre_act_coefficient, dead_after
        self._check_numbers()
        start = math.log(self.initial_threshold or 1.0)
        self.log_threshold = torch.nn.Parameter(torch.full((d_sae,), start, dtype=self._wide, device=device))
        self._is_fresh = self.steered
        self._known_scale: float | None = 1.0
        if self.steered:
            for name in _BIASES:
                self.register_parameter(f"scaled_{name}", self._parameters.pop(name))
            self.register_buffer("input_scale", torch.ones((), dtype=self._wide, device=device))
            self.register_buffer("steering", _recipe.fresh(self._wide, device))

    def _check_target(self) -> None:
        operator = f"nn.{type(self).__name__}"
        if self.penalty not in ("step", "quadratic", "tanh"):
            raise ValueError(f'{operator}: penalty must be "step", "quadratic" or "tanh", got {self.penalty!r}.')
        if self.target_l0 is None:
            if self.penalty == "quadratic":
                raise ValueError(f'{operator}: penalty="quadratic" needs a target_l0, got None.')
            return
        checks.number(operator, "target_l0", self.target_l0, "It is the number of latents a row should have.")
        if self.target_l0 > self.d_sae:
            raise ValueError(f"{operator}: target_l0 must be at most d_sae = {self.d_sae}, got {self.target_l0}.")
        if self.l0_coefficient is not None and self.penalty != "quadratic":
            raise ValueError(
                f"{operator}: with a target_l0 the l0_coefficient of penalty={self.penalty!r} is steered, got "
                f"{self.l0_coefficient}. Leave out one of the two."
            )

    def _check_numbers(self) -> None:
        operator = f"nn.{type(self).__name__}"
        checks.number(operator, "bandwidth", self.bandwidth, "It is the width of a window.")
        if self.initial_threshold is not None:
            checks.number(operator, "initial_threshold", self.initial_threshold, "Its logarithm is trained.")
        if self.l0_coefficient is not None:
            checks.number(operator, "l0_coefficient", self.l0_coefficient, "0 leaves L0 alone.", zero=True)
        checks.positive(operator, "warm_up", self.warm_up, "It is a number of calls of loss.")
        checks.number(operator, "tanh_scale", self.tanh_scale, "It is the factor on values.")
        checks.number(operator, "pre_act_coefficient", self.pre_act_coefficient, "0 leaves it out.", zero=True)
        checks.positive(operator, "dead_after", self.dead_after, "It is a number of calls of encode.")
        if self.capacity is not None:
            checks.positive(operator, "capacity", self.capacity, "It is the number of slots per row.")

    @property
    def steered(self) -> bool:
        """Whether L0 follows `target_l0` by itself."""
        return self.target_l0 is not None and self.l0_coefficient is None

    @property
    def is_fresh(self) -> bool:
        """Whether `loss` will call `initialize_` before it trains for the first time."""
        return self._is_fresh

    @property
    def b_enc(self) -> Tensor:  # type: ignore[override]
        """`[d_sae]`, in units of x: of a steered module `scaled_b_enc / input_scale`, which rounds nothing."""
        return self._bias("b_enc")

    @property
    def b_dec(self) -> Tensor:  # type: ignore[override]
        """`[d_in]`, likewise."""
        return self._bias("b_dec")

    def _bias(self, name: str) -> Tensor:
        own = self._parameters.get(name)
        return self._unscaled(getattr(self, f"scaled_{name}")) if own is None else own

    @property
    def threshold(self) -> Tensor:
        """`[d_sae]`, above 0, in units of x."""
        return self._unscaled(self._scaled_threshold)

    @property
    def _scaled_threshold(self) -> Tensor:
        if not self.steered:
            return self.log_threshold.exp()
        return (self.log_threshold + self.steering[_recipe.FACTOR]).exp()

    @property
    def _encoder(self) -> tuple[Tensor, Tensor]:
        return self.W_enc, self.scaled_b_enc if self.steered else self.b_enc

    @property
    def _output_bias(self) -> Tensor:
        return self.scaled_b_dec if self.steered else self.b_dec

    def encode(self, x: Tensor) -> Rows:
        """x `[..., d_in]` -> latents `(..., d_sae)`; see `sae.encode`. In training mode it counts firings."""
        self._check(x)
        return self._as_first(lambda: self._encode_in_units_of_x(x))

    def _encode_in_units_of_x(self, x: Tensor) -> Rows:
        activation = gemm.JumpReLU(self.threshold, self.bandwidth / self._scale_on_host(), self.ste_to_input)
        options = {"activation": activation, "capacity": self.capacity}
        return self._counted(self._placement.encode(x, self.W_enc, self.b_enc, **options))[0]

    def _scale_on_host(self) -> float:
        """`input_scale`, where the bandwidth in units of x matters: for gradients. It waits for the device once."""
        if not torch.is_grad_enabled():
            return 1.0
        if self._known_scale is None:
            where = "torch.compile" if torch.compiler.is_compiling() else "CUDA-graph capture"
            if where == "torch.compile" or checks.capturing():
                raise RuntimeError(
                    f"nn.JumpReLUSAE: under {where} encode with gradients needs the scale of x on the host, which has "
                    "not read it yet. Call model.encode(x) once before."
                )
            self._known_scale = float(self.input_scale)
        return self._known_scale

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., d_in]` -> reconstruction `[..., d_in]`."""
        return self._as_first(lambda: self._unscaled(super(JumpReLUSAE, self).forward(self._scaled(x))))

    def loss(self, x: Tensor) -> SAELoss:
        """Reconstruction loss plus penalties of x `[..., d_in]`, in units of `input_scale * x`; the reconstruction is
        of x itself."""
        self._check(x)
        # The first run of a checkpoint has steered; its second run must not.
        follows = self.training and self.steered and not recomputed()
        if follows:
            if self.is_fresh and x.numel():
                self.initialize_(x)
            with torch.no_grad():
                self.steering.copy_(_recipe.advanced(self.steering, *self._course))
        scaled = self._scaled(x)
        found = self._as_first(lambda: self._loss(scaled, scaled))
        if follows:
            with torch.no_grad():
                l0 = self.steering[_recipe.L0]
                l0.copy_(self._of_all_rows(found.l0 if x.numel() else l0, mean=True))
        if not self.steered:
            return found
        # Not by `_replace`, whose result PyTorch 2.11 cannot return from a compiled region.
        return SAELoss(*found[:4], self._unscaled(found.reconstruction), *found[5:])

    @torch.no_grad()
    def initialize_(self, x: Tensor) -> None:
        """Sets b_dec to the geometric median of x `[..., d_in]`, a sample of the rows to reconstruct. If L0 is
        steered, it also sets input_scale, b_enc and thresholds: give 1,000 rows or more.

        Raises:
            ValueError: x has another last dimension than b_dec, no row, or NaN or Inf (which nobody can see under
                `torch.compile`: call it before).

        Source: Bricken et al. 2023, "Towards Monosemanticity", on initialisation.
        """
        if not self.steered:
            super().initialize_(x)
            return
        for name, start in self.begin_(self.W_enc, self.measured(x, self.W_enc, self.W_dec)).items():
            self.get_parameter(name).copy_(start)

    def measured(self, x: Tensor, W_enc: Tensor, W_dec: Tensor) -> _recipe.Sample:
        """Where training of these weights starts, by a sample x `[..., d_in]`."""
        return _recipe.measured(self._sample(x), W_enc, W_dec, self._course[1] / self.d_sae, self._placement.add_parts)

    def begin_(self, W_enc: Tensor, sample: _recipe.Sample) -> dict[str, Tensor]:
        """Takes the scale from a sample, and returns the values that parameters start with, which may be slices."""
        checks.finite_start("nn.JumpReLUSAE", sample.size)
        scale = _recipe.input_scale(sample.size, self.d_in)
        self.input_scale.copy_(scale)
        self._known_scale = None
        self.steering.copy_(_recipe.begun(self.steering))
        self._is_fresh = False
        thresholds = (sample.thresholds * sample.gain * scale).clamp(min=_recipe.LEAST_THRESHOLD)
        if self.initial_threshold is not None:
            thresholds = torch.full_like(thresholds, self.initial_threshold)
        b_dec, W_enc = sample.centre * scale, (W_enc.detach() * sample.gain).to(W_enc.dtype)
        b_enc = -(b_dec @ W_enc.to(b_dec.dtype))
        biases = {"scaled_b_enc": b_enc, "scaled_b_dec": b_dec}
        return {"W_enc": W_enc, **biases, "log_threshold": thresholds.log()}

    @property
    def _course(self) -> tuple[float, float, int]:
        """(target, where L0 starts, calls from there to the target)"""
        assert self.target_l0 is not None
        start = min(_recipe.START * self.target_l0, self.d_sae / 4)
        return self.target_l0, max(start, self.target_l0), self.warm_up

    def _as_first(self, call: Callable[[], Result]) -> Result:
        """call(), with the steering of the first run where a checkpoint computes again."""
        if not self.steered or torch.compiler.is_compiling():
            return call()
        now = self.steering
        then = remembered(self, lambda: now, lost=self._lost, keep=torch.clone)
        if then is now:
            return call()
        self.steering = then
        try:
            return call()
        finally:
            self.steering = now

    def _scaled(self, x: Tensor) -> Tensor:
        if not self.steered:
            return x
        # Of integers a product with the scale would make floats.
        self._check(x)
        return x * self.input_scale

    def _unscaled(self, x: Tensor) -> Tensor:
        return x / self.input_scale if self.steered else x

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in _BIASES if self.steered else ():
            # Biases in units of x come from a module that was not steered, or from a file.
            if f"{prefix}{name}" in state_dict:
                scale = state_dict.get(f"{prefix}input_scale", self.input_scale)
                bias = state_dict.pop(f"{prefix}{name}")
                state_dict[f"{prefix}scaled_{name}"] = bias * scale.to(bias.device)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if f"{prefix}steering" in state_dict:
            self.look_up_whether_fresh()
        else:
            self.go_on()

    def look_up_whether_fresh(self) -> None:
        """Reads it from the device."""
        self._known_scale = None if self.steered else 1.0
        self._is_fresh = self.steered and bool(self.steering[_recipe.CALLS] < 0)

    def go_on(self) -> None:
        """From parameters that come from elsewhere: the next call finds L0 at its target, and looks at no data."""
        self._is_fresh = False
        if self.steered and self.steering[_recipe.CALLS] < 0:
            self.steering.copy_(_recipe.begun(self.steering))
            self.steering[_recipe.CALLS] = self.warm_up

    def _options(self) -> dict[str, Any]:
        return {"activation": gemm.JumpReLU(self._scaled_threshold, self.bandwidth, self.ste_to_input)}

    def _terms(self, x: Tensor, target: Tensor, rows: Rows | Tensor, l0: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._output(x, rows), {"l0_penalty": self._penalty(rows, l0)}

    def _penalty(self, rows: Rows | Tensor, l0: Tensor) -> Tensor:
        target, weight = self._aim()
        if self.penalty == "quadratic":
            l0 = 2 / target * (l0 - target).square()
        elif self.penalty == "tanh":
            scale = self.tanh_scale * self._decoder_norms(self.W_dec)
            l0 = (rows * scale).tanh().sum(-1) if isinstance(rows, Tensor) else sae.tanh_l0(rows, scale)
            # L0 is that of all latents; this sum is over those here.
            return self._placement.add_parts(weight * mean(l0))
        return weight * mean(l0)

    def _aim(self) -> tuple[Any, Any]:
        """(the L0 that the quadratic penalty aims at, the weight of the penalty)"""
        if not self.steered:
            return self.target_l0, self.l0_coefficient
        assert self.target_l0 is not None
        calls, factor, _ = self.steering.unbind()
        given = (self.d_in, self.target_l0, self.warm_up, self.ste_to_input)
        if self.penalty != "quadratic":
            return None, _recipe.weight(self.steering, *given)
        # At its aim it has no slope, so that a weight would change nothing: the aim moves.
        aim = _recipe.wanted(calls, *self._course) * (-factor).clamp(-0.5, 0.5).exp()
        return aim, _recipe.weight(torch.stack([calls, torch.zeros_like(factor)]), *given)

    def _dead_loss(self, x: Tensor, target: Tensor, reconstruction: Tensor) -> Tensor | None:
        if not self.pre_act_coefficient:
            return None
        x = self._placement.copied(x)
        which, dead = remembered(self, lambda: self._longest_silent(2 * self.d_in), lost=self._lost)
        pre = x @ self.W_enc.index_select(1, which).to(x.dtype) + self._encoder[1].index_select(0, which)
        norms = self._decoder_norms(self.W_dec.index_select(0, which))
        below = (self._scaled_threshold.index_select(0, which) - pre).relu() * norms
        return self._placement.add_parts(self.pre_act_coefficient * mean(torch.where(dead, below, 0).sum(-1)))

    def extra_repr(self) -> str:
        shown = f"bandwidth={self.bandwidth}, l0_coefficient={self.l0_coefficient}"
        if self.steered:
            shown = f"target_l0={self.target_l0:g}, penalty={self.penalty!r}"
        return f"d_in={self.d_in}, d_sae={self.d_sae}, {shown}{self._placement}"

"""The state of an adaptive rule as buffers and parameters of a module: it moves, is saved and is loaded with it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from gossamer import attention
from gossamer.nn._wide_tensors import WideTensors

HIDDEN = 32
"""Units of a new network of the learned rule."""


class AdaptiveRule(WideTensors):
    """An `attention.AdaptiveK` whose tensors are a module's own, and stay wide if the module is cast to 16 bits.

    Args:
        rule: an `attention.AdaptiveK`, whose tensors are copied, or the name of a rule.
        k_min, k_base, k_max: bounds for a rule that is named.
        device: where the tensors are made; None for where those of `rule` are.

    Attributes:
        mean: `[]`, for `"variance"` a buffer, the usual variance; for `"learned"` a parameter, the output's bias.
        predictor: the parameter `[hidden, 5]` of `"learned"`. A new one gives every query k_base keys.
        calibrated: whether mean is known. That of a rule `"variance"` by name is not, until `calibrate` finds it, or a
            state_dict that has one is loaded; it is NaN until then.

    A state_dict without mean or predictor, such as a published one, leaves them as they are, also where it is loaded
    strictly.
    """

    _wide_tensors = ("mean", "predictor")
    mean: Tensor | None
    predictor: Tensor | None

    def __init__(
        self,
        rule: attention.AdaptiveK | str,
        k_min: int,
        k_base: int,
        k_max: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.calibrated = not (isinstance(rule, str) and rule == "variance")
        if isinstance(rule, str):
            rule = _named(rule, k_min, k_base, k_max)
        self.rule, self.temperature = rule.rule, rule.temperature
        self.k_min, self.k_base, self.k_max = rule.k_min, rule.k_base, rule.k_max
        mean, predictor = (
            None if t is None else t.detach().to(device or t.device, copy=True) for t in (rule.mean, rule.predictor)
        )
        mean = None if mean is None else mean.reshape(())
        if self.rule == "learned":
            assert mean is not None and predictor is not None
            self.mean, self.predictor = nn.Parameter(mean), nn.Parameter(predictor)
        else:
            self.register_buffer("mean", mean)
            self.predictor = None

    def known(self) -> attention.AdaptiveK:
        """The rule, with these tensors themselves, or in float32 those of a module in float64."""
        bounds = (self.k_min, self.k_base, self.k_max)
        tensors = (None if tensor is None else tensor.float() for tensor in (self.mean, self.predictor))
        return attention.AdaptiveK(self.rule, *bounds, self.temperature, *tensors)

    @torch.no_grad()
    def move(self, variance: Tensor, share: float) -> None:
        """Moves mean by `share` to a variance `[]`, or to it if none is known."""
        assert self.mean is not None
        found = variance.to(self.mean)
        self.mean.copy_(torch.lerp(self.mean, found, share) if self.calibrated else found)
        self.calibrated = True

    @staticmethod
    def rename_published(state_dict: dict[str, Any], prefix: str) -> None:
        """Moves the network of the rule "learned" from the layers in which it is published to `adaptive_k`."""
        layers = [f"{prefix}topk_selector.k_predictor.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")]
        if all(name in state_dict for name in layers):
            inner, bias, outer, mean = (state_dict.pop(name) for name in layers)
            state_dict[f"{prefix}adaptive_k.predictor"] = torch.cat([inner, bias[:, None], outer.t()], 1)
            state_dict[f"{prefix}adaptive_k.mean"] = mean.reshape(())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        found = state_dict.get(f"{prefix}mean")
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing = args[2]
        missing[:] = [name for name in missing if name not in (f"{prefix}mean", f"{prefix}predictor")]
        if found is not None and self.rule == "variance":
            self.calibrated = found.is_meta or bool(found.isfinite())


def _named(rule: str, k_min: int, k_base: int, k_max: int) -> attention.AdaptiveK:
    if rule == "variance":
        return attention.AdaptiveK(rule, k_min, k_base, k_max, mean=torch.tensor(torch.nan))
    if rule == "learned":
        # The output's weights are 0 at first, so that its bias decides.
        predictor = torch.randn(HIDDEN, 5)
        predictor[:, 3:] = 0
        usual = (k_base + 0.5 - k_min) / max(k_max - k_min, 1)
        usual = min(max(usual, 1e-3), 1 - 1e-3)
        mean = torch.tensor(math.log(usual / (1 - usual)))
        return attention.AdaptiveK(rule, k_min, k_base, k_max, mean=mean, predictor=predictor)
    return attention.AdaptiveK(rule, k_min, k_base, k_max)

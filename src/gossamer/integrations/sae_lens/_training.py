"""Methods that `patch` binds to SAEs in training: packed latents from encode to decode and to the losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from sae_lens.saes.batchtopk_sae import BatchTopK, BatchTopKTrainingSAE
from sae_lens.saes.gated_sae import GatedTrainingSAE
from sae_lens.saes.jumprelu_sae import JumpReLUTrainingSAE
from sae_lens.saes.matryoshka_batchtopk_sae import MatryoshkaBatchTopKTrainingSAE
from sae_lens.saes.sae import SAE, TrainingSAE, TrainStepInput
from sae_lens.saes.standard_sae import StandardTrainingSAE
from sae_lens.saes.topk_sae import TopK, TopKTrainingSAE
from torch import Tensor

from gossamer import gemm
from gossamer import sae as operators
from gossamer.integrations.sae_lens._latents import HiddenPre, Latents, Lazy
from gossamer.nn.matryoshka import by_width
from gossamer.rowsparse import Rows, matmul
from gossamer.sae.smallest import smallest

FORWARD_PASSES = (
    TrainingSAE.training_forward_pass,
    BatchTopKTrainingSAE.training_forward_pass,
    JumpReLUTrainingSAE.training_forward_pass,
    MatryoshkaBatchTopKTrainingSAE.training_forward_pass,
)
AUX_LOSSES = tuple(
    kind.calculate_aux_loss
    for kind in (
        TopKTrainingSAE,
        JumpReLUTrainingSAE,
        MatryoshkaBatchTopKTrainingSAE,
        StandardTrainingSAE,
        GatedTrainingSAE,
    )
)


def why_not_packed(sae: Any) -> str | None:
    """Why a training SAE computes with dense latents, or None where it need not."""
    kind = type(sae)
    if kind.encode_with_hidden_pre not in ENCODERS:
        return f"{kind.__name__} has an encode_with_hidden_pre of its own"
    if kind.encode is not TrainingSAE.encode:
        return f"{kind.__name__} has an encode of its own"
    if kind.training_forward_pass not in FORWARD_PASSES:
        return f"{kind.__name__} has a training_forward_pass of its own"
    if kind.calculate_aux_loss not in AUX_LOSSES:
        return f"{kind.__name__} has a calculate_aux_loss of its own"
    if kind.encode_with_hidden_pre is TopKTrainingSAE.encode_with_hidden_pre:
        if not isinstance(sae.activation_fn, TopK | BatchTopK):
            return f"its activation is {type(sae.activation_fn).__name__}, not TopK or BatchTopK"
        if sae.activation_fn.k != int(sae.activation_fn.k):
            return f"k = {sae.activation_fn.k} is no whole number"
        if getattr(sae.cfg, "use_matryoshka_aux_loss", False):
            return "use_matryoshka_aux_loss reads the pre-activations of all latents"
    elif kind.encode_with_hidden_pre is not JumpReLUTrainingSAE.encode_with_hidden_pre:
        if not isinstance(sae.activation_fn, torch.nn.ReLU):
            return f"its activation is {type(sae.activation_fn).__name__}, not ReLU"
        if getattr(sae.cfg, "lp_norm", 1) != 1:
            return f"its penalty is an L{sae.cfg.lp_norm:g} norm, not L1"
    elif sae.cfg.jumprelu_sparsity_loss_mode not in ("step", "quadratic", "tanh"):
        return f"its {sae.cfg.jumprelu_sparsity_loss_mode} penalty is unknown"
    return None


def training_forward_pass(self: Any, step_input: TrainStepInput) -> Any:
    """The class's own, with packed latents in it."""
    return _packed_pass(self, step_input)


@torch.compiler.disable(reason="a patched SAE trains with tensors that are computed when they are read")
def _packed_pass(self: Any, step_input: TrainStepInput) -> Any:
    """Runs eager where it is called from a compiled function: no graph can hold a `Lazy`."""
    state = self.__dict__.get("_gossamer")
    if state is None:
        # A compiled function of this method has taken its place before the SAE was unpatched, and stays.
        return type(self).training_forward_pass(self, step_input)
    with state.running(1, training=True):
        output = type(self).training_forward_pass(self, step_input)
        state.record(self.W_dec.shape[0])
    return output


def encode_with_hidden_pre(self: Any, x: Tensor) -> tuple[Latents, HiddenPre]:
    """Packed latents, and pre-activations that are computed when they are read."""
    kind, b_dec = type(self), None
    if kind.process_sae_in is SAE.process_sae_in and self.cfg.apply_b_dec_to_input:
        # The operator subtracts b_dec: the gradient of b_dec alone needs none of x.
        x = self.run_time_activation_norm_fn_in(self.hook_sae_input(self.reshape_fn_in(x.to(self.dtype))))
        b_dec = self.b_dec
    else:
        x = self.process_sae_in(x)
    return ENCODERS[kind.encode_with_hidden_pre](self, x, b_dec)


def entries(self: Any, acts: Tensor, hidden_pre: Tensor) -> Tensor:
    """`[...]`, how many entries packed latents of the same would have."""
    if (
        not torch.is_grad_enabled()
        or type(self).encode_with_hidden_pre is not JumpReLUTrainingSAE.encode_with_hidden_pre
    ):
        return torch.count_nonzero(acts.detach(), -1)
    window = self.threshold.detach().clamp(min=0) - self.bandwidth / 2
    return torch.count_nonzero(hidden_pre.detach() > window, -1)


def _encode(
    self: Any,
    x: Tensor,
    b_dec: Tensor | None,
    activation: Any = "relu",
    encoder: Any = None,
    scale: Tensor | None = None,
) -> tuple[Latents, HiddenPre]:
    hidden_pre = HiddenPre(self, x, b_dec, scale is not None, encoder)
    weight, bias = encoder or (self.W_enc, self.b_enc)
    rows = operators.encode(x, weight, bias, activation, b_dec=b_dec)
    # SAELens scales latents, and scales them back to decode: `rows` are the latents in between.
    return Latents(rows, rows.l0, hidden_pre.dtype, None if scale is None else self.W_dec, scale), hidden_pre


def _encode_topk(self: Any, x: Tensor, b_dec: Tensor | None) -> tuple[Latents, HiddenPre]:
    scale = self.W_dec.detach().norm(dim=-1) if self.cfg.rescale_acts_by_decoder_norm else None
    kind = gemm.TopK if isinstance(self.activation_fn, TopK) else gemm.BatchTopK
    return _encode(self, x, b_dec, kind(int(self.activation_fn.k), scale), scale=scale)


def _encode_jumprelu(self: Any, x: Tensor, b_dec: Tensor | None) -> tuple[Latents, HiddenPre]:
    return _encode(self, x, b_dec, gemm.JumpReLU(self.threshold, self.bandwidth, self.cfg.jumprelu_ste_to_input))


def _encode_gated(self: Any, x: Tensor, b_dec: Tensor | None) -> tuple[Latents, HiddenPre]:
    # An open gate is a magnitude above a threshold, as in nn.GatedSAE.
    factor = self.r_mag.exp()
    threshold = (self.b_mag - factor * self.b_gate).detach()
    activation = gemm.JumpReLU(threshold.to(torch.promote_types(threshold.dtype, torch.float32)))
    return _encode(self, x, b_dec, activation, (self.W_enc * factor, self.b_mag))


ENCODERS: dict[Callable[..., Any], Callable[[Any, Tensor, Tensor | None], tuple[Latents, HiddenPre]]] = {
    TopKTrainingSAE.encode_with_hidden_pre: _encode_topk,
    JumpReLUTrainingSAE.encode_with_hidden_pre: _encode_jumprelu,
    StandardTrainingSAE.encode_with_hidden_pre: _encode,
    GatedTrainingSAE.encode_with_hidden_pre: _encode_gated,
}


def calculate_topk_aux_loss(
    self: Any, sae_in: Tensor, sae_out: Tensor, hidden_pre: Tensor, dead_neuron_mask: Tensor | None
) -> Tensor:
    """SAELens's, on the columns of dead latents alone."""
    # One sync, as SAELens's: how many are dead sets sizes.
    dead = None if dead_neuron_mask is None else dead_neuron_mask.nonzero().squeeze(1)
    unusual = self.cfg.normalize_activations in ("constant_norm_rescale", "layer_norm")
    if not isinstance(hidden_pre, HiddenPre) or dead is None or not dead.numel() or unusual:
        if isinstance(hidden_pre, Lazy) and dead is not None and dead.numel():
            hidden_pre = hidden_pre.dense()
        loss: Tensor = type(self).calculate_topk_aux_loss(self, sae_in, sae_out, hidden_pre, dead_neuron_mask)
        return loss
    residual = (sae_in - sae_out).detach()
    most = sae_in.shape[-1] // 2
    k = min(most, dead.numel())
    which, counted = _aligned(dead)
    acts, W_dec = torch.where(counted, hidden_pre.columns(which), 0), self.W_dec.index_select(0, which)
    if k < dead.numel():
        ranked = acts.detach()
        if self.cfg.rescale_acts_by_decoder_norm:
            ranked = ranked * W_dec.detach().norm(dim=-1)
        chosen = torch.where(counted, ranked, -torch.inf).topk(k, sorted=False).indices
        acts = torch.zeros_like(acts).scatter(-1, chosen, acts.gather(-1, chosen))
    reconstruction = self.reshape_fn_out(acts @ W_dec, self.d_head)
    loss = (reconstruction - residual).pow(2).sum(dim=-1).mean()
    return self.cfg.aux_loss_coefficient * min(dead.numel() / most, 1.0) * loss


def _aligned(dead: Tensor) -> tuple[Tensor, Tensor]:
    """(latents, which of them count): the dead and some of them again, a multiple of 64, since products of matrices of
    odd sizes run at a tenth of the speed."""
    more = -len(dead) % 64
    counted = torch.arange(len(dead) + more, device=dead.device) < len(dead)
    return torch.cat([dead, dead[:1].expand(more)]), counted


def calculate_aux_loss(
    self: Any, step_input: TrainStepInput, feature_acts: Tensor, hidden_pre: Tensor, sae_out: Tensor
) -> Any:
    """SAELens's, from the entries and the L0 that encode has counted."""
    kind = type(self)
    if not isinstance(feature_acts, Latents) or not feature_acts.packed or not isinstance(hidden_pre, HiddenPre):
        dense = [t.dense() if isinstance(t, Lazy) else t for t in (feature_acts, hidden_pre)]
        return kind.calculate_aux_loss(self, step_input, *dense, sae_out)
    return _AUX_LOSSES[kind.calculate_aux_loss](self, step_input, feature_acts, hidden_pre, sae_out)


def _l1(self: Any, step_input: TrainStepInput, rows: Rows) -> Tensor:
    norms = self.W_dec.norm(dim=1)[:, None].to(rows.dtype)
    return (step_input.coefficients["l1"] * matmul(rows, norms)).mean()


def _standard_aux_loss(
    self: Any, step_input: TrainStepInput, latents: Latents, hidden_pre: Tensor, sae_out: Tensor
) -> Any:
    return {"l1_loss": _l1(self, step_input, latents.rows)}


def _gated_aux_loss(
    self: Any, step_input: TrainStepInput, latents: Latents, hidden_pre: Tensor, sae_out: Tensor
) -> Any:
    x, b_dec = step_input.sae_in, self.b_dec if self.cfg.apply_b_dec_to_input else None
    gates = operators.encode(x, self.W_enc, self.b_gate, b_dec=b_dec)
    error = (operators.decode(gates, self.W_dec, self.b_dec) - x).pow(2).sum(dim=-1).mean()
    return {"l1_loss": _l1(self, step_input, gates), "auxiliary_reconstruction_loss": error}


def _jumprelu_aux_loss(
    self: Any, step_input: TrainStepInput, feature_acts: Latents, hidden_pre: HiddenPre, sae_out: Tensor
) -> Any:
    per_item = feature_acts.l0
    if self.cfg.jumprelu_sparsity_loss_mode == "tanh":
        per_item = operators.tanh_l0(feature_acts.rows, self.cfg.jumprelu_tanh_scale * self.W_dec.norm(dim=1))
    elif self.cfg.jumprelu_sparsity_loss_mode == "quadratic":
        per_item = 2 / self.cfg.target_l0 * (per_item - self.cfg.target_l0) ** 2
    losses = {"l0_loss": (step_input.coefficients["l0"] * per_item).mean().to(hidden_pre.dtype)}
    if self.cfg.pre_act_loss_coefficient is not None:
        mask = step_input.dead_neuron_mask
        dead = None if mask is None else mask.nonzero().squeeze(1)
        if dead is None or not dead.numel():
            losses["pre_act_loss"] = sae_out.new_tensor(0.0, dtype=hidden_pre.dtype)
        else:
            which, counted = _aligned(dead)
            norms = self.W_dec.index_select(0, which).norm(dim=1)
            below = (self.threshold.index_select(0, which) - hidden_pre.columns(which)).relu() * norms * counted
            loss = self.cfg.pre_act_loss_coefficient * below.sum(dim=-1).mean()
            losses["pre_act_loss"] = loss.to(hidden_pre.dtype)
    return losses


@torch.no_grad()
def update_topk_threshold(self: Any, acts_topk: Tensor) -> None:
    """SAELens's of BatchTopK, without a sync."""
    if not isinstance(acts_topk, Latents) or not acts_topk.packed:
        type(self).update_topk_threshold(self, acts_topk.dense() if isinstance(acts_topk, Lazy) else acts_topk)
        return
    kept, rate = self.topk_threshold, self.cfg.topk_threshold_lr
    least = smallest(acts_topk.rows, acts_topk.scale).to(kept.dtype)
    self.topk_threshold = torch.where(least.isfinite(), (1 - rate) * kept + rate * least, kept)


def _iterable_decode(self: Any, feature_acts: Tensor, include_outer_loss: bool = False) -> Iterator[tuple[int, Tensor]]:
    """SAELens's of nested widths: of all widths from one pass over the entries."""
    if not isinstance(feature_acts, Latents) or not feature_acts.packed:
        dense = feature_acts.dense() if isinstance(feature_acts, Lazy) else feature_acts
        yield from type(self)._iterable_decode(self, dense, include_outer_loss)
        return
    widths = self.cfg.matryoshka_widths[: None if include_outer_loss else -1]
    parts, decoded = operators.decode(by_width(feature_acts.rows, widths), self.W_dec) if widths else (), self.b_dec
    for width, part in zip(widths, parts):
        decoded = part + decoded
        yield width, self.run_time_activation_norm_fn_out(decoded)


_AUX_LOSSES: dict[Callable[..., Any], Callable[..., Any]] = {
    JumpReLUTrainingSAE.calculate_aux_loss: _jumprelu_aux_loss,
    StandardTrainingSAE.calculate_aux_loss: _standard_aux_loss,
    GatedTrainingSAE.calculate_aux_loss: _gated_aux_loss,
}
METHODS: dict[str, tuple[tuple[Callable[..., Any], ...], Callable[..., Any]]] = {
    "calculate_topk_aux_loss": ((TopKTrainingSAE.calculate_topk_aux_loss,), calculate_topk_aux_loss),
    "calculate_aux_loss": (tuple(_AUX_LOSSES), calculate_aux_loss),
    "update_topk_threshold": ((BatchTopKTrainingSAE.update_topk_threshold,), update_topk_threshold),
    "_iterable_decode": ((MatryoshkaBatchTopKTrainingSAE._iterable_decode,), _iterable_decode),
}
"""Name -> (SAELens's methods, ours)."""

"""SAELens autoencoders on sparse operators, for code that goes on using them as it did.

`patch` binds methods to one instance; parameters, state dict, hooks and class stay as they are. `decode` multiplies the
latents that fired alone. `forward` and `training_forward_pass` hand packed latents from `encode` to `decode`, unless
somebody listens to the latents (a hook, a cache) or so many fire that dense products are faster: then they are dense
ones of SAELens. `encode` called by itself returns a dense tensor.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from gossamer import gemm, rowsparse
from gossamer import sae as operators
from gossamer._core import autocast
from gossamer.ffn import BlockTracker
from gossamer.ffn.costs import sample_step
from gossamer.nn.plain import any_hook, of_parts
from gossamer.rowsparse.pack import default_capacity
from gossamer.sae.encode_dense import choose_path

try:
    from sae_lens import SAE, TrainingSAE
    from sae_lens.saes.batchtopk_sae import BatchTopK
    from sae_lens.saes.gated_sae import GatedSAE
    from sae_lens.saes.jumprelu_sae import JumpReLUSAE
    from sae_lens.saes.standard_sae import StandardSAE
    from sae_lens.saes.topk_sae import TopK, TopKSAE, TopKTrainingSAE
    from sae_lens.saes.transcoder import JumpReLUTranscoder, Transcoder
except ImportError as error:
    raise ImportError(
        "gossamer.integrations.sae_lens needs SAELens 6.49 or newer: run pip install '.[sae-lens]' in a clone of the "
        "repository."
    ) from error

from gossamer.integrations.sae_lens import _training
from gossamer.integrations.sae_lens._direct import DIRECT, is_small, pays, settle
from gossamer.integrations.sae_lens._latents import Latents

__all__ = ["patch", "unpatch"]


@dataclass(frozen=True)
class Check:
    """A patched autoencoder beside itself unpatched, on the same activations.

    Args:
        l0: latents a row that differ from 0, mean over rows: (unpatched, patched).
        error: squared error of the reconstruction over that of the mean (1 - variance explained), or None for a
            transcoder: (unpatched, patched).
        difference: norm of the difference of the two outputs over the norm of the unpatched one.
    """

    l0: tuple[float, float]
    error: tuple[float, float] | None
    difference: float


@dataclass(frozen=True)
class Report:
    """The changes of `patch`.

    Args:
        accelerated: method -> how it computes now.
        left: method -> why it computes as before.
        check: the comparison that was asked for, or None.
        density: how many latents rows of the SAE have had, and the path of its passes, `"sparse"` or `"dense"`, as
            of `nn.TopKSAE`: `density.last_path` says it, `density.pinned` sets it.
    """

    accelerated: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    check: Check | None = None
    density: rowsparse.DensityTracker = field(default_factory=rowsparse.DensityTracker)

    def __str__(self) -> str:
        lines = [f"{name}: {how}" for name, how in self.accelerated.items()]
        lines += [f"{name}: left as it is, {why}" for name, why in self.left.items()]
        if self.check is not None:
            lines.append("l0: {:.2f} unpatched, {:.2f} patched".format(*self.check.l0))
            if self.check.error is not None:
                lines.append("unexplained variance: {:.6f} unpatched, {:.6f} patched".format(*self.check.error))
            lines.append(f"relative difference of the outputs: {self.check.difference:.2e}")
        return "\n".join(lines)


def patch(sae: SAE[Any], *, check: Tensor | None = None) -> Report:
    """Replaces the methods by which an SAE of SAELens computes, for inference or in training; `unpatch` undoes it.

    Args:
        sae: standard, gated, JumpReLU or TopK SAE, transcoder or skip transcoder, or a standard, gated, JumpReLU, TopK,
            BatchTopK or Matryoshka SAE for training, of any float dtype and device. Methods that another architecture
            has of its own are left, and the report says so. Moving it (`to`), folding norms, saving, hooks,
            `use_error_term` and SAELens's trainer work as before.
        check: `[..., d_in]` activations to run before and after, without the error term, or None.

    Returns:
        A report of the accelerated parts, the parts left alone and why, and the check. `print` it.
        An SAE that is patched already stays so,
        with a warning, and the report is that of before, with a new check where one is asked for.

    Raises:
        TypeError: not a SAELens SAE, or check is no tensor.
        ValueError: check has no rows, another size than d_in, or values that are not finite; the SAE itself gives NaN
            or infinity on it; or patched and unpatched disagree on it by more than rounding (relative difference above
            1e-4, in half precision 0.25). In the last two cases the SAE is left unpatched.

    Source: the package jumprelu-sae-kernels, its end-to-end table over SAELens.

    >>> print(patch(sae, check=activations))  # doctest: +SKIP
    >>> reconstruction = sae(activations)  # doctest: +SKIP
    """
    operator = "integrations.sae_lens.patch"
    _check_sae(operator, sae)
    if check is not None:
        _check_activations(operator, sae, check)
    density = rowsparse.DensityTracker()
    if _is_patched(sae):
        warnings.warn(f"{operator}: sae is patched already; nothing changed.", stacklevel=2)
        report = sae._gossamer.report
        if check is None:
            return report
        density = report.density
        unpatch(sae)
    if check is None:
        return _bind(sae, density)
    with _without_error_term(sae), torch.no_grad():
        expected, latents = sae(check), sae.encode(check)
        if not bool(expected.isfinite().all()):
            raise ValueError(f"{operator}: {_why_not_finite(sae)} The SAE is left unpatched.")
        report = _bind(sae, density)
        # Small products would be those of the class.
        pinned, density.pinned = density.pinned, "sparse"
        try:
            out = sae(check)
            packed = _packed(sae, check) if "forward" in report.accelerated else sae.encode(check)
        finally:
            density.pinned = pinned
    difference = float((out - expected).double().norm() / expected.double().norm().clamp(min=1e-30))
    # In half precision near ties are broken otherwise: of k equal latents each moves the output by (2 / k) ** 0.5.
    limit = 0.25 if expected.dtype in (torch.float16, torch.bfloat16) else 1e-4
    if not difference <= limit:
        unpatch(sae)
        threshold = getattr(sae, "threshold", None)
        if isinstance(threshold, Tensor) and bool((threshold < 0).any()):
            raise ValueError(
                f"{operator}: the patched output differs by {difference:.1e} of the norm of the unpatched one: some "
                "thresholds are below 0, which counts as 0 here. SAELens's training makes it 0 at the next step: call "
                "sae.threshold.data.clamp_(min=0) before. The SAE is unpatched again."
            )
        raise ValueError(
            f"{operator}: the patched output differs by {difference:.1e} of the norm of the unpatched one, more than "
            f"{limit:g}. The SAE is unpatched again; please report its architecture and cfg."
        )
    errors = None
    # A transcoder's output is meant to be something else.
    if out.shape == check.shape and "transcoder" not in sae.cfg.architecture():
        errors = _unexplained(sae, expected, check), _unexplained(sae, out, check)
    report = replace(report, check=Check((_l0(latents), _l0(packed)), errors, difference))
    sae._gossamer.report = report
    return report


def _why_not_finite(sae: SAE[Any]) -> str:
    """The cause of NaN or infinity in SAELens's own output."""
    broken = [name for name, parameter in sae.named_parameters() if not bool(parameter.isfinite().all())]
    if broken:
        return f"SAELens's own output on check is NaN or infinite, for sae.{broken[0]} is. Load the SAE anew."
    if _rescales(sae) and bool((sae.W_dec.norm(dim=-1) == 0).any()):
        return (
            "SAELens's own output on check is NaN or infinite: rescale_acts_by_decoder_norm divides by the norms of "
            "decoder rows, and some rows of sae.W_dec have norm 0. Give those rows another value, 1e-6 say."
        )
    return "SAELens's own output on check is NaN or infinite. Give smaller activations, or a wider dtype."


def unpatch(sae: SAE[Any]) -> None:
    """Undoes `patch`; an SAE that is not patched stays as it is, with a warning.

    Args:
        sae: the SAE that was patched.

    Raises:
        TypeError: sae is no SAE of SAELens.

    >>> unpatch(sae)  # doctest: +SKIP
    """
    operator = "integrations.sae_lens.unpatch"
    _check_sae(operator, sae)
    if not _is_patched(sae):
        warnings.warn(f"{operator}: sae is not patched; nothing changed.", stacklevel=2)
        return
    for name, function in _BOUND:
        if getattr(sae.__dict__.get(name), "__func__", None) is function:
            del sae.__dict__[name]
    del sae.__dict__["_gossamer"]
    sae.__dict__.pop(DIRECT, None)


class _State(threading.local):
    """Kept on a patched instance, for each thread: `turns`, the calls of `encode` and `decode` that the running pass
    makes next, twice each with an error term. An `encode` in its turn hands out packed latents; any other one, such as
    a hook's, gets a dense tensor. The second takes the `path` of the first: SAELens removes hooks for it, and dense and
    packed latents differ by rounding. Paths are those of `choose_path`, and `"theirs"` where a hook listens."""

    def __init__(self, report: Report) -> None:
        self.report, self.tracker = report, BlockTracker(rows=report.density)
        self.turns: tuple[str, ...] = ()
        self.followed = False
        self.training = False
        self.path: str | None = None
        self.counts: Tensor | None = None

    @property
    def density(self) -> rowsparse.DensityTracker:
        """The tracker of `report`, by which `gossamer.warm_up` finds the paths."""
        return self.report.density

    def is_turn_of(self, name: str) -> bool:
        """Whether the pass calls `name` next; then that turn is over."""
        own = self.turns[:1] == (name,)
        self.turns = self.turns[own:]
        return own

    @contextmanager
    def running(self, passes: int, training: bool = False) -> Iterator[None]:
        """Inside of this runs a pass that encodes and decodes so many times."""
        before = self.turns, self.training, self.path, self.counts
        self.turns, self.training, self.path, self.counts = ("encode", "decode") * passes, training, None, None
        try:
            yield
        finally:
            self.turns, self.training, self.path, self.counts = before

    def record(self, d_sae: int) -> None:
        """Tells the tracker how many entries rows have had, where it asks."""
        if self.counts is not None:
            limit = default_capacity(d_sae)
            self.tracker.rows.record(self.counts, training=self.training, limit=limit)

    def __reduce__(self) -> tuple[Any, ...]:
        return _State, (self.report,)


def _check_sae(operator: str, sae: Any) -> None:
    if not isinstance(sae, SAE):
        raise TypeError(
            f"{operator}: sae must be a SAELens SAE, got {type(sae).__name__}. Give the SAE, not a model around it."
        )


def _is_patched(sae: SAE[Any]) -> bool:
    return isinstance(getattr(sae, "__dict__", {}).get("_gossamer"), _State)


def _bind(sae: SAE[Any], density: rowsparse.DensityTracker) -> Report:
    accelerated, left = {}, {}
    # By the functions, not the class: a subclass that overrides none of them computes the same.
    kind = type(sae)
    name = kind.__name__
    replaced = sorted({method for method, _ in _BOUND} & sae.__dict__.keys())
    if replaced:
        left["decode"] = f"{replaced[0]} has been replaced on this instance"
    elif kind.decode in _DECODERS:
        sae.__dict__["decode"] = MethodType(_decode, sae)
        accelerated["decode"] = "multiplies the decoder rows of latents that fired"
    else:
        left["decode"] = f"{name} has one of its own"
    training = isinstance(sae, TrainingSAE)
    encode = "encode_with_hidden_pre" if training else "encode"
    passes = ("forward", "training_forward_pass") if training else ("forward",)
    why = _why_not_packed(sae)
    if "decode" in accelerated and why is None:
        methods: dict[str, Callable[..., Any]] = {
            "forward": _forward,
            encode: _encode_training if training else _encode,
        }
        if training:
            methods["training_forward_pass"] = _training.training_forward_pass
            for method, (originals, ours) in _training.METHODS.items():
                if getattr(kind, method, None) in originals:
                    methods[method] = ours
                    accelerated[method] = "reads the entries, and of pre-activations the columns of dead latents"
        sae.__dict__.update({method: MethodType(function, sae) for method, function in methods.items()})
        packed = "latents stay packed from encode to decode, unless a hook listens to them or dense products are faster"
        accelerated |= dict.fromkeys(passes, packed)
        left["encode"] = "it returns a dense tensor"
    else:
        left |= dict.fromkeys((*passes, "encode"), why or left.get("decode", ""))
    report = Report(accelerated, left, density=density)
    sae.__dict__["_gossamer"] = _State(report)
    return report


def _why_not_packed(sae: SAE[Any]) -> str | None:
    """Why `encode` cannot hand packed latents to `decode`, or None where it can."""
    if isinstance(sae, TrainingSAE):
        return _training.why_not_packed(sae)
    kind = type(sae)
    if kind.encode not in _ACTIVATIONS:
        return f"{kind.__name__} has an encode of its own"
    if kind.encode is TopKSAE.encode:
        if not isinstance(sae.activation_fn, TopK):
            return f"its activation is {type(sae.activation_fn).__name__}, not TopK"
    elif not isinstance(sae.activation_fn, torch.nn.ReLU):
        return f"its activation is {type(sae.activation_fn).__name__}, not ReLU"
    return None


def _forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The class's own forward, error term and skip connection included, with packed latents in it."""
    own = self.__dict__
    direct = own.get(DIRECT)
    if direct is not None and len(args) == 1 and not kwargs and direct.serves(own, args[0]):
        # By the class's functions: no step but this one passes through the patch.
        # A module is slow to get as an attribute.
        return own["_modules"]["hook_sae_output"](direct.decode(self, direct.encode(self, args[0])))
    state, kind = self._gossamer, type(self)
    small = bool(args) and is_small(self, args[0], "W_enc")
    if small:
        settle(self, args[0], "small", 0)
    with state.running(0 if small else 1 + bool(self.use_error_term)):
        out: Tensor = kind.forward(self, *args, **kwargs)
        state.record(self.W_dec.shape[0])
    return out


def _encode(self: Any, x: Tensor) -> Tensor | rowsparse.Rows:
    state = self._gossamer
    path = _path(self, x)
    if path != "sparse":
        acts: Tensor = type(self).encode(self, x)
        if path == "dense" and state.followed:
            # A sample of rows tells as much as a pass over all latents.
            flat = acts.detach().reshape(-1, acts.shape[-1])
            state.counts = torch.count_nonzero(flat[:: sample_step(len(flat))], -1)
        return acts
    rows = _rows(self, self.process_sae_in(x))
    if state.followed:
        state.counts = rows.counts
    return rows


def _encode_training(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    path, state = _path(self, x), self._gossamer
    if path != "sparse":
        acts, hidden_pre = type(self).encode_with_hidden_pre(self, x)
        if path == "dense" and state.followed:
            state.counts = _training.entries(self, acts, hidden_pre)
        return acts, hidden_pre
    latents, lazy = _training.encode_with_hidden_pre(self, x)
    if state.followed:
        state.counts = latents.rows.counts
    return latents, lazy


def _path(self: Any, x: Tensor) -> str:
    """The path of the encode that begins: the faster one within a pass whose latents nobody listens to."""
    state = self._gossamer
    if not state.is_turn_of("encode"):
        return "theirs"
    if state.path is None:
        heard = of_parts(self, _PARTS, lambda: any_hook(*(getattr(self, name) for name in _PARTS)))
        state.path = "theirs" if heard or _why_not_packed(self) is not None else _faster(self, x)
    return state.path


_PARTS = ("hook_sae_acts_pre", "hook_sae_acts_post", "activation_fn")


def _faster(self: Any, x: Tensor) -> str:
    """The path of `choose_path`. In inference one call of eight counts the entries of rows, or of 256 where few rows
    wait for the host: such a call takes it several times as long as the others."""
    state = self._gossamer
    training, tracker = state.training, state.tracker
    # Entries of a row, where they are known without looking.
    expected = int(self.activation_fn.k) if isinstance(self.activation_fn, TopK | BatchTopK) else None
    rows = x.numel() // max(self.W_enc.shape[0], 1)
    # SAELens's dense path takes more passes over the latents than ours, measured on x86. A step in training by such
    # passes took an H200 20.5 ms, and 9.3 ours (`bench nn`).
    times = 2.0 if training and self.W_dec.is_cuda else 1.5

    def choose(known: rowsparse.Density | None, eager: bool = True) -> str:
        if eager and not training and not pays(rows, self.W_dec):
            return "dense"
        return choose_path(known, rows, self.W_dec, expected, training=training, times=times)

    tracker.rows.check_pinned("sparse", "dense")
    every = 8 if pays(rows, self.W_dec) else 256
    state.followed = expected is None and (training or tracker.due(every))
    if training:
        return tracker.rows.path(choose, training=True)
    path = tracker.rows.last_path = tracker.path(
        choose, due=state.followed, key=(rows, expected, self.W_dec.dtype, self.W_dec.device)
    )
    if path == "dense" and (expected is not None or tracker.rows.known(training=False) is not None):
        settle(self, x, path, every * (expected is None))
    return path


def _packed(self: Any, x: Tensor) -> Tensor:
    """The latents that `forward` decodes, as a dense tensor, without the state that `process_sae_in` leaves."""
    with self._gossamer.running(1):
        latents = self.encode(x)
    if isinstance(latents, Latents):
        return latents.dense()
    if isinstance(latents, Tensor):
        return latents
    dense = latents.to_dense()
    return dense * self.W_dec.norm(dim=-1) if _rescales(self) else dense


def _rescales(self: Any) -> bool:
    """Whether latents are those of a decoder with rows of unit norm, and scaled back before they are decoded."""
    return bool(getattr(self.cfg, "rescale_acts_by_decoder_norm", False))


def _rows(self: Any, x: Tensor) -> rowsparse.Rows:
    """The latents of x as SAELens's encode hands it to the encoder."""
    kind = type(self)
    if kind.encode is GatedSAE.encode:
        # Both paths share W_enc up to a factor a latent: one product serves the two.
        product = x @ self.W_enc
        gate = product + self.b_gate > 0
        # A product, as in SAELens: NaN stays NaN.
        return rowsparse.pack(gate * torch.relu(product * self.r_mag.exp() + self.b_mag))
    return operators.encode(x, self.W_enc, self.b_enc, _ACTIVATIONS[kind.encode](self))


def _topk(self: Any) -> gemm.TopK:
    return gemm.TopK(self.activation_fn.k, self.W_dec.detach().norm(dim=-1) if _rescales(self) else None)


def _jumprelu(self: Any) -> gemm.JumpReLU:
    # SAELens compares with a mask, through which no gradient reaches the threshold.
    return gemm.JumpReLU(self.threshold.detach())


def _decode(self: Any, feature_acts: Tensor | rowsparse.Rows) -> Tensor:
    if isinstance(feature_acts, Latents):
        # Packed latents have never been scaled.
        feature_acts = feature_acts.rows if feature_acts.packed else feature_acts.dense()
    if isinstance(feature_acts, Tensor):
        # Somebody else may hold latents that need a gradient, and ask for that of every latent, as an attribution does.
        held = feature_acts.requires_grad and torch.is_grad_enabled()
        theirs = self._gossamer.path == "dense" or feature_acts.is_sparse or held
        if theirs or is_small(self, feature_acts, "W_dec"):
            out: Tensor = type(self).decode(self, feature_acts)
            self._gossamer.is_turn_of("decode")
            return out
        if _rescales(self):
            feature_acts = feature_acts * (1 / self.W_dec.norm(dim=-1))
    if autocast.enabled(self.W_dec.device):
        # As SAELens: a product in the autocast dtype, and a sum in that of the bias.
        out = operators.decode(feature_acts, self.W_dec) + self.b_dec
    else:
        out = operators.decode(feature_acts, self.W_dec, self.b_dec)
    out = self.hook_sae_recons(out)
    if type(self).decode is not Transcoder.decode:
        out = self.reshape_fn_out(self.run_time_activation_norm_fn_out(out), self.d_head)
    self._gossamer.is_turn_of("decode")
    return out


_ACTIVATIONS: dict[Callable[..., Any], Callable[[Any], Any]] = {
    **dict.fromkeys((StandardSAE.encode, Transcoder.encode, GatedSAE.encode), lambda _: "relu"),
    **dict.fromkeys((JumpReLUSAE.encode, JumpReLUTranscoder.encode), _jumprelu),
    TopKSAE.encode: _topk,
}
_DECODERS = {kind.decode for kind in (StandardSAE, JumpReLUSAE, TopKSAE, GatedSAE, Transcoder)}
_DECODERS |= {TopKTrainingSAE.decode, TrainingSAE.decode}
_BOUND = (
    ("forward", _forward),
    ("encode", _encode),
    ("decode", _decode),
    ("encode_with_hidden_pre", _encode_training),
    ("training_forward_pass", _training.training_forward_pass),
    *((name, ours) for name, (_, ours) in _training.METHODS.items()),
)


def _check_activations(operator: str, sae: SAE[Any], check: Tensor) -> None:
    if not isinstance(check, Tensor):
        raise TypeError(f"{operator}: check must be a tensor of activations, got {type(check).__name__}.")
    d_in = sae.W_enc.shape[0]
    size = math.prod(check.shape[-2:]) if sae.hook_z_reshaping_mode else check.shape[-1] if check.dim() else 0
    if size != d_in or not check.numel():
        raise ValueError(
            f"{operator}: check must have shape [..., d_in] with d_in = {d_in} and at least one row, got "
            f"{list(check.shape)}. Give activations as the SAE takes them."
        )
    if not bool(check.isfinite().all()):
        raise ValueError(f"{operator}: check must be finite, got NaN or infinity. Leave those rows out.")


@contextmanager
def _without_error_term(sae: SAE[Any]) -> Iterator[None]:
    """An output without the error term, which would make any reconstruction right."""
    before, sae.use_error_term = sae.use_error_term, False
    try:
        yield
    finally:
        with warnings.catch_warnings():
            # The user who set it has seen the warning that setting it is deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            sae.use_error_term = before


def _l0(latents: Tensor) -> float:
    return float((latents != 0).sum(-1).double().mean())


def _unexplained(sae: SAE[Any], out: Tensor, x: Tensor) -> float:
    # Heads, where an SAE takes them, are parts of one row.
    flat, target = (t.flatten(-2) if sae.hook_z_reshaping_mode else t for t in (out, x))
    flat, target = (t.reshape(-1, t.shape[-1]).double() for t in (flat, target))
    return float((flat - target).square().sum() / (target - target.mean(0)).square().sum().clamp(min=1e-30))

"""Autoencoders on disk, in the layouts of SAELens, of EleutherAI's sparsify and of circuit-tracer, without pickle."""

import json
import os
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gossamer._core import checks, files
from gossamer.nn import _circuit_tracer
from gossamer.nn._placement import DIMENSION, WHOLE
from gossamer.nn.cross_layer import CrossLayerTranscoder
from gossamer.nn.jumprelu import JumpReLUSAE
from gossamer.nn.matryoshka import MatryoshkaBatchTopKSAE, MatryoshkaSAE
from gossamer.nn.penalised import GatedSAE, StandardSAE
from gossamer.nn.sae import BatchTopKSAE, SparseAutoencoder, TopKSAE
from gossamer.nn.transcoder import Transcoder, Transcoding

_CONFIG = "cfg.json"
_SAE_LENS, _SPARSIFY, _TRAINING = "sae_weights.safetensors", "sae.safetensors", "training_state.safetensors"
_STATISTICS = ("firing_counts", "steps_since_fired")
_STEERING = ("input_scale", "steering")
_NEUTRAL = {"normalize_activations": "none", "reshape_activations": "none"}

Model = TopKSAE | BatchTopKSAE | JumpReLUSAE | StandardSAE | GatedSAE | Transcoder

_ARCHITECTURES: dict[type[Model], str] = {
    TopKSAE: "topk",
    BatchTopKSAE: "jumprelu",
    JumpReLUSAE: "jumprelu",
    StandardSAE: "standard",
    GatedSAE: "gated",
}
"""SAELens's names. A BatchTopK, when it is not trained, is a JumpReLU."""

_SETTINGS_OF_SAE_LENS = {
    "aux_loss_coefficient": "aux_coefficient",
    "jumprelu_bandwidth": "bandwidth",
    "jumprelu_sparsity_loss_mode": "penalty",
    "jumprelu_tanh_scale": "tanh_scale",
    "jumprelu_ste_to_input": "ste_to_input",
    "l0_coefficient": "l0_coefficient",
    "l1_coefficient": "l1_coefficient",
    "pre_act_loss_coefficient": "pre_act_coefficient",
    "target_l0": "target_l0",
}
"""SAELens's names of settings that its trainable SAEs and these modules have."""


def save_sae(model: Model | CrossLayerTranscoder, folder: str | Path, *, layout: str = "sae_lens") -> None:
    """Writes an autoencoder where `load_sae`, and the library whose layout it is, find it.

    Args:
        model: the autoencoder, on any device.
        folder: made if it is not there; files of the same names are replaced, each whole or not at all. Of one
            transcoder in circuit-tracer's layout it is the `.safetensors` file.
        layout: `"sae_lens"` writes `cfg.json`, `sae_weights.safetensors` (`log_threshold` as `threshold`; BatchTopK as
            the JumpReLU that it is when it is not trained; nested widths as settings of this package). `"sparsify"`
            writes `cfg.json` and `sae.safetensors`, and is for `TopKSAE`, `MatryoshkaSAE` and `Transcoder`; sparsify
            does not read one with d_in other than d_out. Beside either lies `training_state.safetensors` with the
            firing statistics, which those libraries do not read. `"circuit_tracer"` writes tensors alone, of
            `JumpReLUTranscoder`, of `BatchTopKTranscoder` as the JumpReLU that it is when it is not trained, and of a
            `CrossLayerTranscoder` of these: `W_enc_0.safetensors`, `W_dec_0.safetensors` and so on.

    Raises:
        TypeError: model is no autoencoder of this package, a slice of one (`shard_sae`), or one with other tensors than
            its class has (a parametrization, pruning).
        ValueError: an unknown layout, or one that has no place for the model; a folder that is a file.
        OSError: the disk is full, for example; errno is the system's.

    Source: SAELens's `save_model`, sparsify's `save_to_disk` and circuit-tracer's `to_safetensors`.

    >>> import tempfile
    >>> save_sae(TopKSAE(4, 16, k=2), tempfile.mkdtemp())
    """
    operator = "nn.save_sae"
    if layout == "circuit_tracer":
        made = _circuit_tracer.tensors_of(operator, model, Path(folder))
        files.make_folder(operator, "folder", next(iter(made)).parent)
        for file, found in made.items():
            _write(file, {name: tensor.detach() for name, tensor in found.items()})
        return
    if not isinstance(model, Model):
        way = ' Use layout="circuit_tracer".' if isinstance(model, CrossLayerTranscoder) else ""
        raise TypeError(f"{operator}: model must be an autoencoder of gossamer.nn, got {type(model).__name__}.{way}")
    if model.sharded:
        raise TypeError(f"{operator}: model holds a slice of its latents, by nn.shard_sae. Save model.gathered().")
    if layout not in ("sae_lens", "sparsify"):
        raise ValueError(f'{operator}: layout must be "sae_lens", "sparsify" or "circuit_tracer", got {layout!r}.')
    if layout == "sparsify" and not isinstance(model, TopKSAE | Transcoder):
        raise ValueError(
            f'{operator}: layout="sparsify" has TopK alone, and no place for a {type(model).__name__}. '
            'Use layout="sae_lens".'
        )
    if isinstance(model, Transcoding) and layout == "sae_lens":
        other = "sparsify" if isinstance(model, Transcoder) else "circuit_tracer"
        raise ValueError(
            f'{operator}: layout="sae_lens" has no place for a {type(model).__name__} here. Use layout="{other}".'
        )
    beside = (*_STATISTICS, *_STEERING)
    tensors = {name: t.detach() for name, t in model.state_dict().items() if name not in beside}
    if strange := sorted(tensors.keys() - DIMENSION.keys() - WHOLE):
        raise TypeError(
            f"{operator}: the layouts have no place for {', '.join(strange)} of model: it is parametrized, pruned or a "
            "subclass with tensors of its own. Remove the parametrization (remove_parametrizations, prune.remove), or "
            "write model.state_dict() with torch.save."
        )
    steered = isinstance(model, JumpReLUSAE) and model.steered
    if steered:
        # The parameters behind the biases are in units of the scale.
        tensors |= {"b_enc": model.b_enc.detach(), "b_dec": model.b_dec.detach()}
        del tensors["scaled_b_enc"], tensors["scaled_b_dec"]
    folder = Path(folder)
    files.make_folder(operator, "folder", folder)
    kind = next(base for base in type(model).__mro__ if base.__module__.startswith("gossamer.nn."))
    training = {name: getattr(model, name) for name in _settings(kind)}
    if layout == "sparsify":
        tensors["encoder.weight"], tensors["encoder.bias"] = tensors.pop("W_enc").t(), tensors.pop("b_enc")
        config = {"activation": "topk", "d_in": model.d_in, "expansion_factor": model.d_sae / model.d_in}
        config |= {"normalize_decoder": False, "num_latents": model.d_sae, "k": model.k, "multi_topk": False}
        config |= {"skip_connection": "W_skip" in tensors, "transcode": isinstance(model, Transcoder)}
        config |= {"gossamer": training}
    else:
        architecture = next(name for kind, name in _ARCHITECTURES.items() if isinstance(model, kind))
        config = {"architecture": architecture, "apply_b_dec_to_input": _subtracts(model)}
        if architecture == "jumprelu":
            tensors.pop("log_threshold", None)
            threshold: Any = model.threshold
            tensors["threshold"] = threshold.detach().expand(model.d_sae)
        if architecture == "topk":
            config |= {"k": model.k, "rescale_acts_by_decoder_norm": False}
        config |= {"d_in": model.d_in, "d_sae": model.d_sae, "dtype": checks.name_of(model.W_dec.dtype)}
        # The version says which form the file has: before 6 it was another.
        config |= {"device": "cpu", **_NEUTRAL, "metadata": {"sae_lens_version": "6.49.0", "gossamer": training}}
    weights = folder / (_SAE_LENS if layout == "sae_lens" else _SPARSIFY)
    _write(weights, tensors)
    kept: tuple[str, ...] = _STATISTICS
    if steered:
        # Of the logarithm of a threshold's exponential the last bits would be others.
        kept += (*_STEERING, "log_threshold")
    state = {name: getattr(model, name).detach() for name in kept}
    _write(folder / _TRAINING, state, {"weights": files.digest(weights)})
    _replace(folder / _CONFIG, lambda path: path.write_text(json.dumps(config, indent=1) + "\n"))


def load_sae(folder: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Any:
    """Reads an autoencoder that `save_sae`, SAELens, sparsify or circuit-tracer wrote.

    Args:
        folder: with `cfg.json` beside `sae_weights.safetensors` (SAELens) or `sae.safetensors` (sparsify). In
            circuit-tracer's layout it is the folder of a cross-layer transcoder, or the file of a transcoder.
        device: of the parameters; None takes PyTorch's default.
        dtype: of the weights; None takes the file's. Biases and thresholds are float32 at least.

    Returns:
        `TopKSAE`, `StandardSAE` or `GatedSAE`; `JumpReLUSAE`, which SAELens also makes of a BatchTopK or Matryoshka
        SAE; `BatchTopKSAE`, `MatryoshkaSAE` or `MatryoshkaBatchTopKSAE`, where `save_sae` wrote one; or `Transcoder`,
        for a transcoder of sparsify or a skip connection; of circuit-tracer `JumpReLUTranscoder`, or
        `CrossLayerTranscoder` of them. Whether b_dec is subtracted
        from the input, and decoder norms that rescale the selection, are folded into b_enc and the weights: the
        function is the same. Settings of training come from the files, or are the defaults: the settings that
        `save_sae` or SAELens's trainable SAEs wrote, as far as these modules have them (docs/sae.md lists them), and
        statistics.

    Raises:
        FileNotFoundError: no such files.
        ValueError: an architecture or setting that these modules do not have, sizes that differ between the files, or
            a file that is cut short, that of the statistics too.
        TypeError: a dtype that is not floating.

    Source: SAELens's and sparsify's `load_from_disk`, and circuit-tracer's `load_clt` and `load_relu_transcoder`.

    >>> import tempfile; folder = tempfile.mkdtemp()
    >>> save_sae(TopKSAE(4, 16, k=2), folder); load_sae(folder)
    TopKSAE(d_in=4, d_sae=16, k=2)
    """
    operator = "nn.load_sae"
    folder = Path(folder)
    checks.float_dtype(operator, "dtype", dtype, "Biases and thresholds are float32 at least in any case.")
    if folder.is_file() or (folder / _circuit_tracer.FIRST).is_file():
        return _circuit_tracer.load(operator, lambda file: _read(operator, file), folder, dtype=dtype, device=device)
    there = [name for name in (_SAE_LENS, _SPARSIFY) if (folder / name).is_file()]
    if not there or not (folder / _CONFIG).is_file():
        # A folder of `gossamer sae train`, for one, has one folder for each.
        below = ", ".join(str(file.parent) for file in sorted(folder.glob(f"*/{_CONFIG}")))
        way = f" Name one of its autoencoders: {below}." if below else ""
        raise FileNotFoundError(f"{operator}: {folder} must hold {_CONFIG} and {_SAE_LENS} or {_SPARSIFY}.{way}")
    try:
        config = json.loads((folder / _CONFIG).read_text())
        if not isinstance(config, dict):
            raise ValueError("it holds no settings")
    except ValueError as error:
        raise ValueError(f"{operator}: {folder / _CONFIG} is not JSON of an autoencoder: {error}.") from error
    # Where both layouts have been written, the settings are those of the last.
    wanted_first = _SAE_LENS if "architecture" in config or "num_latents" not in config else _SPARSIFY
    weights = folder / (wanted_first if wanted_first in there else there[0])
    tensors = _read(operator, weights)
    read = _from_sae_lens if weights.name == _SAE_LENS else _from_sparsify
    kind, given = read(operator, folder, config, tensors)
    wanted = _shapes(kind(**given, device="meta"))
    for name, shape in wanted.items():
        if name not in tensors or tensors[name].shape != shape:
            got = list(tensors[name].shape) if name in tensors else "nothing"
            raise ValueError(f"{operator}: {weights} must hold {name} {list(shape)} by {_CONFIG}, got {got}.")
    unused = sorted(tensors.keys() - wanted.keys())
    if unused:
        raise ValueError(f"{operator}: {weights} holds {unused[0]}, with which these modules do nothing.")
    dtype = dtype or torch.promote_types(tensors["W_enc"].dtype, tensors["W_dec"].dtype)
    model = kind(**given, dtype=dtype, device=device)
    state, statistics = _folded(model, config, tensors), folder / _TRAINING
    if statistics.is_file() and _written_with(operator, statistics, weights):
        state |= _read(operator, statistics)
    model.load_state_dict(state, strict=False)
    if isinstance(model, JumpReLUSAE):
        model.go_on()
    return model


def _written_with(operator: str, statistics: Path, weights: Path) -> bool:
    """Whether the weights beside the statistics are those that they were counted with."""
    try:
        with safe_open(statistics, framework="pt") as file:
            return (file.metadata() or {}).get("weights") == files.digest(weights)
    except SafetensorError as error:
        raise ValueError(
            f"{operator}: {statistics} is not a whole safetensors file: {error}. Remove it to begin with statistics of "
            "0."
        ) from error


class OnlyInSAELens(ValueError):
    """A checkpoint that SAELens can load, and these modules cannot be."""


_Made = tuple[type[Any], dict[str, Any]]


def _from_sae_lens(operator: str, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> _Made:
    """The class of the module, and its arguments."""
    architecture, metadata = config.get("architecture"), config.get("metadata")
    for name, value in {**_NEUTRAL, "finetuning_scaling_factor": False}.items():
        if config.get(name, value) != value:
            raise OnlyInSAELens(
                f"{operator}: {folder / _CONFIG} has {name} = {config[name]!r}, which these modules do not do. "
                "Load it with SAELens and use integrations.sae_lens.patch."
            )
    # Of the two with one name the last, JumpReLU.
    kinds = {name: kind for kind, name in _ARCHITECTURES.items()}
    if architecture in kinds:
        kind = kinds[architecture]
        sizes = _sizes(operator, folder, config, "d_in", "d_sae", *["k"] * (kind is TopKSAE))
        # SAELens keeps the metadata of `save_sae`, also of thresholds into which it has folded decoder norms since.
        threshold = tensors.get("threshold", torch.zeros(1))
        alike = bool((threshold == threshold.flatten()[:1]).all())
        if kind is JumpReLUSAE and alike and "k" in _given(BatchTopKSAE, metadata):
            kind = BatchTopKSAE
        kind = _nested(kind, metadata)
        return kind, _given(kind, metadata) | sizes | _given_by_sae_lens(kind, config)
    way = "Load it with SAELens and use integrations.sae_lens.patch."
    if architecture in ("batchtopk", "matryoshka_batchtopk"):
        way = (
            "SAELens has it in training alone: TrainingSAE.load_from_disk(folder).save_inference_model(another) writes "
            "the JumpReLU that it is afterwards, which nn.load_sae reads. To go on training, load it with "
            "TrainingSAE.load_from_disk and use integrations.sae_lens.patch."
        )
    raise OnlyInSAELens(
        f'{operator}: {folder / _CONFIG} has architecture = {architecture!r}; these modules are "topk", "jumprelu", '
        '"standard" and "gated". ' + way
    )


def _from_sparsify(operator: str, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> _Made:
    for name, neutral in {"activation": "topk", "signed": False}.items():
        if config.get(name, neutral) != neutral:
            way = " sae.encode does, with gemm.GroupMax(k)." if config[name] == "groupmax" else ""
            raise ValueError(
                f"{operator}: {folder / _CONFIG} has {name} = {config[name]!r}, which these modules do not do.{way}"
            )
    sizes = _sizes(operator, folder, config, "d_in", "k")
    sizes["d_sae"] = config.get("num_latents") or round(sizes["d_in"] * config.get("expansion_factor", 0))
    for old, new in {"encoder.weight": "W_enc", "encoder.bias": "b_enc"}.items():
        if old in tensors:
            tensors[new] = tensors.pop(old).t() if new == "W_enc" else tensors.pop(old)
    transcode, skip = bool(config.get("transcode")), bool(config.get("skip_connection"))
    # As sparsify does it: b_dec is subtracted from a vector that is reconstructed, not from one that is transcoded.
    config["apply_b_dec_to_input"] = not transcode
    if not (transcode or skip):
        kind = _nested(TopKSAE, config)
        return kind, _given(kind, config) | sizes
    # sparsify has one size for the input and the output.
    return Transcoder, {"d_out": sizes["d_in"]} | _given(Transcoder, config) | sizes | {"skip": skip}


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """The tensors that a file has of a module. Thresholds are written as such, one a latent."""
    found = {name.removeprefix("scaled_"): tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if found.pop("log_threshold", None) or isinstance(model, BatchTopKSAE):
        found["threshold"] = (model.d_sae,)
    return found


def _subtracts(model: Any) -> bool:
    """Whether b_dec is subtracted from x before it is encoded."""
    return not isinstance(model, JumpReLUSAE | Transcoding)


def _settings(kind: type[Any]) -> tuple[str, ...]:
    """The arguments of a class that say how it trains, and that no layout holds: they are written under this package's
    name."""
    given = [found for base in kind.__mro__ for found in signature(base).parameters.values()]
    held = {"d_in", "d_sae", "skip", "dtype", "device"}
    names = (found.name for found in given if found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY))
    return tuple(dict.fromkeys(name for name in names if name not in held))


def _nested(kind: type[Model], metadata: dict[str, Any] | None) -> type[Any]:
    """The class, or the one with nested widths that `save_sae` wrote in its place."""
    nested = MatryoshkaSAE if kind is TopKSAE else MatryoshkaBatchTopKSAE
    return nested if "widths" in _given(nested, metadata) else kind


def _given(kind: type[Model], metadata: dict[str, Any] | None) -> dict[str, Any]:
    """The settings that `save_sae` wrote; a file of SAELens has none."""
    found = (metadata or {}).get("gossamer") or {}
    return {name: found[name] for name in _settings(kind) if name in found}


def _given_by_sae_lens(kind: type[Model], config: dict[str, Any]) -> dict[str, Any]:
    """Of the settings that SAELens trained with those that the module has. They go before those that `save_sae` wrote:
    where a file has both, SAELens wrote it last, for `save_sae` keeps none of SAELens's."""
    # A file for inference has them in the metadata alone.
    trained = ((config.get("metadata") or {}).get("training_architecture_details") or {}) | config
    names = {theirs: ours for theirs, ours in _SETTINGS_OF_SAE_LENS.items() if ours in _settings(kind)}
    found = {ours: trained[theirs] for theirs, ours in names.items() if theirs in trained}
    if "pre_act_coefficient" in found:
        found["pre_act_coefficient"] = found["pre_act_coefficient"] or 0.0
    if found.get("penalty", "quadratic") != "quadratic":
        # SAELens does not look at it then, and the module takes none.
        found["target_l0"] = None
    return found


def _sizes(operator: str, folder: Path, config: dict[str, Any], *names: str) -> dict[str, int]:
    for name in names:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{operator}: {folder / _CONFIG} must have {name}, an int of at least 1, got {value!r}.")
    return {name: config[name] for name in names}


def _folded(model: SparseAutoencoder, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module's state: SAELens's steps on inputs and selections are folded into the weights."""
    tensors = dict(tensors)
    wide = {name: t.to(torch.promote_types(t.dtype, torch.float32)) for name, t in tensors.items()}
    if config.get("rescale_acts_by_decoder_norm", False):
        norms = wide["W_dec"].norm(dim=1).clamp(min=1e-8)
        wide["W_enc"], wide["b_enc"] = wide["W_enc"] * norms, wide["b_enc"] * norms
        wide["W_dec"] = wide["W_dec"] / norms[:, None]
        # As they will be in the module, so that the thresholds and biases below fit them.
        wide |= {name: wide[name].to(model.W_enc.dtype).to(wide[name].dtype) for name in ("W_enc", "W_dec")}
        tensors |= {name: wide[name] for name in ("W_enc", "W_dec", "b_enc")}
    subtracts = _subtracts(model)
    if config.get("apply_b_dec_to_input", True) != subtracts:
        shift = wide["b_dec"] @ wide["W_enc"] * (1 if subtracts else -1)
        for name in {"b_enc", "b_gate", "b_mag"} & tensors.keys():
            tensors[name] = wide[name] + (shift * wide["r_mag"].exp() if name == "b_mag" else shift)
    if isinstance(model, JumpReLUSAE):
        # Below 0 a threshold acts as 0, which has no logarithm; nothing lies between 0 and this.
        threshold = wide["threshold"].clamp(min=torch.finfo(torch.float32).tiny)
        tensors["log_threshold"] = threshold.to(model.log_threshold.dtype).log()
    if isinstance(model, BatchTopKSAE):
        tensors["threshold"] = tensors["threshold"][0]
    return {name: t for name, t in tensors.items() if name in {"b_enc", "b_dec", *model.state_dict()}}


def _read(operator: str, file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{operator}: {file} is not a whole safetensors file: {error}.") from error


def _write(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    _replace(file, lambda path: save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, path, metadata))


def _replace(file: Path, write: Callable[[Path], Any]) -> None:
    # Several ranks may write the same file.
    files.write_whole("nn.save_sae", file, write, file.with_name(f".{file.name}.{os.getpid()}"))

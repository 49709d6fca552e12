"""Autoencoders on disk, in the layouts of SAELens and of EleutherAI's sparsify: JSON and safetensors, no pickle."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gossamer._core import checks
from gossamer.nn.distributed import Sharded
from gossamer.nn.sae import _SAE, BatchTopKSAE, JumpReLUSAE, TopKSAE

_CONFIG = "cfg.json"
_SAE_LENS, _SPARSIFY, _TRAINING = "sae_weights.safetensors", "sae.safetensors", "training_state.safetensors"
_STATISTICS = ("firing_counts", "steps_since_fired")
_NEUTRAL = {"normalize_activations": "none", "reshape_activations": "none"}


Model = TopKSAE | BatchTopKSAE | JumpReLUSAE


def save(model: Model, folder: str | Path, *, layout: str = "sae_lens") -> None:
    """Writes an autoencoder where `load`, and the library whose layout it is, find it.

    Args:
        model: the autoencoder, on any device.
        folder: made if it is not there; files of the same names are replaced, each whole or not at all.
        layout: `"sae_lens"` writes `cfg.json`, `sae_weights.safetensors` (`log_threshold` as `threshold`; BatchTopK as
            the JumpReLU that it is when it is not trained), and beside them `training_state.safetensors` with the
            firing statistics, which SAELens does not read. `"sparsify"` writes `cfg.json` and `sae.safetensors`, for
            `TopKSAE` alone.

    Raises:
        TypeError: model is no autoencoder of this package, or a slice of one (`shard`).
        ValueError: an unknown layout, or one that has no place for the model.

    Source: SAELens's `save_model` and sparsify's `save_to_disk`.

    >>> import tempfile
    >>> save(TopKSAE(4, 16, k=2), tempfile.mkdtemp())
    """
    operator = "nn.save"
    if not isinstance(model, Model):
        raise TypeError(f"{operator}: model must be an autoencoder of gossamer.nn, got {type(model).__name__}.")
    if isinstance(model, Sharded):
        raise TypeError(f"{operator}: model holds a slice of its latents, as nn.shard made it. Save model.gathered().")
    if layout not in ("sae_lens", "sparsify"):
        raise ValueError(f'{operator}: layout must be "sae_lens" or "sparsify", got {layout!r}.')
    if layout == "sparsify" and not isinstance(model, TopKSAE):
        raise ValueError(f'{operator}: layout="sparsify" has no place for thresholds. Use layout="sae_lens".')
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach() for name, t in model.state_dict().items() if name not in _STATISTICS}
    if layout == "sparsify":
        tensors = {
            "encoder.weight": tensors["W_enc"].t(),
            "encoder.bias": tensors["b_enc"],
            "W_dec": tensors["W_dec"],
            "b_dec": tensors["b_dec"],
        }
        _write(folder / _SPARSIFY, tensors)
        config = {"activation": "topk", "d_in": model.d_in, "expansion_factor": model.d_sae / model.d_in}
        config |= {"normalize_decoder": False, "num_latents": model.d_sae, "k": model.k, "multi_topk": False}
        config |= {"skip_connection": False, "transcode": False}
    else:
        if isinstance(model, JumpReLUSAE):
            del tensors["log_threshold"]
            tensors["threshold"] = model.threshold.detach()
            config = {"architecture": "jumprelu", "apply_b_dec_to_input": False}
            training = {name: getattr(model, name) for name in ("bandwidth", "l0_coefficient", "capacity")}
        elif isinstance(model, BatchTopKSAE):
            tensors["threshold"] = model.threshold.expand(model.d_sae)
            config = {"architecture": "jumprelu", "apply_b_dec_to_input": True}
            training = {name: getattr(model, name) for name in ("k", "threshold_rate", "capacity")}
        else:
            config = {"architecture": "topk", "apply_b_dec_to_input": True, "k": model.k}
            config["rescale_acts_by_decoder_norm"] = False
            training = {}
        _write(folder / _SAE_LENS, tensors)
        statistics = {name: getattr(model, name) for name in _STATISTICS}
        _write(folder / _TRAINING, statistics, {"weights": _digest(folder / _SAE_LENS)})
        config |= {"d_in": model.d_in, "d_sae": model.d_sae, "dtype": checks.name_of(model.W_dec.dtype)}
        # The version says which form the file has: before 6 it was another.
        config |= {"device": "cpu", **_NEUTRAL, "metadata": {"sae_lens_version": "6.49.0", "gossamer": training}}
    _replace(folder / _CONFIG, lambda path: path.write_text(json.dumps(config, indent=1) + "\n"))


def load(folder: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Model:
    """Reads an autoencoder that `save`, SAELens or sparsify wrote.

    Args:
        folder: with `cfg.json` beside `sae_weights.safetensors` (SAELens) or `sae.safetensors` (sparsify).
        device: of the parameters; None takes PyTorch's default.
        dtype: of the weights; None takes the file's. Biases and thresholds are float32 at least.

    Returns:
        `TopKSAE`; `JumpReLUSAE`, which is also what SAELens makes of a BatchTopK SAE; or `BatchTopKSAE`, where `save`
            wrote one. Whether b_dec is subtracted
        from the input, and decoder norms that rescale the selection, are folded into b_enc and the weights: the
        function is the same. What only training needs (bandwidth, statistics) is what the files say, or the default.

    Raises:
        FileNotFoundError: no such files.
        ValueError: an architecture or setting that these modules do not have, sizes that differ between the files, or
            a file that is cut short.
        TypeError: a dtype that is not floating.

    Source: SAELens's `load_from_disk` and sparsify's `load_from_disk`.

    >>> import tempfile; folder = tempfile.mkdtemp()
    >>> save(TopKSAE(4, 16, k=2), folder); load(folder)
    TopKSAE(d_in=4, d_sae=16, k=2)
    """
    operator = "nn.load"
    folder = Path(folder)
    checks.float_dtype(operator, "dtype", dtype, "Biases and thresholds are float32 at least in any case.")
    there = [name for name in (_SAE_LENS, _SPARSIFY) if (folder / name).is_file()]
    if not there or not (folder / _CONFIG).is_file():
        raise FileNotFoundError(f"{operator}: {folder} must hold {_CONFIG} and {_SAE_LENS} or {_SPARSIFY}.")
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
    make, wanted = read(operator, folder, config, tensors)
    for name, shape in wanted.items():
        if name not in tensors or tensors[name].shape != shape:
            got = list(tensors[name].shape) if name in tensors else "nothing"
            raise ValueError(f"{operator}: {weights} must hold {name} {list(shape)} by {_CONFIG}, got {got}.")
    unused = sorted(tensors.keys() - wanted.keys())
    if unused:
        raise ValueError(f"{operator}: {weights} holds {unused[0]}, with which these modules do nothing.")
    dtype = dtype or torch.promote_types(tensors["W_enc"].dtype, tensors["W_dec"].dtype)
    model = make(dtype=dtype, device=device)
    model.load_state_dict(_folded(model, config, tensors), strict=False)
    statistics = folder / _TRAINING
    if weights.name == _SAE_LENS and statistics.is_file() and _written_with(statistics, weights):
        model.load_state_dict(_read(operator, statistics), strict=False)
    return model


def _digest(weights: Path) -> str:
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def _written_with(statistics: Path, weights: Path) -> bool:
    """Whether the weights beside the statistics are those that they were counted with."""
    try:
        with safe_open(statistics, framework="pt") as file:
            return (file.metadata() or {}).get("weights") == _digest(weights)
    except SafetensorError:
        return False


_Made = tuple[Callable[..., Model], dict[str, tuple[int, ...]]]


def _from_sae_lens(operator: str, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> _Made:
    """What makes the module, and the tensors and shapes that it needs."""
    architecture = config.get("architecture")
    for name, value in {**_NEUTRAL, "finetuning_scaling_factor": False}.items():
        if config.get(name, value) != value:
            raise ValueError(
                f"{operator}: {folder / _CONFIG} has {name} = {config[name]!r}, which these modules do not do. "
                "Load it with SAELens and use integrations.sae_lens.patch."
            )
    d_in, d_sae = _sizes(operator, folder, config, "d_in", "d_sae")
    wanted: dict[str, tuple[int, ...]] = {"W_enc": (d_in, d_sae), "W_dec": (d_sae, d_in)}
    wanted |= {"b_enc": (d_sae,), "b_dec": (d_in,)}
    if architecture == "topk":
        (k,) = _sizes(operator, folder, config, "k")
        return lambda **options: TopKSAE(d_in, d_sae, k, **options), wanted
    if architecture == "jumprelu":
        training = (config.get("metadata") or {}).get("gossamer") or {}
        if "k" in training:
            wanted |= {"threshold": (d_sae,)}
            return lambda **options: BatchTopKSAE(d_in, d_sae, **training, **options), wanted
        given = {name: training[name] for name in ("bandwidth", "l0_coefficient", "capacity") if name in training}
        return lambda **options: JumpReLUSAE(d_in, d_sae, **given, **options), wanted | {"threshold": (d_sae,)}
    raise ValueError(
        f'{operator}: {folder / _CONFIG} has architecture = {architecture!r}; these modules are "topk" and "jumprelu". '
        "Load it with SAELens and use integrations.sae_lens.patch."
    )


def _from_sparsify(operator: str, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> _Made:
    for name, neutral in {
        "activation": "topk",
        "transcode": False,
        "skip_connection": False,
        "signed": False,
    }.items():
        if config.get(name, neutral) != neutral:
            raise ValueError(
                f"{operator}: {folder / _CONFIG} has {name} = {config[name]!r}, which these modules do not do."
            )
    d_in, k = _sizes(operator, folder, config, "d_in", "k")
    d_sae = config.get("num_latents") or round(d_in * config.get("expansion_factor", 0))
    for old, new in {"encoder.weight": "W_enc", "encoder.bias": "b_enc"}.items():
        if old in tensors:
            tensors[new] = tensors.pop(old).t() if new == "W_enc" else tensors.pop(old)
    # In both libraries it is subtracted from the input.
    config["apply_b_dec_to_input"] = True
    wanted = {"W_enc": (d_in, d_sae), "W_dec": (d_sae, d_in), "b_enc": (d_sae,), "b_dec": (d_in,)}
    return lambda **options: TopKSAE(d_in, d_sae, k, **options), wanted


def _sizes(operator: str, folder: Path, config: dict[str, Any], *names: str) -> list[int]:
    for name in names:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{operator}: {folder / _CONFIG} must have {name}, an int of at least 1, got {value!r}.")
    return [config[name] for name in names]


def _folded(model: _SAE, config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module's state: what SAELens does to inputs and selections, in the weights."""
    tensors = dict(tensors)
    wide = {name: t.to(torch.promote_types(t.dtype, torch.float32)) for name, t in tensors.items()}
    if config.get("rescale_acts_by_decoder_norm", False):
        norms = wide["W_dec"].norm(dim=1).clamp(min=1e-8)
        wide["W_enc"], wide["b_enc"] = wide["W_enc"] * norms, wide["b_enc"] * norms
        wide["W_dec"] = wide["W_dec"] / norms[:, None]
        # As they will be in the module: what is folded below has to fit that.
        wide |= {name: wide[name].to(model.W_enc.dtype).to(wide[name].dtype) for name in ("W_enc", "W_dec")}
        tensors |= {name: wide[name] for name in ("W_enc", "W_dec", "b_enc")}
    subtracts = not isinstance(model, JumpReLUSAE)
    if config.get("apply_b_dec_to_input", True) != subtracts:
        shift = wide["b_dec"] @ wide["W_enc"]
        tensors["b_enc"] = wide["b_enc"] + (shift if subtracts else -shift)
    if isinstance(model, JumpReLUSAE):
        # Below 0 a threshold acts as 0, which has no logarithm; nothing lies between 0 and this.
        threshold = wide["threshold"].clamp(min=torch.finfo(torch.float32).tiny)
        tensors["log_threshold"] = threshold.to(model.log_threshold.dtype).log()
    if isinstance(model, BatchTopKSAE):
        tensors["threshold"] = tensors["threshold"][0]
    return {name: t for name, t in tensors.items() if name in model.state_dict()}


def _read(operator: str, file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{operator}: {file} is not a whole safetensors file: {error}.") from error


def _write(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    _replace(file, lambda path: save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, path, metadata))


def _replace(file: Path, write: Callable[[Path], Any]) -> None:
    """Writes beside the file and moves it there, so that a killed run leaves the old file or the new one."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        write(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)

"""Transcoders on disk in circuit-tracer's layout: tensors alone, with ReLU or with thresholds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.nn.cross_layer import CrossLayerTranscoder
from gossamer.nn.transcoder import BatchTopKTranscoder, JumpReLUTranscoder, Transcoding

FIRST = "W_enc_0.safetensors"
_NESTED = "activation_function.threshold"
"""The name of the thresholds in the file of one transcoder."""


def tensors_of(operator: str, model: Any, path: Path) -> dict[Path, dict[str, Tensor]]:
    """The files of a transcoder, which is one, or of a `CrossLayerTranscoder`, which are two a layer in a folder."""
    if not isinstance(model, CrossLayerTranscoder):
        found = _encoder(operator, model) | {"W_dec": model.W_dec, "b_dec": model.b_dec}
        if path.suffix != ".safetensors" or path.is_dir():
            raise ValueError(f"{operator}: folder must be a .safetensors file for one transcoder, got {path}.")
        found[_NESTED] = found.pop("threshold")
        return {path: found if model.W_skip is None else found | {"W_skip": model.W_skip}}
    made: dict[Path, dict[str, Tensor]] = {}
    biases = model.layers[0].b_dec.unflatten(0, (len(model.layers), -1))
    for i, (layer, b_dec) in enumerate(zip(model.layers, biases)):
        if layer.W_skip is not None:
            raise ValueError(f'{operator}: layout="circuit_tracer" has no place for W_skip of layers[{i}].')
        encoder = _encoder(operator, layer) | {"b_dec": b_dec}
        made[path / f"W_enc_{i}.safetensors"] = {f"{name}_{i}": tensor for name, tensor in encoder.items()}
        W_dec = layer.W_dec.unflatten(1, (len(model.layers) - i, -1))
        made[path / f"W_dec_{i}.safetensors"] = {f"W_dec_{i}": W_dec}
    _refuse_spare(operator, path, {*made})
    return made


def _refuse_spare(operator: str, folder: Path, known: set[Path]) -> None:
    if spare := sorted({*folder.glob("W_???_*.safetensors")} - known):
        raise ValueError(
            f"{operator}: {folder} holds {spare[0].name}, of a transcoder with more layers. Remove it, or name another "
            "folder."
        )


def _encoder(operator: str, layer: Any) -> dict[str, Tensor]:
    if not isinstance(layer, Transcoding):
        raise TypeError(f"{operator}: model must be a transcoder of gossamer.nn, got {type(layer).__name__}.")
    if not isinstance(layer, JumpReLUTranscoder | BatchTopKTranscoder):
        raise ValueError(
            f'{operator}: layout="circuit_tracer" has thresholds, and no place for a {type(layer).__name__}. It is for '
            "JumpReLUTranscoder, BatchTopKTranscoder and a CrossLayerTranscoder of these."
        )
    if layer.sharded:
        raise TypeError(f"{operator}: model holds a slice of its latents, by nn.shard_sae. Save model.gathered().")
    return {"W_enc": layer.W_enc.t(), "b_enc": layer.b_enc, "threshold": layer.threshold.expand(layer.d_sae)}


def load(operator: str, read: Callable[[Path], dict[str, Tensor]], path: Path, **options: Any) -> Any:
    """A `JumpReLUTranscoder` of a file, or a `CrossLayerTranscoder` of a folder."""
    folder = path.parent if path.is_file() else path
    if (folder / "cfg.json").exists():
        raise ValueError(
            f"{operator}: {path} would be of circuit-tracer's layout, but cfg.json of another lies beside it. Give the "
            "folder of that, or move one of them."
        )
    if path.is_file():
        # The short name is that of a folder's files.
        names = {_NESTED: "threshold", "threshold": "threshold of another layout"}
        return _transcoder(operator, path, {names.get(name, name): t for name, t in read(path).items()}, **options)
    count = 1
    layers: list[dict[str, Tensor]] = []
    while len(layers) < count:
        i, layer = len(layers), dict[str, Tensor]()
        for side in ("W_dec", "W_enc"):
            file = path / f"{side}_{i}.safetensors"
            if not file.is_file():
                raise ValueError(f"{operator}: {path} must hold {file.name} of a transcoder of {count} layers.")
            layer |= {name.removesuffix(f"_{i}"): tensor for name, tensor in read(file).items()}
        W_dec = layer.get("W_dec", torch.empty(0))
        count = count if i or W_dec.dim() != 3 else W_dec.shape[1]
        if W_dec.dim() != 3 or W_dec.shape[1] != count - i:
            raise ValueError(
                f"{operator}: {path / f'W_dec_{i}.safetensors'} must hold W_dec_{i} [d_sae, {count - i}, d], got "
                f"{list(W_dec.shape)}."
            )
        layers.append(layer | {"W_dec": W_dec.flatten(1)})
    _refuse_spare(
        operator, path, {path / f"{side}_{i}.safetensors" for side in ("W_enc", "W_dec") for i in range(count)}
    )
    biases = [layer.pop("b_dec", torch.empty(0)) for layer in layers]
    for i, layer in enumerate(layers):
        layer["b_dec"] = torch.cat(biases if i == 0 else [torch.zeros_like(bias) for bias in biases[i:]])
    made = [_transcoder(operator, path / f"W_enc_{i}.safetensors", layer, **options) for i, layer in enumerate(layers)]
    return CrossLayerTranscoder(made)


def _transcoder(
    operator: str, file: Path, found: dict[str, Tensor], dtype: torch.dtype | None, device: Any
) -> JumpReLUTranscoder:
    empty = torch.empty(0, 0)
    W_enc, W_dec = (found.get(name, empty) for name in ("W_enc", "W_dec"))
    d_sae, d_in, d_out = W_enc.shape[0], W_enc.shape[-1], W_dec.shape[-1]
    wanted = {"W_enc": (d_sae, d_in), "W_dec": (d_sae, d_out), "b_enc": (d_sae,), "b_dec": (d_out,)}
    wanted |= {name: shape for name, shape in (("threshold", (d_sae,)), ("W_skip", (d_out, d_in))) if name in found}
    for name in sorted({*wanted, *found}):
        if name not in found or wanted.get(name) != found[name].shape:
            raise ValueError(
                f"{operator}: {file} must hold {', '.join(f'{key} {list(size)}' for key, size in wanted.items())} in "
                f"circuit-tracer's layout, got {name} {list(found[name].shape) if name in found else 'missing'}."
            )
    # Without thresholds it is ReLU: nothing lies between 0 and this.
    least = torch.finfo(torch.float32).tiny
    threshold = found.pop("threshold", torch.zeros(d_sae))
    if bool((threshold < 0).any()):
        raise ValueError(f"{operator}: {file} must hold thresholds of at least 0, got {float(threshold.min()):g}.")
    dtype = dtype or torch.promote_types(W_enc.dtype, W_dec.dtype)
    model = JumpReLUTranscoder(d_in, d_out, d_sae, skip="W_skip" in found, dtype=dtype, device=device)
    log_threshold = threshold.to(model.log_threshold.dtype).clamp(min=least).log()
    model.load_state_dict(found | {"W_enc": W_enc.t(), "log_threshold": log_threshold}, strict=False)
    return model

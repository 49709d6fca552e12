"""Transcoders on disk in circuit-tracer's layout: tensors alone, with ReLU or with thresholds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.nn.cross_layer import CrossLayerTranscoder
from gossamer.nn.transcoder import BatchTopKTranscoder, JumpReLUTranscoder

_NESTED = "activation_function.threshold"
"""The name of the thresholds in the file of one transcoder."""


def tensors_of(operator: str, model: Any, path: Path) -> dict[Path, dict[str, Tensor]]:
    """The files of a transcoder, which is one, or of a `CrossLayerTranscoder`, which are two a layer in a folder."""
    if not isinstance(model, CrossLayerTranscoder):
        found = _encoder(operator, model) | {"W_dec": model.W_dec, "b_dec": model.b_dec}
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
    return made


def _encoder(operator: str, layer: Any) -> dict[str, Tensor]:
    if not isinstance(layer, JumpReLUTranscoder | BatchTopKTranscoder):
        raise ValueError(
            f'{operator}: layout="circuit_tracer" has thresholds, and no place for a {type(layer).__name__}. It is for '
            "JumpReLUTranscoder, BatchTopKTranscoder and a CrossLayerTranscoder of these."
        )
    if layer.sharded:
        raise TypeError(f"{operator}: model holds a slice of its latents, by nn.shard_sae. Save model.gathered().")
    return {"W_enc": layer.W_enc.t(), "b_enc": layer.b_enc, "threshold": layer.threshold.expand(layer.d_sae)}


def load(read: Callable[[Path], dict[str, Tensor]], path: Path, **options: Any) -> Any:
    """A `JumpReLUTranscoder` of a file, or a `CrossLayerTranscoder` of a folder."""
    if path.is_file():
        found = read(path)
        return _transcoder(found | {"threshold": found.pop(_NESTED)} if _NESTED in found else found, **options)
    count = len([*path.glob("W_enc_*.safetensors")])
    parts = [
        {name.removesuffix(f"_{i}"): tensor for name, tensor in read(path / f"{side}_{i}.safetensors").items()}
        for i in range(count)
        for side in ("W_enc", "W_dec")
    ]
    layers = [encoder | decoder for encoder, decoder in zip(parts[::2], parts[1::2])]
    biases = torch.cat([layer["b_dec"] for layer in layers])
    for i, layer in enumerate(layers):
        layer["W_dec"] = layer["W_dec"].flatten(1)
        layer["b_dec"] = torch.zeros_like(biases[: layer["W_dec"].shape[1]]) if i else biases
    return CrossLayerTranscoder(_transcoder(layer, **options) for layer in layers)


def _transcoder(found: dict[str, Tensor], dtype: torch.dtype | None, device: Any) -> JumpReLUTranscoder:
    (d_sae, d_in), d_out = found["W_enc"].shape, found["W_dec"].shape[1]
    dtype = dtype or torch.promote_types(found["W_enc"].dtype, found["W_dec"].dtype)
    model = JumpReLUTranscoder(d_in, d_out, d_sae, skip="W_skip" in found, dtype=dtype, device=device)
    # Without thresholds it is ReLU: nothing lies between 0 and this.
    least = torch.finfo(torch.float32).tiny
    threshold = found.pop("threshold", torch.full((d_sae,), least)).to(model.log_threshold.dtype)
    state = found | {"W_enc": found["W_enc"].t(), "log_threshold": threshold.clamp(min=least).log()}
    model.load_state_dict(model.state_dict() | state)
    return model

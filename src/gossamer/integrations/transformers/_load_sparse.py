"""Checkpoints of "Sparser, Faster, Lighter Transformer Language Models" as plain models of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

_OPERATOR = "integrations.transformers.load_sparse"
_GATED = {"llama_sparse_relu": "Llama", "qwen2_sparse_relu": "Qwen2"}
_PLAIN = {"llama_sparse_relu": "Arcee"}
_DOWN = "mlp.down_proj.weight"


def load_sparse(
    folder: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> torch.nn.Module:
    """A model that the paper's code saved, for `patch(model, sparse=True)`.

    The code saves a `SparseLlamaForCausalLM` whose configuration names SiLU though its blocks are ReLU, with tensors
    of its tracker, and with transposed down projections where its hybrid kernels were in use. The result is a
    `LlamaForCausalLM` with ReLU (Qwen2 likewise; an `ArceeForCausalLM` where blocks have no gate), whose
    `save_pretrained` writes files for `from_pretrained`.

    Args:
        folder: with `config.json` and `model.safetensors`, whole or in shards.
        dtype: of the parameters; None takes the checkpoint's.
        device: of the parameters.

    Returns:
        The model in evaluation mode.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: another kind of checkpoint; a tensor that is missing, left over, of another shape or not finite.
        ImportError: transformers is not installed.

    Source: the paper's released code, `custom_models/sparse_models.py`.

    >>> patch(load_sparse("sparse-1.5b"), sparse=True)  # doctest: +SKIP
    """
    import transformers

    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    sparsity = {name: config.pop(name) for name in list(config) if name.startswith("sparsity_")}
    gated = sparsity.get("sparsity_gated_mlp", True)
    kind = (_GATED if gated else _PLAIN).get(config.pop("model_type", ""))
    if kind is None:
        known = ", ".join(_GATED)
        raise ValueError(
            f"{_OPERATOR}: folder must hold a checkpoint of model_type {known} with a gate, or {', '.join(_PLAIN)} "
            f"without, got {folder / 'config.json'}. AutoModelForCausalLM.from_pretrained reads plain models."
        )
    config |= {"hidden_act": "relu", "architectures": [f"{kind}ForCausalLM"]}
    config["intermediate_size"] = sparsity.get("sparsity_new_intermediate_size") or config["intermediate_size"]
    for name in ("auto_map", "torch_dtype", "dtype"):
        config.pop(name, None)
    with torch.device("meta"):
        made: Any = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**config))
    tensors = _tensors(folder)
    if made.config.tie_word_embeddings:
        tensors.setdefault("lm_head.weight", tensors.get("model.embed_tokens.weight", torch.empty(0)))
    wanted = {name: parameter.shape for name, parameter in made.named_parameters(remove_duplicate=False)}
    transposed = gated and bool(sparsity.get("sparsity_use_hybrid_kernel", False))
    for name, tensor in tensors.items():
        shape = wanted.get(name)
        # The shape of a square one says nothing; the configuration tells whether the code transposed.
        square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]
        if name.endswith(_DOWN) and (transposed if square else tensor.shape[::-1] == shape):
            tensors[name] = tensor.t().contiguous()
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{_OPERATOR}: {name} must be finite, got NaN or Inf in it.")
    first = next(iter(tensors.values())).dtype if dtype is None else dtype
    # Buffers, which checkpoints do not have, are made anew.
    made = type(made)(made.config).to(first)
    try:
        made.load_state_dict({name: tensor.to(first) for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise ValueError(f"{_OPERATOR}: the checkpoint must hold the model's tensors: {error}") from None
    made.tie_weights()
    return made.to(device).eval()


def _tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found: dict[str, Tensor] = {}
    for name in names:
        try:
            found |= load_file(folder / name)
        except SafetensorError as error:
            raise ValueError(f"{_OPERATOR}: {folder / name} is corrupt or truncated: {error}.") from error
    return {name: tensor for name, tensor in found.items() if "tracker." not in name}

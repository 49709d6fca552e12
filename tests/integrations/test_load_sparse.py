"""Checkpoints as the paper's code saves them, made from models of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

pytest.importorskip("transformers")

import transformers

from gossamer.integrations.transformers import load_sparse, patch

pytestmark = pytest.mark.native
SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
IDS = torch.arange(12).view(2, 6)


def reference(kind: str = "Llama", **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes}, hidden_act="relu")
    return getattr(transformers, f"{kind}ForCausalLM")(config).double().eval()


def saved(folder: Path, model: Any, *, transposed: bool = False, gated: bool = True, **others: Any) -> Path:
    """The folder that the paper's code would have written for a model."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if transposed and "down_proj" in name:
            tensors[name] = tensors[name].t().contiguous()
    tensors["tracker._last_activated.0"] = torch.zeros(24, dtype=torch.int64)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    base = config["model_type"] if gated else "llama"
    config |= {"model_type": f"{base}_sparse_relu", "architectures": ["SparseLlamaForCausalLM"], "hidden_act": "silu"}
    config |= {"sparsity_gated_mlp": gated, "sparsity_use_hybrid_kernel": transposed, "sparsity_l1_coeff": 2e-5}
    (folder / "config.json").write_text(json.dumps(config | others))
    return folder


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"intermediate_size": 16}, {"tie_word_embeddings": False}])
def test_it_computes_what_was_saved(tmp_path: Path, sizes: dict[str, Any], transposed: bool) -> None:
    model = reference(**sizes)
    found: Any = load_sparse(saved(tmp_path, model, transposed=transposed))
    assert type(found) is transformers.LlamaForCausalLM and found.config.hidden_act == "relu"
    torch.testing.assert_close(found(IDS).logits, model(IDS).logits)
    if transposed and "intermediate_size" not in sizes:
        # The flag may be lost: a block that is not square tells by its shape.
        saved(tmp_path, model, transposed=True, sparsity_use_hybrid_kernel=False)
        torch.testing.assert_close(load_sparse(tmp_path)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("kind, gated", [("Qwen2", True), ("Arcee", False)])
def test_other_kinds(tmp_path: Path, kind: str, gated: bool) -> None:
    model = reference(kind)
    found: Any = load_sparse(saved(tmp_path, model, gated=gated))
    assert type(found).__name__ == f"{kind}ForCausalLM"
    torch.testing.assert_close(found(IDS).logits, model(IDS).logits)


def test_patch_makes_it_sparse_and_it_saves_as_a_plain_model(tmp_path: Path) -> None:
    model = reference()
    found: Any = load_sparse(saved(tmp_path / "paper", model), dtype=torch.float32)
    assert len(patch(found, sparse=True).sparse) == 2
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, model(IDS).logits.float(), rtol=1e-4, atol=1e-5)
    found.save_pretrained(tmp_path / "plain")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits.float(), rtol=1e-4, atol=1e-5)
    gate = F.relu(again.model.layers[0].mlp.gate_proj(torch.randn(5, 16)))
    assert (gate == 0).any()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = reference()
    folder = saved(tmp_path, model)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"

    def written(**changed: torch.Tensor | None) -> Path:
        kept = {key: value for key, value in (tensors | changed).items() if value is not None}
        save_file(kept, folder / "model.safetensors")
        return folder

    for changed, message in (
        ({name: None}, r"must hold the model's tensors: .*\n\s*Missing key.*up_proj"),
        ({"model.other": torch.zeros(1)}, r"\n\s*Unexpected key.*model\.other"),
        ({name: torch.zeros(25, 16)}, r"\n\s*size mismatch for .*up_proj"),
        ({name: torch.full((24, 16), torch.nan)}, "must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            load_sparse(written(**changed))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="corrupt or truncated"):
        load_sparse(folder)
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):
        load_sparse(folder)

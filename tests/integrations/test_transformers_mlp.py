"""integrations.transformers.patch on models of transformers with small random configurations."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from gossamer.integrations.transformers import patch, unpatch  # noqa: E402
from gossamer.testing import assert_close  # noqa: E402

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8},
    "Gemma3": {"head_dim": 8},
    "Phi3": {},
}
KINDS["Llama, biased"] = {"mlp_bias": True, "hidden_act": "gelu_new"}
T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 72, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}


def make(kind: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    name = kind.split(",")[0]
    if name == "T5":
        config = transformers.T5Config(**T5, feed_forward_proj="gated-gelu", decoder_start_token_id=0, pad_token_id=0)
        return transformers.T5ForConditionalGeneration(config).to(device).eval()
    suffix = "TextConfig" if name == "Gemma3" else "Config"
    config = getattr(transformers, f"{name}{suffix}")(**SMALL, **KINDS[kind])
    return getattr(transformers, f"{name}ForCausalLM")(config).to(device).eval()


def tokens(device: torch.device) -> Tensor:
    return torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, **extra).logits


@pytest.mark.parametrize("kind", [*KINDS, "T5"])
def test_same_logits_and_generations(kind: str, device: torch.device) -> None:
    model, ids = make(kind, device), tokens(device)
    plain, exact = logits(model, ids), logits(copy.deepcopy(model).cpu().double(), ids.cpu()).to(device)
    text = model.generate(ids, max_new_tokens=12, do_sample=False)
    keys = list(model.state_dict())
    report = patch(model)
    assert len(report.replaced) == (4 if kind == "T5" else 2) and not report.left
    assert f"{len(report.replaced)} with gate and up in one product" in str(report)
    assert_close(logits(model, ids), reference64=exact, plain=plain)
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), text)
    assert list(model.state_dict()) == keys
    with pytest.raises(ValueError, match="patched already"):
        patch(model)
    unpatch(model)
    assert torch.equal(logits(model, ids), plain)
    with pytest.raises(ValueError, match="not patched"):
        unpatch(model)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["Llama, biased", "Phi3"])
def test_same_gradients(kind: str, recompute: bool, device: torch.device) -> None:
    model, ids = make(kind, device).train(), tokens(device)
    grads = []
    for turn in range(2):
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        grads.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        if not turn:
            patch(model, recompute=recompute)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-3, atol=1e-6, msg=name)


def test_a_copy_and_a_saved_model(device: torch.device, tmp_path: Path) -> None:
    model, ids = make("Llama", device), tokens(device)
    plain = logits(model, ids)
    patch(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(logits(other, ids), plain)
    other.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).to(device)
    torch.testing.assert_close(logits(again, ids), plain)
    assert len(patch(again).replaced) == 2
    unpatch(other)


def test_compiled(device: torch.device, compiled: Any) -> None:
    model, ids = make("Llama", device), tokens(device)
    patch(model)
    mlp, x = model.model.layers[0].mlp, torch.randn(3, 32, device=device)
    torch.testing.assert_close(compiled(mlp)(x), mlp(x))
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(input_ids=ids).logits, logits(model, ids))


class Adapter(nn.Linear):
    """Stands for the layers of adapters and quantisers, which are no plain `nn.Linear` either."""


def test_what_is_left(device: torch.device) -> None:
    model, ids = make("Llama", device), tokens(device)
    plain = logits(model, ids)
    first, second = (layer.mlp for layer in model.model.layers)
    first.up_proj.register_forward_hook(lambda module, args, out: out * 2)
    adapter = Adapter(32, 72, bias=False, device=device)
    second.gate_proj, kept = adapter, second.gate_proj
    report = patch(model)
    assert report.left == {
        "model.layers.0.mlp": "up_proj has a hook",
        "model.layers.1.mlp": "gate_proj is a Adapter, not a plain nn.Linear",
    }
    assert not report.replaced and "left as it is, up_proj has a hook" in str(report)
    second.gate_proj = kept
    second.act_fn, kept_act = transformers.activations.ACT2FN["quick_gelu"], second.act_fn
    assert "its activation is QuickGELUActivation" in patch(model).left["model.layers.1.mlp"]
    second.act_fn = kept_act
    first.up_proj._forward_hooks.clear()
    assert len(patch(model).replaced) == 2
    # What comes later is seen, too.
    seen = []
    second.up_proj.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    torch.testing.assert_close(logits(model, ids), plain)
    assert len(seen) == 1


def test_what_is_not_known(device: torch.device) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))

    assert patch(nn.Sequential(Other())).left == {"0": "Other is no class that is known here"}
    assert str(patch(nn.Linear(2, 2))) == "no gated MLP found"
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        patch("model")

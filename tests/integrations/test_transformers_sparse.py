"""integrations.transformers.patch(model, sparse=True) on models of transformers with small random configurations."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from gossamer.integrations.transformers import patch, unpatch  # noqa: E402
from gossamer.testing import assert_close  # noqa: E402
from tests.integrations.models import (  # noqa: E402
    SMALL,
    compare_gradients,
    exact_logits,
    gradients,
    logits,
    tokens,
)

MLP = {**SMALL, "intermediate_size": 72, "num_key_value_heads": 2}
T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 72, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.1}
M2M100 = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {**MLP, "hidden_act": "relu"}),
    "Llama, biased": ("Llama", {**MLP, "hidden_act": "relu2", "mlp_bias": True}),
    "Mistral": ("Mistral", {**MLP, "hidden_act": "relu"}),
    "Gemma": ("Gemma", {**MLP, "hidden_act": "relu", "head_dim": 8}),
    "Phi3": ("Phi3", {**MLP, "hidden_act": "relu"}),
    "Arcee": ("Arcee", {**MLP, "hidden_act": "relu2"}),
    "Nemotron": ("Nemotron", {**MLP, "hidden_act": "relu2", "mlp_bias": True}),
    "Jais2": ("Jais2", {**MLP, "hidden_act": "relu2"}),
    "NanoChat": ("NanoChat", {**MLP, "hidden_act": "relu2"}),
    "OPT": ("OPT", {**SMALL, "ffn_dim": 72, "word_embed_proj_dim": 32}),
    "OPT, norm after": ("OPT", {**SMALL, "ffn_dim": 32, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "T5": ("T5", {**T5, "feed_forward_proj": "relu", "decoder_start_token_id": 0, "pad_token_id": 0}),
    "T5, gated": ("T5", {**T5, "feed_forward_proj": "gated-relu", "decoder_start_token_id": 0, "pad_token_id": 0}),
    "M2M100": ("M2M100", {"vocab_size": 97, "d_model": 32, "encoder_ffn_dim": 72, "decoder_ffn_dim": 72, **M2M100}),
    "MT5": ("MT5", {**T5, "feed_forward_proj": "relu", "decoder_start_token_id": 0, "pad_token_id": 0}),
}
CLASSES = {"OPT": "OPTDecoderLayer", "T5": "T5DenseActDense", "T5, gated": "T5DenseGatedActDense"}


def make(kind: str, device: torch.device, **more: Any) -> Any:
    torch.manual_seed(0)
    name, options = CONFIGS[kind]
    suffix = "ForConditionalGeneration" if "T5" in name or "M2" in name else "ForCausalLM"
    config = getattr(transformers, f"{name}Config")(**{**options, **more})
    model = getattr(transformers, f"{name}{suffix}")(config).to(device).eval()
    with torch.no_grad():
        # Blocks that make a difference to what is generated.
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    return model


def blocks(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if "sparse_block" in module.__dict__]


@pytest.mark.parametrize("kind", CONFIGS)
def test_same_logits_and_generations(kind: str, device: torch.device) -> None:
    if not hasattr(transformers, f"{CONFIGS[kind][0]}Config"):
        pytest.skip("not in this version of transformers")
    model, ids = make(kind, device), tokens(device)
    plain, exact = logits(model, ids), exact_logits(model, ids)
    text = model.generate(ids, max_new_tokens=12, do_sample=False)
    keys = list(model.state_dict())
    report = patch(model, sparse=True)
    assert len(report.replaced) == len(report.sparse) == (4 if model.config.is_encoder_decoder else 2)
    assert not report.left
    for name in {CLASSES.get(kind)} - {None} or set(report.replaced.values()):
        count = list(report.replaced.values()).count(name)
        assert f"{name}: {count} sparse" in str(report)
    for method in ("gather", *["auto"] * 6):
        for module in blocks(model):
            module.sparse_block.method = method
        assert_close(logits(model, ids), reference64=exact, plain=plain)
        paths = {"gather", "fused", "dense"} if method == "auto" else {method, "dense"}
        assert {module.sparse_block.last_path for module in blocks(model)} <= paths
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), text)
    assert list(model.state_dict()) == keys
    unpatch(model)
    assert torch.equal(logits(model, ids), plain) and not blocks(model)


@pytest.mark.parametrize("kind", ["Llama", "OPT"])
def test_a_write_that_no_version_counts_is_seen(kind: str, device: torch.device) -> None:
    """As those of averaged weights and of home-made optimizers, through `.data`."""
    model, ids = make(kind, device), tokens(device)
    for name, parameter in model.named_parameters():
        if "gate_proj" in name or "fc1" in name:
            parameter.data[8:] = 0  # So few neurons are active that the CPU gathers, too.
    patch(model, sparse="gather")
    logits(model, ids)
    downs = [weight for name, weight in model.named_parameters() if name.endswith(("down_proj.weight", "fc2.weight"))]
    for write in (lambda w: w.data.mul_(1.5), lambda w: setattr(w, "data", w.data * 1.5)):
        for weight in downs:
            write(weight)
        patched = logits(model, ids)
        unpatched = copy.deepcopy(model)
        unpatch(unpatched)
        assert_close(patched, reference64=exact_logits(unpatched, ids), plain=logits(unpatched, ids))
    assert len(downs) == 2


@pytest.mark.parametrize("method", ["gather", "fused", "dense"])
@pytest.mark.parametrize("kind", ["Llama", "OPT", "T5"])
def test_16_bit(kind: str, method: str, device: torch.device) -> None:
    """T5 keeps a layer in float32 in float16, and not in bfloat16."""
    ids, model = tokens(device), make(kind, device).bfloat16()
    plain, exact = logits(model, ids), exact_logits(model, ids)
    patch(model, sparse=method)
    assert_close(logits(model, ids), reference64=exact, plain=plain)
    assert {module.sparse_block.last_path for module in blocks(model)} <= {method, "dense"}


@pytest.mark.parametrize("kind", ["Llama", "Phi3", "Arcee", "OPT", "T5", "T5, gated"])
def test_training(kind: str, device: torch.device) -> None:
    """The same dropout and the same gradients: a sparse block is for inference."""
    model, ids = make(kind, device).train(), tokens(device)
    grads = []
    for turn in range(2):
        model.zero_grad()
        torch.manual_seed(3)
        model(input_ids=ids, labels=ids).loss.backward()
        grads.append(gradients(model))
        if not turn:
            patch(model, sparse=True)
    compare_gradients(grads[1], grads[0], rtol=1e-3, atol=1e-5)
    # Gated blocks train on lists of their entries where these are few, and half of them are active here.
    assert all(module.sparse_block.last_path in (None, "dense", "fused") for module in blocks(model))


def test_dropout_without_gradients(device: torch.device) -> None:
    """In training mode T5 drops out inside of its block, OPT behind it."""
    for kind, paths in (("T5", {None}), ("OPT", {"gather"})):
        model, ids = make(kind, device).train(), tokens(device)
        torch.manual_seed(3)
        plain = logits(model, ids)
        patch(model, sparse="gather")
        torch.manual_seed(3)
        torch.testing.assert_close(logits(model, ids), plain)
        # Half of the neurons are active, so that a CPU multiplies all of a block.
        found = {module.sparse_block.last_path for module in blocks(model)}
        assert found == paths or (paths != {None} and found == {"dense"})


class Adapter(nn.Linear):
    """Stands for an adapted layer: it calls what it adapts, and adds to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, device=base.weight.device)
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + super().forward(x)


PARTS = {
    "Llama": ("gate_proj", "up_proj", "down_proj"),
    "Arcee": ("up_proj", "down_proj"),
    "OPT": ("fc1", "fc2"),
    "T5": ("wi", "wo"),
}
ACTIVATIONS = {"Llama": "act_fn", "Arcee": "act_fn", "OPT": "activation_fn", "T5": "act"}


@pytest.mark.parametrize("kind", PARTS)
def test_hooks_and_adapters_are_heeded(kind: str, device: torch.device) -> None:
    """Whatever comes to a part after patch, that block computes as its class does, and the others sparse."""
    model, ids = make(kind, device), tokens(device)
    patch(model, sparse=True)
    block, other = blocks(model)[:2]
    for name in (*PARTS[kind], ACTIVATIONS[kind]):
        seen: list[torch.Size] = []
        handle = getattr(block, name).register_forward_hook(lambda *args, seen=seen: seen.append(args[2].shape))
        block.sparse_block.density.last_path = other.sparse_block.density.last_path = None
        logits(model, ids)
        handle.remove()
        assert len(seen) == 1 and seen[0][-1] in (32, 72)
        assert block.sparse_block.last_path is None and other.sparse_block.last_path is not None
    for name in PARTS[kind]:
        kept = getattr(block, name)
        setattr(block, name, Adapter(kept))
        adapted = logits(model, ids)
        unpatch(model)
        assert torch.allclose(adapted, logits(model, ids), rtol=1e-4, atol=1e-4)
        patch(model, sparse=True)
        setattr(block, name, kept)
        assert not torch.allclose(adapted, logits(model, ids), rtol=1e-3, atol=1e-3)


def test_the_parts_of_a_layer_stay_what_they_are(device: torch.device) -> None:
    """fc1, the activation and fc2 of a patched OPT layer compute what they did when something else calls them."""
    model, x = make("OPT", device), torch.randn(3, 32, device=device)
    layer = model.model.decoder.layers[0]
    expected = layer.fc2(layer.activation_fn(layer.fc1(x)))
    patch(model, sparse=True)
    logits(model, tokens(device))
    assert torch.equal(layer.fc2(layer.activation_fn(layer.fc1(x))), expected)
    # What is recorded of a layer is what it was.
    states = model(tokens(device), output_hidden_states=True).hidden_states
    unpatch(model)
    for got, want in zip(states, model(tokens(device), output_hidden_states=True).hidden_states, strict=True):
        torch.testing.assert_close(got, want)


def test_what_is_left(device: torch.device) -> None:
    model = make("OPT", device, activation_function="gelu")
    why = "its activation is gelu, which leaves few entries 0"
    assert patch(model, sparse=True).left == {f"model.decoder.layers.{i}": why for i in range(2)}
    # Without `sparse`, and for a gate that lets everything through, nothing is new.
    with pytest.warns(UserWarning, match="patch: no feed-forward block found that can be replaced; known are"):
        assert not patch(make("OPT", device, activation_function="gelu")).replaced
    for kind, first, count, name in (
        ("OPT", "model.decoder.layers.0", 1, "OPTDecoderLayer"),
        ("T5", "encoder.block.0.layer.1.DenseReluDense", 3, "T5DenseActDense"),
        ("Nemotron", "model.layers.0.mlp", 1, "NemotronMLP"),
    ):
        said = rf"{first} \(and {count} more\): left as it is, {name} would compute sparsely with sparse=True\.$"
        with pytest.warns(UserWarning, match=said):
            assert not patch(make(kind, device)).replaced
    report = patch(make("Llama", device, hidden_act="silu"), sparse=True)
    lines = (
        "LlamaMLP: 2 with gate and up in one product",
        "2 not sparse, its activation is silu, which leaves few entries 0",
    )
    assert str(report) == "\n".join(lines) and not report.sparse
    model = make("T5", device)
    model.encoder.block[0].layer[-1].DenseReluDense.wo.double()
    model.encoder.block[1].layer[-1].DenseReluDense.dropout.register_forward_hook(lambda *_: None)
    left = patch(model, sparse=True).left
    assert left == {
        "encoder.block.0.layer.1.DenseReluDense": "wi is torch.float32 and wo is torch.float64",
        "encoder.block.1.layer.1.DenseReluDense": "dropout has a hook",
    }
    with pytest.raises(
        ValueError, match=r"transformers\.patch: sparse must be True, .* or one of auto, .*, got 'fast'"
    ):
        patch(make("OPT", device), sparse="fast")


@pytest.mark.parametrize("kind", ["Llama", "OPT", "T5"])
def test_copied_and_pickled(kind: str, device: torch.device) -> None:
    model, ids = make(kind, device), tokens(device)
    plain = logits(model, ids)
    patch(model, sparse="gather")
    logits(model, ids)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        torch.testing.assert_close(logits(other, ids), plain, rtol=1e-4, atol=1e-4)
        assert {module.sparse_block.method for module in blocks(other)} == {"gather"}
        unpatch(other)
        torch.testing.assert_close(logits(other, ids), plain)


@pytest.mark.parametrize("kind", ["Llama", "OPT", "T5"])
def test_compiled(kind: str, device: torch.device, compiled: Any) -> None:
    model, ids = make(kind, device), tokens(device)
    patch(model, sparse=True)
    plain = logits(model, ids)
    with torch.no_grad():
        if kind == "OPT":
            x = torch.randn(2, 5, 32, device=device)
            layer = model.model.decoder.layers[0]
            torch.testing.assert_close(compiled(layer)(x), layer(x))
        else:
            block, x = blocks(model)[0], torch.randn(3, 32, device=device)
            torch.testing.assert_close(compiled(block)(x), block(x))
    torch.testing.assert_close(logits(model, ids), plain)


def test_a_weight_changed_in_place_is_seen(device: torch.device) -> None:
    model, ids = make("OPT", device), tokens(device)
    patch(model, sparse="gather")
    logits(model, ids)
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.fc2.weight.mul_(-1)
    changed = logits(model, ids)
    unpatch(model)
    torch.testing.assert_close(changed, logits(model, ids))

"""integrations.transformers.patch_attention on models of transformers with small random configurations."""

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from gossamer.attention import Selection  # noqa: E402
from gossamer.integrations.transformers import (  # noqa: E402
    calibrate,
    indexer_loss,
    patch,
    patch_attention,
    register_selection,
    train_indexers,
    unpatch,
)
from tests.integrations import models  # noqa: E402
from tests.integrations.models import compare_gradients, gradients, logits  # noqa: E402

SMALL = {**models.SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "eos_token_id": None}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mixtral": {"num_local_experts": 2},
    "Qwen2Moe": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "Qwen3Moe": {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "Gemma": {"head_dim": 8},
}
SPARSE = {"k_base": 8, "k_min": 4, "k_max": 16, "d_indexer": 12, "n_idx_heads": 2}


def make(kind: str, device: torch.device, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **KINDS.get(kind, {}), **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(device).eval()
    # The usual weights are so small that attention is nearly even, and one key as good as another.
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.3)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.uniform_(parameter, 0.5, 3.0)
    return model


tokens = functools.partial(models.tokens, length=20)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dense_until_k_and_undone(kind: str, gates: bool, device: torch.device) -> None:
    model, ids = make(kind, device), tokens(device)
    plain, keys = logits(model, ids), list(model.state_dict())
    report = patch_attention(model, gates=gates)
    assert len(report.replaced) == 2 and not report.left
    assert f"{kind}Attention: 2 with selected keys" in str(report)
    assert report.parameters == sum(p.numel() for p in model.parameters()) - sum(
        p.numel() for p in make(kind, device).parameters()
    )
    close(logits(model, ids), plain)
    said = rf"^integrations\.transformers\.patch_attention: {type(model).__name__} is patched already; nothing changed"
    with pytest.warns(UserWarning, match=said):
        assert patch_attention(model) == report
    unpatch(model)
    assert torch.equal(logits(model, ids), plain) and list(model.state_dict()) == keys
    with pytest.warns(UserWarning, match=rf"unpatch: {type(model).__name__} is not patched; nothing changed"):
        unpatch(model)
    assert torch.equal(logits(model, ids), plain)
    for call in (train_indexers, indexer_loss, calibrate):
        lacking = rf"{call.__name__}: model must hold attention of patch_attention, got .* Call integrations"
        with pytest.raises(ValueError, match=lacking):
            call(model)


@pytest.mark.parametrize(
    "kind, implementation, share",
    [*((kind, way, 1) for kind in ("Llama", "Qwen3") for way in ("sdpa", "eager")), ("Llama", "sdpa", 2)],
)
def test_generation_with_and_without_a_cache(kind: str, implementation: str, share: int, device: torch.device) -> None:
    """Greedy, past k_base keys, with a growing cache, a static one, and none."""
    model, ids = make(kind, device, num_hidden_layers=2 if share == 1 else 5), tokens(device)
    model.set_attn_implementation(implementation)
    dense = model.generate(ids, max_new_tokens=12, do_sample=False)
    patch_attention(model, share=share, **SPARSE)
    options = {"max_new_tokens": 12, "do_sample": False}
    text = model.generate(ids, **options, use_cache=False)
    assert not torch.equal(text, dense)
    assert torch.equal(model.generate(ids, **options), text)
    assert torch.equal(model.generate(ids, **options, cache_implementation="static", disable_compile=True), text)
    beams = [model.generate(ids, **options, num_beams=3, use_cache=cache) for cache in (False, True)]
    assert torch.equal(*beams)
    # Only the layers that select keep an indexer's keys.
    cache = model(ids, use_cache=True).past_key_values
    assert [layer.keys.shape[1] for layer in cache.layers] == ([4, 4] if share == 1 else [4, 2, 4, 2, 4])


@pytest.mark.parametrize("implementation, share", [("sdpa", 1), ("eager", 1), ("sdpa", 4)])
def test_padding_changes_nothing(implementation: str, share: int, device: torch.device) -> None:
    model, ids = make("Llama", device, num_hidden_layers=2 if share == 1 else 5), tokens(device, 3)
    model.set_attn_implementation(implementation)
    patch_attention(model, share=share, **SPARSE)
    lengths = (20, 13, 5)
    alone = [logits(model, ids[b : b + 1, :n]) for b, n in enumerate(lengths)]
    for left in (True, False):
        mask = torch.zeros_like(ids)
        padded = ids.clone()
        for b, n in enumerate(lengths):
            there = slice(20 - n, 20) if left else slice(0, n)
            mask[b, there] = 1
            padded[b, there] = ids[b, :n]
        places = (mask.cumsum(1) - 1).clamp(min=0)
        out = logits(model, padded, attention_mask=mask, position_ids=places)
        for b in range(3):
            close(out[b][mask[b] == 1], alone[b][0])
    # Left padding, as generation has it, with a cache.
    mask, padded = torch.zeros_like(ids), torch.zeros_like(ids)
    for b, n in enumerate(lengths):
        mask[b, 20 - n :], padded[b, 20 - n :] = 1, ids[b, :n]
    for cache in ({}, {"cache_implementation": "static", "disable_compile": True}):
        text = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False, **cache)
        for b, n in enumerate(lengths):
            single = model.generate(ids[b : b + 1, :n], max_new_tokens=6, do_sample=False)
            assert torch.equal(text[b, 20:], single[0, n:])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_of_short_sequences(implementation: str, device: torch.device) -> None:
    """Where all keys are taken: as the model did, before it was patched."""
    model, ids = make("Llama", device), tokens(device, 3)
    model.set_attn_implementation(implementation)
    for left in (True, False):
        mask = torch.zeros_like(ids)
        for b, n in enumerate((20, 13, 5)):
            mask[b, slice(20 - n, 20) if left else slice(0, n)] = 1
        given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        plain = logits(model, ids, **given)
        patch_attention(model)
        close(logits(model, ids, **given)[mask == 1], plain[mask == 1])
        unpatch(model)


def test_other_masks_are_refused() -> None:
    model, ids = make("Llama", torch.device("cpu")), tokens(torch.device("cpu"))
    patch_attention(model, **SPARSE)
    with pytest.raises(ValueError, match="attention_mask must let each token see the tokens up to its own"):
        logits(model, ids, position_ids=torch.arange(10).repeat(2)[None].expand(2, -1), use_cache=False)
    prefix = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    prefix[:, :, :5, :5] = True
    with pytest.raises(ValueError, match="attention_mask must let"):
        logits(model, ids, attention_mask=prefix)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_may_stand_among_the_tokens(implementation: str, device: torch.device) -> None:
    """As the model without it: after a cut in a prompt, or behind a padded prompt in a cache."""
    model, ids = make("Llama", device), tokens(device)
    model.set_attn_implementation(implementation)
    patch_attention(model, **SPARSE)
    mask = torch.ones_like(ids)
    mask[0, 7:9], mask[1, 16:18] = 0, 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    whole = logits(model, ids, attention_mask=mask, position_ids=places)
    for b in range(2):
        close(whole[b][mask[b] == 1], logits(model, ids[b : b + 1, mask[b] == 1])[0])
    with torch.no_grad():
        first = model(ids[:, :18], attention_mask=mask[:, :18], position_ids=places[:, :18], use_cache=True)
        then = model(
            ids[:, 18:], attention_mask=mask, position_ids=places[:, 18:], past_key_values=first.past_key_values
        )
    close(then.logits, whole[:, 18:])


def test_the_indexer_learns(device: torch.device) -> None:
    """In a dense warm-up, then beside the selected keys; nothing else gets a gradient, and selections get better."""
    model, ids = make("Llama", device), tokens(device, 4, length=48)
    dense = logits(model, ids)
    patch_attention(model, **{**SPARSE, "d_indexer": 16, "n_idx_heads": 4})
    before = (logits(model, ids) - dense).norm()
    optimizer = torch.optim.Adam(train_indexers(model), lr=1e-2)
    others = [p for name, p in model.named_parameters() if "indexer" not in name]
    close(logits(model, ids, use_cache=False), dense)
    losses = []
    for step in range(60):
        if step == 40:
            train_indexers(model, "sparse")
        model(input_ids=ids, use_cache=False)
        loss = indexer_loss(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(parameter.grad is None for parameter in others)
    assert losses[39] < 0.8 * losses[0]
    train_indexers(model, None)
    assert (logits(model, ids) - dense).norm() < before
    with pytest.raises(ValueError, match=r"must have computed a loss in a forward pass, got .* Call train_indexers"):
        indexer_loss(model)


@pytest.mark.parametrize("share", [1, 3])
def test_training_with_checkpoints(share: int, device: torch.device) -> None:
    """Layers that are computed again, after another forward pass too, use the selection of their own pass."""
    model, ids = make("Llama", device, num_hidden_layers=2 if share == 1 else 5).train(), tokens(device)
    patch_attention(model, share=share, **SPARSE)
    grads = []
    for _ in range(2):
        model.zero_grad()
        losses = [model(input_ids=text, labels=text, use_cache=False).loss for text in (ids, ids.flip(1))]
        sum(losses).backward()
        grads.append(gradients(model))
        model.gradient_checkpointing_enable()
    assert len(grads[0]) == sum("indexer" not in name for name, _ in model.named_parameters())
    compare_gradients(grads[1], grads[0], rtol=1e-4, atol=1e-6)


def test_copies_and_mlps(device: torch.device) -> None:
    model, ids = make("Llama", device), tokens(device)
    plain = logits(model, ids)
    patch_attention(model, **SPARSE)
    patch(model)
    sparse = logits(model, ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        close(logits(other, ids), sparse)
        other.load_state_dict(model.state_dict(), strict=True)
        unpatch(other)
        close(logits(other, ids), plain)


@pytest.mark.parametrize("options", [{"share": 2}, {"gates": True, "adaptive": "learned"}])
def test_trained_indexers_and_gates_are_loaded_as_the_docs_say(
    options: dict[str, Any], device: torch.device, tmp_path: Path
) -> None:
    """From several files too; without the last lines the indexers are others."""
    model, ids = make("Llama", device), tokens(device)
    patch_attention(model, **SPARSE, **options)
    with torch.no_grad():
        for layer in model.model.layers:
            for parameter in layer.self_attn.added():
                nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    again = type(model).from_pretrained(tmp_path).to(device).eval()
    patch_attention(again, **SPARSE, **options)
    assert not torch.allclose(logits(again, ids), logits(model, ids), atol=1e-2)
    files = list(tmp_path.glob("*.safetensors"))
    for file in files:
        again.load_state_dict(load_file(file), strict=False)
    assert len(files) > 1 and torch.equal(logits(again, ids), logits(model, ids))


def test_what_is_left(device: torch.device) -> None:
    for options, why in (
        ({"attention_dropout": 0.5}, "drops out 0.5"),
        ({"sliding_window": 8}, "sliding window of 8 tokens"),
    ):
        config = transformers.MistralConfig(**{**SMALL, **KINDS["Mistral"], **options})
        model = transformers.MistralForCausalLM(config)
        said = rf"patch_attention: model.layers.0.* \(and 1 more\): left as it is, .*{why}"
        with pytest.warns(UserWarning, match=said):
            report = patch_attention(model)
        assert not report.replaced and len(report.left) == 2 and len(str(report).splitlines()) == 1
    known = r"known are those of Llama, Mistral, .* and Gemma \(1\)\.$"
    olmo = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SMALL))
    opt = transformers.OPTForCausalLM(transformers.OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32))
    for model, what in (
        (olmo, r"and 1 more\): left as it is, Olmo2Attention is no class that can be replaced"),
        (opt, "no self-attention found that can be replaced"),
        (nn.Linear(2, 2), "no self-attention found that can be replaced"),
    ):
        with pytest.warns(UserWarning, match=f"patch_attention: .*{what}; {known}"):
            patch_attention(model)
    model = make("Llama", device)
    model.model.layers[0].self_attn.k_proj.weight.data = model.model.layers[0].self_attn.k_proj.weight.data.half()
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    report = patch_attention(model)
    assert list(report.left) == ["model.layers.1.self_attn"]
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        patch_attention("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stage must be"):
        train_indexers(model, "wet")


@pytest.mark.parametrize("rule", ["variance", "entropy", "learned"])
def test_adaptive_numbers_of_keys(rule: str, device: torch.device) -> None:
    """With padding too; generation with a cache selects the same, and what a rule knows is saved and moved."""
    model, ids = make("Llama", device), tokens(device, length=40)
    patch_attention(model, **SPARSE, adaptive=rule, share=[[0, 1]] if rule == "entropy" else 1)
    assert all(tensor.device.type == device.type for tensor in model.state_dict().values())
    mask = torch.ones_like(ids)
    mask[1, :15] = 0
    if rule == "variance":
        with pytest.raises(ValueError, match="has to know the usual variance"):
            logits(model, ids)
        calibrate(model, ids, attention_mask=mask)
        known = [layer.self_attn.adaptive_k.mean.item() for layer in model.model.layers]
        assert all(0 < variance < 1 for variance in known) and known[0] != known[1]
    else:
        with pytest.raises(ValueError, match=r'model must be patched with adaptive="variance".* got .* with another'):
            calibrate(model, ids)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))
    other = make("Llama", device)
    patch_attention(other, **SPARSE, adaptive=rule, share=[[0, 1]] if rule == "entropy" else 1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, ids), logits(model, ids))
    unpatch(model)


def test_a_given_selection(device: torch.device) -> None:
    model, ids = make("Llama", device), tokens(device)
    mask = (torch.rand(2, 20, 20, device=device) < 0.4).tril() | torch.eye(20, dtype=torch.bool, device=device)
    wanted = logits(model, ids, attention_mask=mask[:, None])
    model.set_attn_implementation(register_selection())
    close(logits(model, ids, selection=Selection.from_mask(mask)), wanted)
    with pytest.raises(ValueError, match="the model must be called with selection="):
        logits(model, ids)
    model.train()
    model.model.layers[0].self_attn.attention_dropout = 0.5
    with pytest.raises(NotImplementedError, match="dropout of attention is not implemented"):
        logits(model, ids, selection=Selection.from_mask(mask))


def test_a_given_selection_may_look_ahead(device: torch.device) -> None:
    """In an encoder, and of a prefix in a model that is causal otherwise."""
    torch.manual_seed(0)
    options = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    bert = transformers.BertModel(transformers.BertConfig(**{**SMALL, **options})).to(device).eval()
    ids = tokens(device)
    ahead = torch.rand(2, 20, 20, device=device) < 0.5
    ahead |= torch.eye(20, dtype=torch.bool, device=device)
    with torch.no_grad():
        wanted = bert(ids).last_hidden_state, bert(ids, attention_mask=ahead[:, None]).last_hidden_state
        bert.set_attn_implementation(register_selection())
        for mask, plain in zip((torch.ones_like(ahead), ahead), wanted):
            close(bert(ids, selection=Selection.from_mask(mask)).last_hidden_state, plain)
    llama = make("Llama", device)
    prefix = torch.ones(2, 20, 20, dtype=torch.bool, device=device).tril()
    prefix[:, :8, :8] = True
    plain = logits(llama, ids, attention_mask=prefix[:, None])
    llama.set_attn_implementation(register_selection())
    close(logits(llama, ids, selection=Selection.from_mask(prefix)), plain)

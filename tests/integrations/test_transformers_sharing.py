"""integrations.transformers.patch_attention(share=...): layers that use the selection of another one."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from gossamer import attention  # noqa: E402
from gossamer.integrations.transformers import (  # noqa: E402
    indexer_loss,
    patch_attention,
    train_indexers,
    unpatch,
)
from tests.integrations.models import logits  # noqa: E402
from tests.integrations.test_transformers_attention import SPARSE, make, tokens  # noqa: E402


def five(device: torch.device) -> nn.Module:
    return make("Llama", device, num_hidden_layers=5)


def recorded(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> dict[int, attention.Selection]:
    """What each layer selects in the next forward pass, by its number."""
    found: dict[int, attention.Selection] = {}
    for layer in model.model.layers:
        made = layer.self_attn

        def select(*given: Any, made: Any = made, before: Any = made.select) -> attention.Selection:
            found[made.layer_idx] = before(*given)
            return found[made.layer_idx]

        monkeypatch.setattr(made, "select", select)
    return found


@pytest.mark.parametrize("share, groups", [(2, [[0, 1], [2, 3], [4]]), (5, [[0, 1, 2, 3, 4]]), ([[0, 3], [1, 2]],) * 2])
def test_against_dense_attention_with_the_masks(
    share: Any, groups: list[list[int]], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of each group selects, and each layer of it attends to those keys: transformers' own, masked so."""
    model, plain, ids = five(device), five(device), tokens(device)
    report = patch_attention(model, share=share, granularity=4 if share == 5 else 1, **SPARSE)
    firsts = [group[0] for group in groups] + [n for n in range(5) if not any(n in group for group in groups)]
    said = "1 selection, shared" if share == 5 else f"{len(firsts)} selections, shared"
    assert report.selections == len(firsts) and said in str(report).splitlines()
    assert report.parameters == len(firsts) * (32 * (24 + 12 + 2) + 2 + 2)
    assert {n for n in range(5) if any(f"layers.{n}.self_attn.indexer" in key for key in model.state_dict())} == set(
        firsts
    )
    selections = recorded(model, monkeypatch)
    got = logits(model, ids)
    assert sorted(selections) == sorted(firsts)
    plain.set_attn_implementation("eager")
    for layer in plain.model.layers:
        number = layer.self_attn.layer_idx
        first = next((group[0] for group in groups if number in group), number)
        mask = torch.where(selections[first].to_mask(), 0.0, -1e30)

        def masked(module: nn.Module, args: Any, kwargs: Any, mask: Tensor = mask) -> Any:
            return args, {**kwargs, "attention_mask": mask}

        layer.self_attn.register_forward_pre_hook(masked, with_kwargs=True)
    torch.testing.assert_close(got, logits(plain, ids), rtol=1e-3, atol=1e-4)


def test_dense_until_k_and_undone(device: torch.device) -> None:
    model, ids = five(device), tokens(device)
    plain, keys = logits(model, ids), list(model.state_dict())
    patch_attention(model, share=3)
    torch.testing.assert_close(logits(model, ids), plain, rtol=1e-3, atol=1e-4)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        torch.testing.assert_close(logits(other, ids), plain, rtol=1e-3, atol=1e-4)
        unpatch(other)
        assert torch.equal(logits(other, ids), plain) and list(other.state_dict()) == keys
        assert not other.model._forward_pre_hooks
    patch_attention(model, share=2, **SPARSE)
    sparse = logits(model, ids)
    again = pickle.loads(pickle.dumps(model))
    again.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(logits(again, ids), sparse)


def test_the_inner_model_and_what_is_left(device: torch.device) -> None:
    """The model that calls the layers may be given itself; a layer that is left is in no group of a number."""
    model, ids = five(device), tokens(device)
    patch_attention(model, share=2)
    wanted = [layer.self_attn.group for layer in model.model.layers]
    unpatch(model)
    patch_attention(model.model, share=2, **SPARSE)
    assert [layer.self_attn.group for layer in model.model.layers] == wanted == [(0, 1)] * 2 + [(2, 3)] * 2 + [()]
    assert logits(model, ids).isfinite().all()
    unpatch(model.model)
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    report = patch_attention(model, share=2, **SPARSE)
    assert list(report.left) == ["model.layers.1.self_attn"] and report.selections == 2
    groups = [layer.self_attn.group for n, layer in enumerate(model.model.layers) if n != 1]
    assert groups == [(0, 2), (0, 2), (3, 4), (3, 4)]
    assert logits(model, ids).isfinite().all()


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_an_indexer_learns_from_all_its_layers(stage: str, device: torch.device) -> None:
    """Its gradient is that of the mean of the layers' losses, each over the same keys."""
    model, ids = five(device), tokens(device, 4, length=30)
    patch_attention(model, share=[[0, 1, 2], [3, 4]], **SPARSE)
    parameters = train_indexers(model, stage)
    assert len(parameters) == 2 * 5
    layers = [layer.self_attn for layer in model.model.layers]
    seen: dict[int, Any] = {}
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: seen.__setitem__(
                module.layer_idx, (kwargs["hidden_states"].detach(), kwargs["position_embeddings"])
            ),
            with_kwargs=True,
        )
    model(input_ids=ids, use_cache=False)
    loss = indexer_loss(model)
    loss.backward()
    got = [parameter.grad.clone() for parameter in parameters]
    losses = []
    for layer in layers:
        first = layers[0 if layer.layer_idx < 3 else 3]
        q, k, *_ = layer.project(*seen[layer.layer_idx], indexer=False)
        index = first.index(seen[first.layer_idx][0])
        selection = first.select(*index) if stage == "sparse" else None
        losses.append(attention.indexer_loss(q, k, *index, first.indexer.idx_bias, selection=selection, causal=True))
    wanted = torch.stack(losses).mean()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    for grad, expected in zip(got, torch.autograd.grad(wanted, parameters), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)


def test_compiles(device: torch.device) -> None:
    model, ids = five(device), tokens(device)
    patch_attention(model, share=2, **SPARSE)
    wanted = logits(model, ids, use_cache=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, ids, use_cache=False), wanted, rtol=1e-4, atol=1e-5)


def test_errors(device: torch.device) -> None:
    model = five(device)
    for share, why in (
        (0, "share must be how many layers in a row use one selection, at least 1, or a list of groups"),
        (True, "share must be how many layers in a row"),
        ("01", "share must be how many layers in a row"),
        ([0, 1], "share must be how many layers in a row"),
        ([[1, 0]], "share must be how many layers in a row"),
        ([[0, 1], [1, 2]], r"share must name layers that are replaced, \[0, 1, 2, 3, 4\], each once"),
        ([[0, 7]], r"share must name layers that are replaced, \[0, 1, 2, 3, 4\], each once, got \[\[0, 7\]\]"),
    ):
        with pytest.raises(ValueError, match=why):
            patch_attention(model, share=share, **SPARSE)
    with pytest.raises(
        ValueError, match=r"share needs the model that calls the layers, got ModuleList with 0\.self_attn"
    ):
        patch_attention(model.model.layers, share=2)
    patch_attention(model, share=2, **SPARSE)
    layer = model.model.layers[1].self_attn
    angles = torch.ones(1, 20, 8, device=device), torch.zeros(1, 20, 8, device=device)
    with pytest.raises(ValueError, match="layer 1 uses the selection of layer 0, which has made none in this forward"):
        layer(torch.randn(1, 20, 32, device=device), angles)

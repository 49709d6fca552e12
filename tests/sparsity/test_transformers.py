"""Statistics of patched models of transformers: positions and tokens, of whatever shape a block sees."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from gossamer import sparsity
from gossamer.integrations.transformers import patch
from tests.integrations.models import tokens
from tests.integrations.test_transformers_sparse import make


@pytest.mark.parametrize("kind", ["Llama", "Arcee", "OPT"])
def test_decoders(kind: str, device: torch.device) -> None:
    model, ids = make(kind, device), tokens(device)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    fired: list[Tensor] = []
    activation = {"OPT": "activation_fn"}.get(kind, "act_fn")
    modules = [module for module in model.modules() if hasattr(module, activation)]
    hooks = [
        getattr(module, activation).register_forward_hook(lambda *args: fired.append((args[2] > 0).view(2, 9, 72)))
        for module in modules
    ]
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    patch(model, sparse=True)
    layers = sparsity.report(model, [batch], measure=False).layers
    assert len(layers) == len(fired) == 2
    for found, bits in zip(layers.values(), fired, strict=True):
        bits = bits[mask != 0]
        assert torch.equal(found.fired, bits.sum(0)) and found.tokens == 15
        assert found.position_tokens.tolist() == [2] * 6 + [1] * 3
        assert torch.equal(found.token_tokens, torch.bincount(ids[mask != 0], minlength=97))
        want = torch.zeros(97, dtype=torch.int64, device=device).index_add_(0, ids[mask != 0], bits.sum(1))
        assert torch.equal(found.token_entries, want)


@pytest.mark.parametrize("kind", ["Llama", "OPT", "T5"])
def test_in_training_as_without_gradients(kind: str, device: torch.device) -> None:
    """OPT has its block in a larger layer, and T5 drops out inside of its block, with probability 0 here."""
    model, ids = make(kind, device), tokens(device)
    extra = {"decoder_input_ids": ids[:, :7]} if kind == "T5" else {}
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 1e-12
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    patch(model, sparse=True)
    with torch.no_grad(), sparsity.Recorder(model) as still:
        model(input_ids=ids, **extra)
    plain = model.train()(input_ids=ids, **extra).logits
    with sparsity.Recorder(model) as recorder:
        logits = model(input_ids=ids, **extra).logits
        logits.sum().backward()
    torch.testing.assert_close(logits, plain)
    assert list(recorder.layers) == list(still.layers) and len(recorder.layers) == (4 if kind == "T5" else 2)
    for name, found in recorder.layers.items():
        assert found.fired.equal(still.layers[name].fired) and found.tokens == still.layers[name].tokens
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "layers.0" in name)


def test_both_sides(device: torch.device) -> None:
    """The encoder reads its own tokens and the decoder others."""
    model, ids = make("T5", device), tokens(device)
    patch(model, sparse=True)
    other = ids[:, :4] // 2
    layers = sparsity.report(model, [{"input_ids": ids, "decoder_input_ids": other}], measure=False).layers
    for name, found in layers.items():
        read = other if name.startswith("decoder") else ids
        assert torch.equal(found.token_tokens, torch.bincount(read.flatten(), minlength=97))
        assert found.position_tokens.tolist() == [2] * read.shape[1]

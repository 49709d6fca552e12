"""gossamer.warm_up: every path is taken once, and nothing is left behind."""

import copy
import threading
from typing import Any

import pytest
import torch

import gossamer
from gossamer import nn
from gossamer.ffn import SparseBlock
from gossamer.ffn.block import METHODS

pytestmark = pytest.mark.native


def state(model: torch.nn.Module) -> dict[str, Any]:
    return copy.deepcopy(model.state_dict())


def unchanged(model: torch.nn.Module, before: dict[str, Any]) -> bool:
    same = all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return same and all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("training", [False, True])
def test_every_path_of_a_block(training: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(*(nn.GatedMLP(16, 48, "relu", method="auto", device=device) for _ in range(2)))
    model.train(training).requires_grad_(training)
    model[1].method = "gather"
    seen, original, lock = [], SparseBlock.__call__, threading.Lock()

    def call(block: SparseBlock, *args: Any, **kwargs: Any) -> Any:
        with lock:
            seen.append((block.method, block.density.rows.pinned, torch.is_grad_enabled()))
        return original(block, *args, **kwargs)

    monkeypatch.setattr(SparseBlock, "__call__", call)
    before = state(model)
    gossamer.warm_up(model, torch.randn(5, 16, device=device))
    # A block that its method pins counts nothing, and compiles other kernels than one that counts.
    pinned = {(method, None) for method in METHODS[1:]} | {("auto", path) for path in METHODS[1:]}
    assert {(method, path) for method, path, _ in seen} == pinned
    # The pinned block stays so, and gradients are computed where a parameter has one.
    assert {grad for *_, grad in seen} == ({False, True} if training else {False})
    assert sum(method == "gather" for method, _, grad in seen if not grad) == 2 * (1 + 2 * len(METHODS[1:]))
    assert unchanged(model, before) and model[0].method == "auto" and model[0].last_path is None
    assert model.training is training


@pytest.mark.parametrize(
    "kind, options",
    [(nn.TopKSAE, {"k": 4}), (nn.BatchTopKSAE, {"k": 4}), (nn.JumpReLUSAE, {}), (nn.JumpReLUSAE, {"target_l0": 4})],
)
def test_an_autoencoder_in_training(kind: Any, options: dict[str, Any], device: torch.device) -> None:
    model, x = kind(16, 64, **options, device=device), torch.randn(9, 16, device=device)
    before = state(model)
    gossamer.warm_up(model.loss, x)
    gossamer.warm_up(model, x)
    assert unchanged(model, before) and model.density.last_path is None and model.density.pinned is None
    assert not model.firing_counts.any()


def test_results_without_gradients_and_inputs_with_a_graph(device: torch.device) -> None:
    model, x = nn.TopKSAE(16, 64, k=4, device=device), torch.randn(9, 16, device=device)
    model.generate = torch.no_grad()(model.forward)
    for target in (model.generate, torch.no_grad()(lambda x: model(x)), lambda x: model(x.requires_grad_()).detach()):
        gossamer.warm_up(target, x.clone())
    rows = model.encode(x)
    gossamer.warm_up(model.decode, rows)
    # The graph of the input is still whole.
    model.decode(rows).sum().backward()
    assert model.W_enc.grad is not None and model.W_enc.grad.any()
    with pytest.raises(TypeError, match=r"warm_up: target must be a module, a method of one or a function, got int\."):
        gossamer.warm_up(3, x)  # type: ignore[arg-type]


def test_autocast_and_functions(device: torch.device) -> None:
    seen, threads = [], []

    def function(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        seen.append(((x @ x.t()).dtype, scale))
        threads.append(threading.get_ident())
        return x.square() * scale

    x = torch.randn(4, 4, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        gossamer.warm_up(function, x, scale=3.0)
    assert seen == [(torch.bfloat16, 3.0)] * 4 and x.grad is None
    # PyTorch keeps some plans for each thread, of cuDNN's attention for one.
    assert threads[:2] != threads[2:] == [threading.get_ident()] * 2
    with pytest.raises(ValueError, match="no such thing"):
        gossamer.warm_up(_refuse, x)


def _refuse(x: torch.Tensor) -> None:
    raise ValueError("no such thing")


def test_a_patched_model(device: torch.device) -> None:
    transformers = pytest.importorskip("transformers")
    from gossamer.integrations.transformers import patch

    sizes = {"hidden_size": 32, "ffn_dim": 72, "num_attention_heads": 4, "word_embed_proj_dim": 32}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=97, num_hidden_layers=2, **sizes)).to(device)
    patch(model.eval(), sparse=True)
    before = state(model)
    gossamer.warm_up(model, torch.randint(5, 97, (2, 8), device=device))
    # A method whose result needs no gradient.
    gossamer.warm_up(model.generate, torch.randint(5, 97, (2, 8), device=device), max_new_tokens=2)
    assert unchanged(model, before)
    assert all(layer.sparse_block.last_path is None for layer in model.model.decoder.layers)

"""integrations.transformers.patch on models of transformers with small random configurations."""

import copy
import importlib
import io
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import torch.distributed  # noqa: E402
from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: E402
from torch.nn.modules.module import register_module_forward_hook  # noqa: E402

from gossamer.integrations.transformers import patch, unpatch  # noqa: E402
from gossamer.integrations.transformers._layouts import layout_of  # noqa: E402
from gossamer.testing import assert_close  # noqa: E402
from tests.integrations import models  # noqa: E402
from tests.integrations.models import compare_gradients, exact_logits, gradients, logits, tokens  # noqa: E402

SMALL = {**models.SMALL, "intermediate_size": 72, "num_key_value_heads": 2}

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
# Of some 150 classes with a forward of the same formula.
OTHERS: dict[str, dict[str, Any]] = {
    "Olmo2": {},
    "Granite": {},
    "SmolLM3": {},
    "Cohere": {},
    "Glm": {"head_dim": 8},
    "Exaone4": {"head_dim": 8},
    "Ernie4_5": {"head_dim": 8},
    "StableLm": {},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [0, 1], "head_dim": 8},
    "FalconH1": {
        "mlp_multipliers": [0.7, 1.3], "mlp_bias": True, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8,
        "mamba_d_state": 8, "mamba_chunk_size": 8,
    },
    "Lfm2": {"block_auto_adjust_ff_dim": False, "layer_types": ["full_attention", "conv"]},
    "ModernBertDecoder": {"mlp_dropout": 0.1},
}  # fmt: skip
T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 72, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}


def make(kind: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    name = kind.split(",")[0]
    if name == "T5":
        config = transformers.T5Config(**T5, feed_forward_proj="gated-gelu", decoder_start_token_id=0, pad_token_id=0)
        return transformers.T5ForConditionalGeneration(config).to(device).eval()
    suffix = "TextConfig" if name == "Gemma3" else "Config"
    config = getattr(transformers, f"{name}{suffix}")(**SMALL, **(KINDS | OTHERS)[kind])
    return getattr(transformers, f"{name}ForCausalLM")(config).to(device).eval()


@pytest.mark.parametrize("kind", [*KINDS, "T5"])
def test_same_logits_and_generations(kind: str, device: torch.device) -> None:
    model, ids = make(kind, device), tokens(device)
    plain, exact = logits(model, ids), exact_logits(model, ids)
    text = model.generate(ids, max_new_tokens=12, do_sample=False)
    keys = list(model.state_dict())
    report = patch(model)
    assert len(report.replaced) == (4 if kind == "T5" else 2) and not report.left
    assert f"{len(report.replaced)} with gate and up in one product" in str(report)
    assert_close(logits(model, ids), reference64=exact, plain=plain)
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), text)
    assert list(model.state_dict()) == keys
    said = rf"^integrations\.transformers\.patch: {type(model).__name__} is patched already; nothing changed\.$"
    with pytest.warns(UserWarning, match=said):
        assert patch(model, sparse=True) == report
    unpatch(model)
    assert torch.equal(logits(model, ids), plain)
    for other in (model, torch.nn.Linear(2, 2)):
        said = rf"^integrations\.transformers\.unpatch: {type(other).__name__} is not patched; nothing changed\.$"
        with pytest.warns(UserWarning, match=said):
            unpatch(other)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_forward_is_known_by_its_formula(kind: str, device: torch.device) -> None:
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip("not in this version of transformers")
    model, ids = make(kind, device), tokens(device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    plain, exact = logits(model, ids), exact_logits(model, ids)
    report = patch(model)
    assert len(report.replaced) == 2 and not report.left, report
    assert_close(logits(model, ids), reference64=exact, plain=plain)
    # Some of the dropouts that models have in training stand before down.
    dropped = [module for module in model.train().modules() if getattr(module, "p", 0) == 0.1]
    torch.manual_seed(0)
    patched = logits(model, ids)
    unpatch(model)
    torch.manual_seed(0)
    torch.testing.assert_close(patched, logits(model, ids), rtol=1e-3, atol=1e-4)
    assert bool(dropped) == (kind == "ModernBertDecoder")


def blocks(folder: str) -> Iterator[type[nn.Module]]:
    """The classes of a folder of transformers whose forward is the formula of a gated block."""
    for path in sorted(Path(transformers.__path__[0], "models", folder).glob("modeling_*.py")):
        try:
            module = importlib.import_module(f"transformers.models.{folder}.{path.stem}")
        except ImportError:  # of a package that this model alone needs
            continue
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == module.__name__:
                layout = layout_of(kind)
                if layout is not None and not layout.plain:
                    yield kind


def with_parts(kind: Any, bias: bool) -> nn.Module:
    """A module of a class, without its __init__, that has the layers which its forward calls."""
    layout, block = layout_of(kind), kind.__new__(kind)
    nn.Module.__init__(block)
    assert layout is not None
    parts: dict[str, Any] = {layout.gate: nn.Linear(12, 20 if layout.up else 40, bias), layout.activation: nn.SiLU()}
    parts |= {layout.up or layout.gate: nn.Linear(12, 20 if layout.up else 40, bias), layout.down: nn.Linear(20, 12)}
    parts |= {layout.dropout: nn.Dropout(0.1), layout.gate_scale: 0.7, layout.down_scale: 0.7}
    for name, part in parts.items():
        if name and not (name == layout.activation and name in ("silu", "relu", "sigmoid")):
            setattr(block, name, part)
    return block.eval()


@pytest.mark.parametrize("part", range(4))
def test_every_class_of_a_sample(part: int, device: torch.device) -> None:
    """Of one in six of the folders of transformers."""
    folders = sorted(path.name for path in Path(transformers.__path__[0], "models").iterdir() if path.is_dir())
    found = [kind for folder in folders[part::24] for kind in blocks(folder)]
    assert len(found) >= 3
    for number, kind in enumerate(found):
        block, x = with_parts(kind, number % 2 == 0).to(device), torch.randn(2, 3, 12, device=device)
        plain = block(x)
        weights = list(block.parameters())
        wanted = torch.autograd.grad(plain.square().sum(), weights)
        assert patch(block).replaced == {"": kind.__name__}
        out = block(x)
        torch.testing.assert_close(out, plain)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), weights), wanted)
        with torch.no_grad():
            torch.testing.assert_close(block(x), plain)


class Block(nn.Module):
    """Parts of a gated block, whose forward is a function of them and x."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.both, self.act, self.drop, self.norm = nn.Linear(8, 24), nn.SiLU(), nn.Dropout(0.5), nn.LayerNorm(12)
        self.scale, self.other = 0.5, nn.Parameter(torch.tensor(3.0))


def silu_of_both(self: Any, x: Tensor) -> Tensor:
    up, gate = self.both(x).chunk(2, dim=-1)
    return self.down(up * self.act(gate))


def wrong_halves(self: Any, x: Tensor) -> Tensor:
    gate = self.both(x).chunk(2, dim=-1)[1]
    return self.down(gate * self.act(gate))


FORMULAS: dict[str, tuple[Any, bool]] = {
    "gate": (lambda self, x: self.down(self.act(self.gate(x)) * self.up(x)), True),
    "up first": (lambda self, hidden: self.down(self.up(hidden) * self.act(self.gate(hidden))), True),
    "a function": (lambda self, x: self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x)), True),
    "dropout": (lambda self, x: self.down(self.drop(self.act(self.gate(x)) * self.up(x))), True),
    "halves": (silu_of_both, True),
    "multipliers": (lambda self, x: self.down(self.up(x) * self.act(self.gate(x) * self.scale)) * self.other, True),
    "the same half": (wrong_halves, False),
    "a norm": (lambda self, x: self.down(self.norm(self.act(self.gate(x)) * self.up(x))), False),
    "a constant": (lambda self, x: self.down(self.act(self.gate(x)) * (self.up(x) + 1)), False),
    "a clamp": (lambda self, x: self.down(self.act(self.gate(x)).clamp(max=1) * self.up(x)), False),
    "a number": (lambda self, x: self.down(self.act(self.gate(x)) * self.up(x) * 2), False),
    "twice": (lambda self, x: self.down(self.act(self.gate(x)) * self.act(self.up(x))), False),
    "no activation": (lambda self, x: self.down(self.gate(x) * self.up(x)), False),
    "a residual": (lambda self, x: x + self.down(self.act(self.gate(x)) * self.up(x)), False),
    "a condition": (lambda self, x: self.down(self.act(self.gate(x)) * self.up(x)) if self.scale else x, False),
    "another argument": (lambda self, x, y: self.down(self.act(self.gate(x)) * self.up(y)), False),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.filterwarnings("ignore:integrations.transformers.patch. no feed-forward block")
def test_formulas(name: str, device: torch.device) -> None:
    forward, known = FORMULAS[name]
    block = type("Block", (Block,), {"forward": forward})().to(device).eval()
    x = torch.randn(5, 8, device=device, requires_grad=True)
    given = (x, x) if name == "another argument" else (x,)
    plain = block(*given)
    (wanted,) = torch.autograd.grad(plain.sum(), x)
    assert bool(patch(block).replaced) is known
    out = block(*given)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], wanted)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "Llama, biased", "Phi3"])
def test_same_gradients(kind: str, recompute: bool, device: torch.device) -> None:
    model, ids = make(kind, device).train(), tokens(device)
    model(input_ids=ids, labels=ids).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    patch(model, recompute=recompute)
    for checkpoints in (False, True):
        if checkpoints:
            model.zero_grad()
            model.gradient_checkpointing_enable()
        model(input_ids=ids, labels=ids).loss.backward()
        compare_gradients(gradients(model), expected, rtol=1e-3, atol=1e-6)


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


def test_compiled_before(device: torch.device) -> None:
    """What was compiled is compiled again when a module is patched or not any more."""
    mlp, x, graphs = make("Llama", device).model.layers[0].mlp, torch.randn(3, 32, device=device), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append("linear_glu" in graph.code)
        return graph.forward

    torch._dynamo.reset()
    run = torch.compile(mlp, backend=backend, fullgraph=True)
    with torch.no_grad():
        for change in (lambda: None, lambda: patch(mlp), lambda: unpatch(mlp), lambda: patch(mlp)):
            change()
            torch.testing.assert_close(run(x), mlp(x))
    assert graphs == [False, True]


class Linear(nn.Linear):
    """Stands for the layers of adapters and quantisers, which are no plain `nn.Linear` either."""


def test_what_is_left(device: torch.device) -> None:
    model, ids = make("Llama", device), tokens(device)
    plain = logits(model, ids)
    first, second = (layer.mlp for layer in model.model.layers)
    first.up_proj.register_forward_hook(lambda module, args, out: out * 2)
    adapter = Linear(32, 72, bias=False, device=device)
    second.gate_proj, kept = adapter, second.gate_proj
    report = patch(model)
    assert report.left == {
        "model.layers.0.mlp": "up_proj has a hook",
        "model.layers.1.mlp": f"gate_proj is {__name__}.Linear, not a plain nn.Linear",
    }
    assert not report.replaced and "left as it is, up_proj has a hook" in str(report)
    second.gate_proj = kept
    second.act_fn, kept_act = transformers.activations.ACT2FN["quick_gelu"], second.act_fn
    assert "its activation is transformers.activations.QuickGELUActivation" in patch(model).left["model.layers.1.mlp"]
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

    assert patch(nn.Sequential(Other())).left == {"0": "the forward of Other is another formula"}
    # Equal reasons are one line.
    report = patch(nn.Sequential(*(Other() for _ in range(48))))
    assert str(report) == "0 (and 47 more): left as it is, the forward of Other is another formula"
    with pytest.warns(UserWarning, match="patch: no feed-forward block found that can be replaced; known are"):
        assert not patch(nn.Linear(2, 2)).replaced
    for function in (patch, unpatch):
        name = f"integrations.transformers.{function.__name__}"
        with pytest.raises(TypeError, match=rf"{name}: model must be a torch.nn.Module, got str"):
            function("model")


def test_an_activation_is_known_by_where_it_comes_from(device: torch.device) -> None:
    class SiLU(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * x

    model, ids = make("Llama", device), tokens(device)
    first, second = (layer.mlp for layer in model.model.layers)
    patch(model)
    first.act_fn = SiLU()
    second.act_fn.forward = MethodType(lambda self, x: 2 * x, second.act_fn)
    got = logits(model, ids)
    unpatch(model)
    assert torch.equal(got, logits(model, ids))
    assert patch(model).left == {
        "model.layers.0.mlp": f"its activation is {__name__}.{SiLU.__qualname__}, which linear_glu does not have",
        "model.layers.1.mlp": "act_fn has a hook",
    }


@pytest.mark.parametrize("kind", ["Llama", "Phi3", "T5"])
def test_called_as_the_class_is(kind: str, device: torch.device) -> None:
    model = make(kind, device)
    name = next(iter(patch(model).replaced))
    mlp, x = model.get_submodule(name), torch.randn(3, 32, device=device)
    argument = "x" if kind == "Llama" else "hidden_states"
    assert torch.equal(mlp(**{argument: x}), mlp(x))
    for args, named in (((), {}), ((x, x), {}), ((x,), {argument: x}), ((), {"other": x})):
        with pytest.raises(TypeError, match=r"forward\(\) "):
            mlp(*args, **named)


def test_pickled(device: torch.device) -> None:
    model, ids = make("Llama", device), tokens(device)
    kind, shown, plain = type(model.model.layers[0].mlp), repr(model), logits(model, ids)
    patch(model, recompute=True)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    loaded = [torch.load(saved, weights_only=False), copy.deepcopy(model)]
    loaded += [pickle.loads(pickle.dumps(model, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for other in loaded:
        mlp = other.model.layers[0].mlp
        assert repr(other) == shown and isinstance(mlp, kind) and type(mlp) is type(model.model.layers[0].mlp)
        torch.testing.assert_close(logits(other, ids), plain)
        unpatch(other)
        assert type(mlp) is kind and torch.equal(logits(other, ids), plain)


def test_a_pickle_is_read_in_another_process(tmp_path: Path) -> None:
    mlp, x = make("Llama", torch.device("cpu")).model.layers[0].mlp, torch.randn(3, 32)
    expected = mlp(x)
    patch(mlp)
    torch.save((mlp, x), tmp_path / "mlp.pt")
    program = """
import sys, torch
mlp, x = torch.load(sys.argv[1], weights_only=False)
out = mlp(x)
from gossamer.integrations.transformers import unpatch
unpatch(mlp)
torch.save(out, sys.argv[1])
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "mlp.pt")], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "mlp.pt"), expected)


def test_copies_compute_with_what_is_theirs(device: torch.device) -> None:
    mlp, x = make("Llama", device).model.layers[0].mlp, torch.randn(3, 32, device=device)
    patch(mlp)
    for other in (copy.copy(mlp), mlp._replicate_for_data_parallel()):
        other._modules = dict(other._modules)
        other.down_proj = copy.deepcopy(mlp.down_proj)
        with torch.no_grad():
            other.down_proj.weight.mul_(2)
        torch.testing.assert_close(other(x), 2 * mlp(x))
    # What DataParallel makes of a layer has its parameters as attributes.
    replica = mlp._replicate_for_data_parallel()
    for name, layer in mlp._modules.items():
        setattr(replica, name, layer._replicate_for_data_parallel())
        if name != "act_fn":
            getattr(replica, name).weight, getattr(replica, name).bias = layer.weight * 1, None
    replica(x).sum().backward()
    assert mlp.gate_proj.weight.grad is not None


def test_all_modules_hooked(device: torch.device) -> None:
    model, ids = make("Llama", device), tokens(device)
    patch(model)
    seen: list[nn.Module] = []
    handle = register_module_forward_hook(lambda module, args, out: seen.append(module))
    try:
        logits(model, ids)
        assert set(patch(make("Llama", device)).left.values()) == {"a hook listens to all modules"}
    finally:
        handle.remove()
    assert all(layer.mlp.up_proj in seen for layer in model.model.layers)


def test_what_is_put_on_a_forward_is_removed_first(device: torch.device) -> None:
    model = make("Llama", device)
    patch(model)
    first, second = (layer.mlp for layer in model.model.layers)
    # As accelerate adds a hook, and removes it.
    first._old_forward = first.forward
    first.forward = MethodType(lambda self, x: self._old_forward(x), first)
    with pytest.raises(ValueError, match=r"unpatch: .* model\.layers\.0\.mlp got another forward\. Remove that first"):
        unpatch(model)
    first.forward = first._old_forward
    del first._old_forward
    unpatch(model)
    assert "forward" not in first.__dict__ and type(second).__mro__[1] is type(first).__mro__[1] is nn.Module
    first.forward = first.forward
    assert patch(model).left == {"model.layers.0.mlp": "its forward has been replaced on this instance"}


@pytest.mark.native
@pytest.mark.usefixtures("one_rank")
def test_fully_sharded() -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    mlp, x = make("Llama", torch.device("cpu")).model.layers[0].mlp, torch.randn(3, 32)
    expected = mlp(x)
    before, after, forward = copy.deepcopy(mlp), copy.deepcopy(mlp), copy.deepcopy(mlp)
    patch(before)
    fully_shard(before, mesh=mesh)
    assert isinstance(before, FSDPModule)
    before(x).sum().backward()
    torch.testing.assert_close(before(x), expected)
    with pytest.raises(ValueError, match=r"model got the class FSDPLlamaMLP\. Remove that first .* new model"):
        unpatch(before)
    fully_shard(after, mesh=mesh)
    assert "a __new__ of its own" in patch(after).left[""]
    torch.testing.assert_close(after(x), expected)
    # A layer for itself.
    patch(forward)
    fully_shard(forward.up_proj, mesh=mesh)
    forward(x).sum().backward()
    torch.testing.assert_close(forward(x), expected)
    unpatch(forward)

"""The model: sizes, and that Hugging Face computes the same from what is saved."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer.train.model as model_of
from gossamer.train import PRESETS, Config, Transformer, learning_rate, preset, save_pretrained

pytestmark = pytest.mark.native
SMALL: dict[str, Any] = {
    "layers": 2, "hidden": 32, "intermediate": 44, "heads": 2, "vocabulary": 50, "length": 16, "batch": 4,
    "micro_batch": 2, "steps": 4,
}  # fmt: skip


def test_presets_have_the_sizes_of_table_2() -> None:
    """0.51, 1.03, 1.54 and 2.05 billion parameters, 0.50 to 2.01 without a gate; a step of 1,048,576 tokens."""
    gated = [preset(name).parameters / 1e9 for name in ("0.5b", "1b", "1.5b", "2b")]
    plain = [preset(name, gated=False).parameters / 1e9 for name in ("0.5b", "1b", "1.5b", "2b")]
    assert gated == pytest.approx([0.51, 1.03, 1.54, 2.05], abs=0.005)
    assert plain == pytest.approx([0.50, 1.01, 1.51, 2.01], abs=0.005)
    assert preset("1.5b").tokens_per_step == 2**20
    assert [preset("tiny", batch=batch).micro_batch for batch in (4, 12, 64)] == [4, 4, 8]
    assert 95e6 < preset("100m").parameters < 115e6
    for name in PRESETS:
        assert preset(name, gated=False).intermediate % 16 == 0


@pytest.mark.parametrize("gated", [True, False])
def test_parameters_are_counted(gated: bool) -> None:
    config = Config(**SMALL, gated=gated)
    assert config.parameters == sum(p.numel() for p in Transformer(config).parameters())


def test_weights_are_of_the_seed() -> None:
    first, second, other = (Transformer(Config(**SMALL, seed=seed)) for seed in (3, 3, 4))
    for a, b, c in zip(first.parameters(), second.parameters(), other.parameters()):
        assert torch.equal(a, b) and (a.dim() == 1 or not torch.equal(a, c))
    big = Transformer(Config(**{**SMALL, "hidden": 128, "vocabulary": 999}))
    assert big.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize(
    "gated, activation", [(True, "relu"), (True, "silu"), (True, "relu2"), (False, "relu"), (False, "relu2")]
)
def test_transformers_computes_the_same(gated: bool, activation: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from gossamer.integrations.transformers import patch

    model = Transformer(Config(**SMALL, gated=gated, activation=activation))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # weights of 0.02 make all but the embedding hardly count
    save_pretrained(model, tmp_path, end=0)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(found).__name__ == ("LlamaForCausalLM" if gated else "ArceeForCausalLM")
    ids = torch.randint(50, (2, 16))
    with torch.no_grad():
        logits = model.logits(ids)
        torch.testing.assert_close(found(ids).logits, logits, rtol=1e-4, atol=1e-4)
        if activation != "silu":
            assert len(patch(found, sparse=True).sparse) == 2
            torch.testing.assert_close(found(ids).logits, logits, rtol=1e-4, atol=1e-4)
        tokens = torch.randint(50, (3, 17))
        wanted = found(tokens, labels=tokens).loss
        torch.testing.assert_close(model(tokens).loss, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{"compile": True}, {"recompute": True}, {"dtype": "bfloat16"}])
def test_ways_of_computing_agree(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile_(f, backend="aot_eager", fullgraph=True))
    torch.manual_seed(0)
    tokens = torch.randint(50, (3, 17))
    models = [Transformer(Config(**SMALL)), Transformer(Config(**SMALL, **changes))]
    outs = [model(tokens) for model in models]
    for out in outs:
        (out.loss + 0.1 * out.activity.l1.mean()).backward()
    tolerance: dict[str, float] = {"rtol": 0.05, "atol": 2e-3} if "dtype" in changes else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(outs[1].loss, outs[0].loss, **tolerance)
    torch.testing.assert_close(outs[1].activity.l1, outs[0].activity.l1, **tolerance)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters()):
        assert b.dtype is torch.float32 and b.grad.dtype is torch.float32
        error = (a.grad - b.grad).norm() / a.grad.norm()
        # A neuron near 0 is on in one dtype and off in the other.
        assert error < (0.2 if "dtype" in changes else 1e-4), name


def test_compiled_layers_keep_no_casts_and_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the backward pass: the bytes that it reads, of a model in bfloat16."""
    compile_, kept = torch.compile, dict[str, int]()
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile_(f, backend="aot_eager_decomp_partition"))
    for name, again in (("all", {}), ("few", model_of.AGAIN)):
        monkeypatch.setattr(model_of, "AGAIN", again)
        torch._dynamo.reset()
        model = Transformer(Config(**{**SMALL, "dtype": "bfloat16"}, compile=True))
        owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        found: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in owned:  # noqa: B023
                found[storage.data_ptr()] = storage.nbytes()  # noqa: B023
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.randint(50, (3, 17))).loss
        kept[name] = sum(found.values())
        loss.backward()
    assert kept["few"] < 0.8 * kept["all"]


def test_the_rate_warms_up_and_falls_as_a_cosine() -> None:
    config = Config(**{**SMALL, "steps": 110}, lr=2.0, warmup=10)
    found = [learning_rate(config, step) for step in range(110)]
    assert found[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert found[60] == pytest.approx(1.0) and found[109] < 1e-3
    assert found[35] == pytest.approx(1 + math.cos(math.pi / 4))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layers": 0}, "layers must be at least 1"),
        ({"activation": "gelu"}, "activation must be one of relu, relu2, silu, got 'gelu'"),
        ({"dtype": "float16"}, "dtype must be one of float32, bfloat16"),
        ({"batch": 5}, "batch must be a multiple of micro_batch = 2, got 5"),
        ({"hidden": 30}, "hidden must be a multiple of twice heads = 4, got 30"),
        ({"l1": -1.0}, "coefficient must be at least 0"),
        ({"clip": 0}, "clip must be above 0"),
        ({"warmup": -3}, "warmup must be at least 0"),
        ({"weight_decay": "x"}, "weight_decay must be a number, got str"),
        ({"gated": 7}, "gated must be True or False, got 7"),
    ],
)
def test_a_configuration_says_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Config(**{**SMALL, **changes})


def test_presets_say_what_they_do_not_know() -> None:
    with pytest.raises(ValueError, match=r"name must be one of tiny, small, 100m, .*got '3b'"):
        preset("3b")
    with pytest.raises(ValueError, match=r"changes must be of the fields layers, .*depth"):
        preset("tiny", depth=3)

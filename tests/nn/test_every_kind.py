"""Each autoencoder and transcoder with each of its recipes: losses and gradients against dense PyTorch, in 16 bits, in
compiled code and for any shape of x."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn import dense
from tests.syncs import without_a_sync

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, dense.AUX) for kind in ("topk", "batchtopk", "matryoshka", "matryoshka batch")},
    **{kind: (kind, {}) for kind in ("standard", "gated")},
    "transcoder": ("transcoder", dense.AUX | {"skip": True}),
    **{f"jumprelu, {recipe}": ("jumprelu", options) for recipe, options in dense.RECIPES.items()},
    "jumprelu, pre-acts": ("jumprelu", {"pre_act_coefficient": 0.05}),
}
EVERY = pytest.mark.parametrize("name", MODELS)


def model_of(name: str, x: Tensor) -> Any:
    """With dead latents, but for the kinds that do nothing about them."""
    kind, options = MODELS[name]
    model = dense.make(kind, x.device, **options)
    if kind not in ("standard", "gated"):
        dense.kill(model, x, 12)
    return model


@pytest.mark.parametrize("path", ["sparse", "dense"])
@pytest.mark.parametrize(
    "kind, options",
    [
        *((kind, {}) for kind in ("topk", "batchtopk", "jumprelu", "standard", "gated")),
        *((kind, {"widths": (dense.D_SAE,)}) for kind in ("matryoshka", "matryoshka batch")),
        *((kind, {}) for kind in ("matryoshka", "matryoshka batch")),
        *(
            (kind, {"widths": [1, 7, 50, 96], "inner_weights": [0.5, 0.0, 2.0]})
            for kind in ("matryoshka", "matryoshka batch")
        ),
        *((f"{kind}transcoder", {"skip": skip}) for kind in ("", "batchtopk ", "jumprelu ") for skip in (False, True)),
    ],
    ids=str,
)
def test_loss_and_gradients(
    kind: str, options: dict[str, Any], path: str, device: torch.device, generator: torch.Generator
) -> None:
    x = dense.sample(48, generator)
    model = dense.make(kind, device, **options)
    model.density.pinned = path
    got, grads = dense.compare(model, *dense.given(model, x))
    assert all(grad.any() for grad in grads.values()) and ("W_skip" in grads) == options.get("skip", False)
    assert got.l0 > 3 and got.dead_loss.item() == 0 and model.last_path == path
    assert (got.l0_penalty > 0) == (kind in ("standard", "gated") or kind.startswith("jumprelu"))
    assert (got.further_mse > 0) == (kind == "gated" or len(getattr(model, "widths", ())) > 1)
    assert int(model.firing_counts.sum()) == round(got.l0.item() * 48)


@pytest.mark.parametrize("how", ["autocast", "weights"])
@EVERY
def test_16_bits(name: str, how: str, device: torch.device, generator: torch.Generator) -> None:
    """Terms of the loss stay in float32, near those of float32; gradients have the dtypes of parameters."""
    x = dense.sample(40, generator)
    model, (kind, options) = model_of(name, x), MODELS[name]
    wide = copy.deepcopy(model).loss(*dense.given(model, x))
    if how == "weights":
        narrow = dense.make(kind, device, **options, dtype=torch.bfloat16)
        narrow.load_state_dict(model.state_dict())
        narrow.dead_after = model.dead_after
        model = narrow
    with torch.autocast(device.type, torch.bfloat16, enabled=how == "autocast"):
        given = [t.to(model.W_enc.dtype) for t in dense.given(model, x)]
        assert copy.deepcopy(model).encode(given[0]).dtype is torch.bfloat16
        got = model.loss(*given)
    for term, found in got._asdict().items():
        assert found.dtype is (torch.bfloat16 if term == "reconstruction" else torch.float32)
    for term in ("loss", "l0_penalty", "dead_loss", "further_mse"):
        torch.testing.assert_close(getattr(got, term), getattr(wide, term), rtol=0.05, atol=0)
    for parameter, grad in dense.gradients(got, model).items():
        assert grad.dtype is model.get_parameter(parameter).dtype and bool(grad.isfinite().all())


@EVERY
def test_compiled(name: str, device: torch.device, generator: torch.Generator, compiled: Any) -> None:
    x = dense.sample(40, generator)
    found = dense.compare_compiled(model_of(name, x), x, compiled)
    assert bool(found.dead_loss > 0) == ("aux_k" in MODELS[name][1] or "pre_act_coefficient" in MODELS[name][1])


@EVERY
def test_any_shape_of_x(name: str, device: torch.device, generator: torch.Generator) -> None:
    """Leading dimensions, rows that lie apart, one row without any dimension, and no rows."""
    x = dense.sample(40, generator)
    model = model_of(name, x)
    given = dense.given(model, x)

    def found(*shaped: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
        one = copy.deepcopy(model)
        terms = one.loss(*shaped)
        flat = terms._replace(reconstruction=terms.reconstruction.reshape(-1, given[-1].shape[-1]))
        return list(flat), dense.gradients(terms, one)

    want = found(*given)
    torch.testing.assert_close(found(*(t.view(2, 5, 4, -1) for t in given)), want)
    torch.testing.assert_close(
        found(*(t.view(8, 5, -1).transpose(0, 1).contiguous().transpose(0, 1) for t in given)), want
    )
    torch.testing.assert_close(found(*(t[0] for t in given)), found(*(t[:1] for t in given)))
    assert found(*(t[:0] for t in given))[0][0].item() == 0
    assert model(x[0]).shape == given[-1][0].shape


@EVERY
def test_evaluation(name: str, device: torch.device, generator: torch.Generator) -> None:
    """The loss is that of the reconstruction alone, which is what a call returns."""
    x = dense.sample(40, generator)
    model = model_of(name, x)
    model.loss(*dense.given(model, x))
    got = model.eval().loss(*dense.given(model, x))
    torch.testing.assert_close(got.reconstruction, model(x))
    skipped = 0 if getattr(model, "W_skip", None) is None else x @ model.W_skip.t()
    torch.testing.assert_close(model.decode(model.encode(x)) + skipped, model(x))
    assert got.dead_loss.item() == got.further_mse.item() == 0 and got.mse > 0


@pytest.mark.gpu
@EVERY
def test_loss_without_a_sync(name: str, device: torch.device, generator: torch.Generator) -> None:
    x = dense.sample(64, generator)
    model = model_of(name, x)
    model.loss(*dense.given(model, x)).loss.backward()
    with without_a_sync():
        model.loss(*dense.given(model, x)).loss.backward()
        model.dead()

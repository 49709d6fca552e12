"""SAELens's own autoencoders, patched and not."""

import copy
import math
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sae_lens")

import sae_lens.saes as saes
from sae_lens import SAE
from sae_lens.registry import get_sae_class
from sae_lens.saes.sae import SAEMetadata

from gossamer import sae as operators
from gossamer.integrations.sae_lens import patch, unpatch
from gossamer.testing import assert_close

D_IN, D_SAE, D_OUT = 24, 256, 20
KINDS = (
    "standard",
    "jumprelu",
    "topk",
    "topk, rescaled",
    "gated",
    "transcoder",
    "skip_transcoder",
    "jumprelu_transcoder",
    "jumprelu_skip_transcoder",
)


def make(kind: str, device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> SAE[Any]:
    """A random SAE of which about 20 of 256 latents fire."""
    architecture = kind.split(",")[0]
    if "topk" in kind:
        options |= {"k": 12, "rescale_acts_by_decoder_norm": "rescaled" in kind}
    if "transcoder" in kind:
        options |= {"d_out": D_OUT, "apply_b_dec_to_input": False}
    kind_class, config_class = get_sae_class(architecture)
    config = config_class(d_in=D_IN, d_sae=D_SAE, dtype=str(dtype), device=str(device), **options)
    sae = kind_class(config)
    generator = torch.Generator(device).manual_seed(1)
    for name, parameter in sae.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=device)
        size = {"W_enc": 0.2, "W_dec": 0.2, "W_skip": 0.2, "b_enc": 0.1, "b_gate": 0.1, "b_mag": 0.1}.get(name, 0.05)
        shift = {"b_enc": -1.3, "b_gate": -1.3, "b_mag": 0.3, "threshold": 0.4}.get(name, 0.0)
        if architecture == "topk" and name == "b_enc":
            shift = 0.0
        parameter.data = (noise * size + shift).to(dtype)
    return sae


def pair(kind: str, device: torch.device) -> tuple[SAE[Any], SAE[Any]]:
    """An SAE, and a copy that is patched."""
    plain = make(kind, device)
    patched = copy.deepcopy(plain)
    patch(patched)
    return plain, patched


def activations(device: torch.device, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (40,)) -> Tensor:
    generator = torch.Generator(device).manual_seed(2)
    return torch.randn(*shape, D_IN, generator=generator, device=device).to(dtype)


def agree(patched: SAE[Any], plain: SAE[Any], x: Tensor) -> None:
    """Outputs, within the error budget of the unpatched SAE; dense latents, exactly."""
    exact = copy.deepcopy(plain).to("cpu", torch.float64)
    out = patched(x)
    assert out.dtype is x.dtype
    # A row is gathered in one chain of sums, where a dense product has several.
    assert_close(out, reference64=exact(x.cpu().double()).to(x.device), plain=plain(x), factor=3.0)
    latents = patched.encode(x)
    assert torch.equal(latents, plain.encode(x))
    decoded = exact.decode(latents.cpu().double()) if not _scaled(plain) else None
    if decoded is not None:
        assert_close(patched.decode(latents), reference64=decoded.to(x.device), plain=plain.decode(latents))


def _scaled(sae: SAE[Any]) -> bool:
    """Whether `decode` needs what `encode` has left, once."""
    return sae.cfg.normalize_activations in ("constant_norm_rescale", "layer_norm")


def spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators that are called, as they are called."""
    calls: list[str] = []

    def spy(name: str) -> Callable[..., Any]:
        original = getattr(operators, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(f"{name} {type(args[0]).__name__}")
            return original(*args, **kwargs)

        return call

    for name in ("encode", "decode"):
        monkeypatch.setattr(operators, name, spy(name))
    return calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(40,), (3, 5), (0,)], ids=str)
def test_same_outputs(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    plain = make(kind, device, dtype)
    patched = copy.deepcopy(plain)
    patch(patched)
    x = activations(device, dtype, shape)
    with torch.no_grad():
        if not x.numel():
            assert patched(x).shape == plain(x).shape
            return
        if dtype is torch.float32:
            agree(patched, plain, x)
        else:
            # An entry near its threshold may fall on either side of it in half precision, and weighs what it weighs.
            exact = copy.deepcopy(plain).to("cpu", torch.float64)(x.cpu().double()).to(device)
            errors = [(sae(x) - exact).norm() for sae in (patched, plain)]
            assert errors[0] <= 1.5 * errors[1] + 0.05 * exact.norm()
            assert torch.equal(patched.encode(x), plain.encode(x))


@pytest.mark.parametrize("kind", KINDS)
def test_small_products_are_those_of_the_class(kind: str, device: torch.device) -> None:
    plain = make(kind, device)
    patched = copy.deepcopy(plain)
    report, x = patch(patched), activations(device)
    with torch.no_grad():
        latents = plain.encode(x)
        assert torch.equal(patched(x), plain(x)) and report.density.last_path is None
        if not _scaled(plain):
            assert torch.equal(patched.decode(latents), plain.decode(latents))
        heard: list[Tensor] = []
        handle = patched.hook_sae_acts_post.register_forward_hook(lambda module, args, out: heard.append(out))
        assert torch.equal(patched(x), plain(x)) and torch.equal(heard[0], latents)
        handle.remove()
        report.density.pinned = "sparse"
        agree(patched, plain, x)
    assert report.density.last_path == "sparse"


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_nan(kind: str, device: torch.device) -> None:
    plain, patched = pair(kind, device)
    x = activations(device)
    x[3] = torch.nan
    with torch.no_grad():
        assert torch.equal(patched(x).isnan(), plain(x).isnan()) and plain(x)[3].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_latents_stay_packed(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    patched = make(kind, device)
    assert "forward" in patch(patched).accelerated
    calls = spied(monkeypatch)
    with torch.no_grad():
        patched(activations(device))
    if kind == "gated":
        assert calls == ["decode Rows"]
    else:
        assert calls == ["encode Tensor", "decode Rows"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", ["hook_sae_acts_pre", "hook_sae_acts_post", "hook_sae_input", "hook_sae_recons"])
def test_hooks_fire(kind: str, point: str, device: torch.device) -> None:
    plain, patched = pair(kind, device)
    x = activations(device)
    seen: list[Tensor] = []

    def change(tensor: Tensor, hook: Any) -> Tensor:
        seen.append(tensor)
        return tensor * (torch.arange(tensor.shape[-1], device=device) % 3 > 0)

    with torch.no_grad():
        expected = plain.run_with_hooks(x, fwd_hooks=[(point, change)])
        out = patched.run_with_hooks(x, fwd_hooks=[(point, change)])
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(seen[1], seen[0])
        torch.testing.assert_close(patched(x), plain(x))
    assert len(seen) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_run_with_cache(kind: str, device: torch.device) -> None:
    plain, patched = pair(kind, device)
    with torch.no_grad():
        (expected, cache), (out, other) = (sae.run_with_cache(activations(device)) for sae in (plain, patched))
    torch.testing.assert_close(out, expected)
    assert list(cache) == list(other) and "hook_sae_acts_post" in cache
    for name in cache:
        torch.testing.assert_close(other[name], cache[name])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "transcoder" not in kind])
def test_error_term(kind: str, device: torch.device) -> None:
    patched = make(kind, device)
    patch(patched)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        patched.use_error_term = True
    x = activations(device)
    with torch.no_grad():
        torch.testing.assert_close(patched(x), x)
        zeroed = patched.run_with_hooks(x, fwd_hooks=[("hook_sae_acts_post", lambda acts, hook: acts * 0)])
    assert (zeroed - x).norm() > 0.1 * x.norm()


@pytest.mark.parametrize(
    "options",
    [
        {"normalize_activations": "constant_norm_rescale"},
        {"normalize_activations": "layer_norm"},
        {"apply_b_dec_to_input": False},
        {"apply_b_dec_to_input": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["standard", "jumprelu", "topk", "gated"])
def test_normalisation(kind: str, options: dict[str, Any], device: torch.device) -> None:
    # Not a copy: the closures that normalise write to the SAE that they were made for.
    plain, patched = (make(kind, device, **options) for _ in range(2))
    patch(patched)
    with torch.no_grad():
        agree(patched, plain, activations(device, shape=(3, 7)))


def test_hook_z(device: torch.device) -> None:
    options = {"reshape_activations": "hook_z", "metadata": SAEMetadata(hook_name="blocks.0.attn.hook_z")}
    plain, patched = (make("jumprelu", device, **options) for _ in range(2))
    patch(patched)
    x = activations(device, shape=(5, 3)).reshape(5, 3, 4, D_IN // 4)
    with torch.no_grad():
        out = patched(x)
        assert out.shape == x.shape
        torch.testing.assert_close(out, plain(x))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str, device: torch.device) -> None:
    plain, patched = pair(kind, device)
    x = activations(device)
    grad = torch.randn(40, D_OUT if "transcoder" in kind else D_IN, device=device)
    results = []
    for sae in (plain, patched):
        leaf = x.clone().requires_grad_()
        sae(leaf).backward(grad)
        results.append({"x": leaf.grad} | {name: p.grad for name, p in sae.named_parameters()})
    assert results[1]["W_dec"] is not None
    for name, expected in results[0].items():
        if expected is None:
            assert results[1][name] is None
        else:
            torch.testing.assert_close(
                results[1][name], expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_latents_that_somebody_holds(kind: str, device: torch.device) -> None:
    """An attribution asks for the gradient of every latent, of those that are 0, too."""
    plain, patched = pair(kind, device)
    latents = plain.encode(activations(device)).detach()
    results = []
    for sae in (plain, patched):
        leaf = latents.clone().requires_grad_()
        weights = tuple(sae.get_parameter(name) for name in ("W_dec", "b_dec"))
        results.append(torch.autograd.grad(sae.decode(leaf).square().sum(), (leaf, *weights)))
    for ours, expected in zip(results[1], results[0]):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert (results[1][0] != 0).all()


def test_under_autocast(device: torch.device) -> None:
    for kind in KINDS:
        plain, patched = pair(kind, device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            out, expected = patched(activations(device)), plain(activations(device))
        assert out.dtype is expected.dtype, kind
        # As in half precision, an entry may fall on either side of its threshold.
        assert (out - expected).norm() <= 0.1 * expected.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_it_can_be_changed_saved_and_copied(kind: str, device: torch.device, tmp_path: Path) -> None:
    plain, patched = pair(kind, device)
    x = activations(device)
    assert list(patched.state_dict()) == list(plain.state_dict())
    assert repr(patched) == repr(plain)
    if kind != "topk":
        for sae in (plain, patched):
            sae.fold_W_dec_norm()
    with torch.no_grad():
        expected = plain(x)
        torch.testing.assert_close(patched(x), expected)
        patched.save_model(tmp_path)
        loaded = SAE.load_from_disk(tmp_path, device=str(device))
        torch.testing.assert_close(loaded(x), expected)
        twin = copy.deepcopy(patched)
        twin.W_dec.data.zero_()
        torch.testing.assert_close(patched(x), expected)
        assert not torch.allclose(twin(x), expected)
        patched.to(torch.bfloat16)
        assert patched(x.bfloat16()).dtype is torch.bfloat16


def test_unpatch(device: torch.device) -> None:
    sae = make("jumprelu", device)
    before = dict(sae.__dict__)
    patch(sae)
    assert sae.__dict__.keys() != before.keys()
    unpatch(sae)
    assert sae.__dict__.keys() == before.keys()
    with pytest.warns(UserWarning, match=r"^integrations.sae_lens.unpatch: sae is not patched; nothing changed\.$"):
        unpatch(sae)
    assert sae.__dict__.keys() == before.keys()


def test_patched_twice(device: torch.device) -> None:
    """As when a cell of a notebook runs again: the second patch says so, and is the first one."""
    sae, x = make("jumprelu", device), activations(device)
    report = patch(sae)
    bound = {name: sae.__dict__[name] for name in ("forward", "encode", "decode", "_gossamer")}
    with pytest.warns(UserWarning, match=r"^integrations.sae_lens.patch: sae is patched already; nothing changed\.$"):
        assert patch(sae) is report
    assert all(sae.__dict__[name] is value for name, value in bound.items())
    with pytest.warns(UserWarning, match="patched already"):
        checked = patch(sae, check=x)
    assert checked.check is not None and checked.check.difference < 1e-4 and checked.density is report.density
    twin = copy.deepcopy(sae)
    with pytest.warns(UserWarning, match="patched already"):
        assert patch(twin).accelerated == report.accelerated and patch(twin).density is not report.density
    assert pickle.loads(pickle.dumps(twin._gossamer)).report.left == report.left
    unpatch(sae)
    assert "forward" not in sae.__dict__


def test_a_check_on_which_sae_lens_gives_nan(device: torch.device) -> None:
    """SAELens's own output says nothing of the patched one, and there is nothing to report."""
    sae, x = make("topk, rescaled", device), activations(device)
    sae.W_dec.data[:250] = 0
    with pytest.raises(ValueError, match=r"patch: SAELens's own output on check is NaN .* some rows of sae.W_dec have"):
        patch(sae, check=x)
    assert "forward" not in sae.__dict__
    sae.W_dec.data.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"own output on check is NaN or infinite, for sae.W_dec is. Load"):
        patch(sae, check=x)


def test_a_negative_threshold_does_not_let_negative_values_pass(device: torch.device) -> None:
    sae = make("jumprelu", device)
    sae.threshold.data[::2] = -0.5
    with torch.no_grad():
        expected = sae(activations(device))
        patch(sae)
        torch.testing.assert_close(sae(activations(device)), expected)


def test_check(device: torch.device) -> None:
    sae = make("jumprelu", device)
    x = activations(device)
    with torch.no_grad():
        l0 = float((sae.encode(x) != 0).sum(-1).float().mean())
    check = patch(sae, check=x).check
    assert check is not None and check.error is not None
    assert check.l0 == pytest.approx((l0, l0), abs=0.1)
    assert check.error[0] == pytest.approx(check.error[1], rel=1e-4)
    assert 0 <= check.difference < 1e-5
    transcoder = make("transcoder", device)
    report = patch(transcoder, check=x)
    assert report.check is not None and report.check.error is None
    text = str(report)
    assert "l0: " in text and "relative difference" in text and "stay packed" in text


def test_check_of_heads_and_with_an_error_term(device: torch.device) -> None:
    options = {"reshape_activations": "hook_z", "metadata": SAEMetadata(hook_name="blocks.0.attn.hook_z")}
    rows = activations(device) + 3 * torch.arange(D_IN, device=device)
    by_rows = patch(make("jumprelu", device), check=rows).check
    by_heads = patch(make("jumprelu", device, **options), check=rows.reshape(*rows.shape[:-1], 4, D_IN // 4)).check
    assert by_rows is not None and by_rows.error is not None and by_heads is not None
    assert by_heads.error == pytest.approx(by_rows.error, rel=1e-4)
    sae = make("jumprelu", device)
    sae.use_error_term = True
    found = patch(sae, check=rows).check
    assert found is not None and found.error == pytest.approx(by_rows.error, rel=1e-4) and sae.use_error_term


@pytest.mark.parametrize(
    "check, error, message",
    [
        ([1.0], TypeError, "check must be a tensor of activations, got list"),
        (torch.ones(3, 5), ValueError, r"check must have shape \[..., d_in\] with d_in = .* got \[3, 5\]"),
        (torch.ones(0, D_IN), ValueError, r"check must have .* at least one row, got \[0, "),
        (torch.full((2, D_IN), math.nan), ValueError, "check must be finite"),
    ],
)
def test_check_errors(check: Any, error: type[Exception], message: str, device: torch.device) -> None:
    sae = make("jumprelu", device)
    with pytest.raises(error, match=f"integrations.sae_lens.patch: {message}"):
        patch(sae, check=check)
    assert "forward" not in sae.__dict__


def test_a_hook_on_the_activation_fires(device: torch.device) -> None:
    sae = make("jumprelu", device)
    patch(sae)
    fired: list[int] = []
    sae.activation_fn.register_forward_hook(lambda *_: fired.append(1))
    sae(activations(device))
    assert fired == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_error_term_beside_a_hook_gives_the_input(dtype: torch.dtype, device: torch.device) -> None:
    """What is added with the error term goes the way that the output went, or both differ where selections do."""
    sae = saes.TopKSAE(saes.TopKSAEConfig(d_in=64, d_sae=2048, k=16, dtype=str(dtype)[6:], device=str(device)))
    sae.b_enc.data.normal_(std=0.3)
    sae.use_error_term = True
    x = torch.randn(64, 64, device=device).to(dtype)
    patch(sae)
    with torch.no_grad():
        for out in (sae(x), sae.run_with_cache(x)[0]):
            assert float((out - x).abs().max()) < (1e-5 if dtype is torch.float32 else 0.1)


@pytest.mark.native
def test_compiled_before_any_eager_call(device: torch.device) -> None:
    sae = make("jumprelu", device)
    x = activations(device)
    with torch.no_grad():
        expected = sae(x)
        patch(sae)
        compiled = torch.compile(sae, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected)


def test_a_check_that_fails_leaves_the_sae_as_it_was(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    sae = make("standard", device)
    wrong = operators.decode
    monkeypatch.setattr(operators, "decode", lambda *args: wrong(*args) * 1.01)
    with pytest.raises(ValueError, match=r"differs by 1.*unpatched again"):
        patch(sae, check=activations(device))
    assert "forward" not in sae.__dict__


def test_what_is_left(device: torch.device) -> None:
    class Own(saes.StandardSAE):
        def encode(self, x: Tensor) -> Tensor:
            return super().encode(x) * 2

    config = saes.StandardSAEConfig(d_in=D_IN, d_sae=D_SAE, device=str(device))
    sae = Own(config)
    x = activations(device)
    with torch.no_grad():
        expected = sae(x)
        report = patch(sae)
        torch.testing.assert_close(sae(x), expected)
    assert list(report.accelerated) == ["decode"]
    assert report.left["forward"] == "Own has an encode of its own"
    assert "left as it is, Own has" in str(report)
    silu = make("standard", device)
    silu.activation_fn = torch.nn.SiLU()
    assert patch(silu).left["forward"] == "its activation is SiLU, not ReLU"


def test_in_a_language_model(device: torch.device) -> None:
    """SAELens's transformer calls encode and decode by itself, with or without its error term."""
    from sae_lens import HookedSAETransformer
    from transformer_lens import HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=1, d_model=D_IN, n_ctx=16, d_head=8, n_heads=3, d_mlp=32, d_vocab=50, act_fn="relu", device=str(device)
    )
    model = HookedSAETransformer(config)
    torch.nn.init.normal_(model.embed.W_E)
    hook = "blocks.0.hook_resid_pre"
    plain = make("jumprelu", device, metadata=SAEMetadata(hook_name=hook))
    patched = copy.deepcopy(plain)
    patch(patched)
    tokens = torch.randint(50, (2, 16), device=device)
    for use_error_term in (False, True):
        results = []
        for sae in (plain, patched):
            seen: list[Tensor] = []
            model.add_sae(sae, use_error_term=use_error_term)
            name = f"{hook}.hook_sae_acts_post"
            listen = [(name, lambda acts, hook, seen=seen: seen.append(acts))]
            logits = model.run_with_hooks(tokens, fwd_hooks=listen)
            model.reset_saes()
            results.append((logits, *seen, *torch.autograd.grad(logits.square().sum(), seen)))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
        _, latents, grads = results[1]
        assert (latents != 0).any() and (grads[latents == 0] != 0).any()


def test_errors(device: torch.device) -> None:
    with pytest.raises(TypeError, match="unpatch: sae must be a SAELens SAE, got Linear"):
        unpatch(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"\.patch: sae must be a SAELens SAE, got Linear"):
        patch(torch.nn.Linear(2, 2))


def test_encode_is_dense_for_everybody_else(device: torch.device) -> None:
    """For hooks that call it while forward runs, error term and all, and for other threads."""
    sae = make("jumprelu", device)
    x = activations(device)
    with torch.no_grad():
        expected = sae.encode(x)
        patch(sae)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            sae.use_error_term = True
        found: list[Any] = []
        asking = [False]

        def ask(tensor: Tensor, hook: Any) -> None:
            # Its own encode fires the hooks again.
            if not asking[0]:
                asking[0] = True
                found.append(sae.encode(x))
                asking[0] = False

        points = ("hook_sae_input", "hook_sae_recons", "hook_sae_error", "hook_sae_output")
        out = sae.run_with_hooks(x, fwd_hooks=[(point, ask) for point in points])
        torch.testing.assert_close(out, x)
        assert len(found) >= 4 and all(torch.equal(one, expected) for one in found)
        stop, wrong = threading.Event(), []

        def ask_on() -> None:
            while not stop.is_set():
                wrong.extend([type(one) for one in [sae.encode(x)] if not isinstance(one, Tensor)])

        thread = threading.Thread(target=ask_on)
        thread.start()
        for _ in range(200):
            torch.testing.assert_close(sae(x), x)
        stop.set()
        thread.join()
        assert not wrong


def test_an_error_in_between_leaves_nothing_behind(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    sae = make("topk", device)
    x = activations(device)
    patch(sae)
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            sae(x[:, :3])
        assert isinstance(sae.encode(x), Tensor)
        calls = spied(monkeypatch)
        sae(x)
    assert calls == ["encode Tensor", "decode Rows"]


def test_what_was_replaced_by_hand_stays(device: torch.device) -> None:
    sae = make("standard", device)
    x = activations(device)
    sae.forward = lambda x: x * 2
    report = patch(sae)
    assert not report.accelerated and "replaced on this instance" in report.left["forward"]
    assert torch.equal(sae(x), x * 2)
    unpatch(sae)
    assert torch.equal(sae(x), x * 2)

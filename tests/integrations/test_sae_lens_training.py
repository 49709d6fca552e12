"""SAELens's autoencoders in training, patched and not, by hand and under SAELens's own trainer."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sae_lens")

from sae_lens import SAE
from sae_lens.config import LoggingConfig, SAETrainerConfig
from sae_lens.registry import get_sae_training_class
from sae_lens.saes.sae import TrainingSAE, TrainStepInput, TrainStepOutput
from sae_lens.training.sae_trainer import SAETrainer

from gossamer.integrations.sae_lens import patch, unpatch
from gossamer.integrations.sae_lens._latents import Latents, Lazy
from gossamer.rowsparse import DensityTracker
from gossamer.testing import assert_close
from tests.integrations.models import compare_gradients, gradients

D_IN, D_SAE, BATCH = 16, 192, 64
KINDS = (
    "topk",
    "topk, rescaled",
    "batchtopk",
    "batchtopk, rescaled",
    "jumprelu",
    "jumprelu, quadratic",
    "jumprelu, ste to input",
    "jumprelu, tanh",
    "matryoshka_batchtopk",
    "matryoshka_batchtopk, rescaled",
    "standard",
    "gated",
)
# What is left to SAELens.
LEFT = ("batchtopk, of a fraction", "matryoshka_batchtopk, aux", "standard, L2")


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents are packed however many fire; when they are dense instead is `test_sae_lens_density`'s."""
    monkeypatch.setattr(DensityTracker, "path", lambda *_, **__: "sparse")


def make(kind: str, device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> TrainingSAE[Any]:
    """A random SAE of which about 8 of 192 latents fire."""
    architecture, _, detail = kind.partition(", ")
    if "topk" in architecture:
        options = {"k": 8, "rescale_acts_by_decoder_norm": detail == "rescaled"} | options
    if detail == "of a fraction":
        options["k"] = 7.5
    if architecture == "matryoshka_batchtopk":
        options |= {"matryoshka_widths": [7, 64, 192], "use_matryoshka_aux_loss": detail == "aux"}
    if detail == "L2":
        options["lp_norm"] = 2.0
    if architecture == "jumprelu":
        options = {"jumprelu_bandwidth": 0.4, "l0_coefficient": 0.3, "pre_act_loss_coefficient": 0.01} | options
        options |= {"jumprelu_ste_to_input": detail == "ste to input"}
    if detail in ("quadratic", "tanh"):
        options |= {"jumprelu_sparsity_loss_mode": detail, "target_l0": 10.0}
    kind_class, config_class = get_sae_training_class(architecture)
    sae = kind_class(config_class(d_in=D_IN, d_sae=D_SAE, dtype=str(dtype), device=str(device), **options))
    generator = torch.Generator(device).manual_seed(1)
    for name, parameter in sae.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=device)
        size = {"W_enc": 0.25, "W_dec": 0.25}.get(name, 0.05)
        shift = {"b_enc": -0.6, "threshold": 1.0}.get(name, 0.0) if architecture == "jumprelu" else 0.0
        if architecture in ("standard", "gated"):
            shift = {"b_enc": -1.5, "b_gate": -1.5}.get(name, 0.0)
        parameter.data = (noise * size + shift).to(parameter.dtype)
    return sae


def pair(kind: str, device: torch.device) -> tuple[TrainingSAE[Any], TrainingSAE[Any]]:
    """An SAE, and a copy that is patched."""
    plain = make(kind, device)
    patched = copy.deepcopy(plain)
    patch(patched)
    return plain, patched


def activations(device: torch.device, dtype: torch.dtype = torch.float32, rows: int = BATCH, seed: int = 2) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, D_IN, generator=generator, device=device).to(dtype)


def step(sae: TrainingSAE[Any], x: Tensor, dead: int = 0, backward: bool = True) -> TrainStepOutput:
    """One pass of losses and gradients in which the first `dead` latents count as dead."""
    mask = torch.arange(D_SAE, device=x.device) < dead
    coefficients = {name: 0.3 for name in sae.get_coefficients()}
    sae.zero_grad()
    given = TrainStepInput(x, coefficients, mask, n_training_steps=0, is_logging_step=False)
    output = sae.training_forward_pass(given)
    if backward:
        output.loss.backward()
    return output


@pytest.fixture
def materialized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which lazy tensors have been made dense."""
    made: list[str] = []
    original = Lazy.dense

    def dense(self: Lazy) -> Tensor:
        made.append(type(self).__name__)
        return original(self)

    monkeypatch.setattr(Lazy, "dense", dense)
    return made


@pytest.mark.parametrize("kind", [*KINDS, *LEFT])
def test_compiled(kind: str, device: torch.device) -> None:
    """As SAELens's `compile_sae=True` compiles a step; losses, gradients and what the step counts are those without."""
    plain = make(kind, device)
    patched, wanted = copy.deepcopy(plain), step(plain, activations(device), dead=30)
    patch(patched)
    patched.training_forward_pass = torch.compile(patched.training_forward_pass, backend="aot_eager")  # type: ignore[method-assign]
    found = step(patched, activations(device), dead=30)
    assert isinstance(found.feature_acts, Latents) == (kind in KINDS)
    for name, loss in wanted.losses.items():
        torch.testing.assert_close(found.losses[name], loss, rtol=1e-4, atol=1e-5)
    compare_gradients(gradients(patched), gradients(plain), rtol=1e-4, atol=1e-5)
    # What the SAE was compiled with stays, and computes as SAELens does.
    unpatch(patched)
    again = step(patched, activations(device), dead=30)
    torch.testing.assert_close(again.loss, wanted.loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_function_of_what_a_step_returns(kind: str, device: torch.device) -> None:
    """It reaches every parameter, the decoder by whose norms latents are scaled among them."""
    plain, patched = pair(kind, device)

    def l1(output: TrainStepOutput) -> Tensor:
        return output.feature_acts.abs().sum() + 0.1 * output.hidden_pre.square().sum()

    for sae, function in ((plain, l1), (patched, torch.compile(l1, backend="aot_eager"))):
        function(step(sae, activations(device), backward=False)).backward()
    compare_gradients(gradients(patched), gradients(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dead", [0, 3, 30])
def test_losses_and_gradients(kind: str, dead: int, device: torch.device, materialized: list[str]) -> None:
    plain = make(kind, device)
    patched, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    if "threshold" in dict(exact.named_parameters()):
        exact.threshold.data = plain.threshold.data.double()
    report = patch(patched)
    assert "training_forward_pass" in report.accelerated and "forward" in report.accelerated
    x = activations(device)
    ours, theirs, reference = step(patched, x, dead), step(plain, x, dead), step(exact, x.double(), dead)
    assert not materialized
    assert set(ours.losses) == set(theirs.losses)
    for name in ours.losses:
        assert_close(ours.losses[name], reference64=reference.losses[name], plain=theirs.losses[name], name=name)
    assert_close(ours.sae_out, reference64=reference.sae_out, plain=theirs.sae_out)
    assert gradients(patched).keys() == gradients(plain).keys()
    for name, grad in gradients(patched).items():
        assert grad.dtype is gradients(plain)[name].dtype
        assert_close(grad, reference64=gradients(exact)[name], plain=gradients(plain)[name], name=name)
    for name in ("feature_acts", "hidden_pre"):
        a, b, c = (getattr(output, name) for output in (ours, theirs, reference))
        assert (a.shape, a.dtype, a.device, a.requires_grad) == (b.shape, b.dtype, b.device, True)
        assert_close(a * 1, reference64=c, plain=b)
    if "batchtopk" in kind:
        torch.testing.assert_close(patched.topk_threshold, plain.topk_threshold, rtol=1e-5, atol=0)
        assert patched.topk_threshold > 0


@pytest.mark.parametrize("kind", ["batchtopk", "batchtopk, rescaled"])
def test_the_threshold_where_every_row_overflows(kind: str, device: torch.device, materialized: list[str]) -> None:
    plain = make(kind, device, k=150)
    plain.b_enc.data += 5
    patched = copy.deepcopy(plain)
    patch(patched)
    for sae in (plain, patched):
        step(sae, activations(device))
    assert plain.topk_threshold > 0 and not materialized
    torch.testing.assert_close(patched.topk_threshold, plain.topk_threshold, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_reads_the_latents_gets_them(kind: str, device: torch.device) -> None:
    """As numbers, and as a part of the graph: a loss of one's own on them has the gradients that it had."""
    plain, patched = pair(kind, device)
    x = activations(device)
    for sae in (plain, patched):
        output = sae.training_forward_pass(TrainStepInput(x, {"l0": 0.1, "l1": 0.1}, None, 0, False))
        (output.loss + 0.1 * (output.feature_acts**2).sum() + 0.01 * torch.tanh(output.hidden_pre).sum()).backward()
    compare_gradients(gradients(patched), gradients(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_trainer_counts(kind: str, device: torch.device, materialized: list[str]) -> None:
    (plain, patched), x = pair(kind, device), activations(device)
    ours, theirs = (step(sae, x).feature_acts for sae in (patched, plain))
    assert isinstance(ours, Latents) and ours.packed
    for axis in (0, -2, 1, -1):
        assert ours.bool().float().sum(axis).tolist() == theirs.bool().float().sum(axis).tolist()
    assert not materialized
    assert torch.equal((ours != 0).cpu(), (theirs != 0).cpu()) and not ours.packed
    # What is changed in place is changed for everybody.
    with torch.no_grad():
        ours.zero_()
    assert not ours.bool().float().sum(0).any() and not patched.decode(ours).sub(patched.b_dec).any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_after_the_optimizer(kind: str, device: torch.device) -> None:
    """Latents are those of the step; pre-activations, which would not be, raise."""
    (plain, patched), x = pair(kind, device), activations(device)
    ours, theirs = step(patched, x), step(plain, x)
    torch.optim.SGD(patched.parameters(), lr=0.1).step()
    torch.testing.assert_close(ours.feature_acts * 1, theirs.feature_acts)
    with pytest.raises(RuntimeError, match=r"hidden_pre is computed when it is read.*before optimizer.step"):
        ours.hidden_pre.sum()


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_is_overwritten(kind: str, device: torch.device) -> None:
    sae, x = make(kind, device), activations(device)
    patch(sae)
    output = step(sae, x)
    x.copy_(activations(device, seed=3))
    with pytest.raises(RuntimeError, match=r"hidden_pre is computed when it is read.*next batch"):
        output.hidden_pre.sum()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["feature_acts", "hidden_pre"])
def test_no_gradient_is_lost_silently(kind: str, name: str, device: torch.device) -> None:
    """In what goes round the dense tensor, as `autograd.Function.apply` does, or waits for what never comes."""
    (plain, patched), x = pair(kind, device), activations(device)

    def output(sae: TrainingSAE[Any]) -> Tensor:
        found: Tensor = getattr(
            sae.training_forward_pass(TrainStepInput(x, {"l0": 0.1, "l1": 0.1}, None, 0, False)), name
        )
        return found

    with pytest.raises(RuntimeError, match=r"a way that goes round.*tensor\.clone\(\)"):
        Doubled.apply(output(patched)).sum().backward()
    for sae in (plain, patched):
        sae.zero_grad()
        Doubled.apply(output(sae).clone()).sum().backward()
    compare_gradients(gradients(patched), gradients(plain), rtol=1e-4, atol=1e-5)
    for call in (lambda t: t.retain_grad(), lambda t: t.register_hook(print)):
        with pytest.raises(RuntimeError, match=r"would see no gradient.*hook_sae_acts_post"):
            call(output(patched))
    with torch.no_grad():
        assert not Doubled.apply(output(patched)).requires_grad


def test_a_check_names_negative_thresholds(device: torch.device) -> None:
    sae, x = make("jumprelu", device), activations(device)
    sae.threshold.data.fill_(-0.1)
    with pytest.raises(ValueError, match=r"some thresholds are below 0.*clamp_"):
        patch(sae, check=x)
    sae.threshold.data.clamp_(min=0)
    patch(sae, check=x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", ["hook_sae_acts_pre", "hook_sae_acts_post", "hook_sae_input", "hook_sae_recons"])
def test_hooks(kind: str, point: str, device: torch.device) -> None:
    (plain, patched), x = pair(kind, device), activations(device)
    outputs, seen = [], []
    for sae in (plain, patched):

        def change(tensor: Tensor, hook: Any) -> Tensor:
            seen.append(type(tensor))
            return tensor * (torch.arange(tensor.shape[-1], device=device) % 3 > 0)

        sae.get_submodule(point).add_hook(change)
        outputs.append((step(sae, x, dead=5), sae(x)))
    assert all(kind is Tensor for kind in seen) and len(seen) == 4
    (theirs, forward), (ours, patched_forward) = outputs
    torch.testing.assert_close(ours.loss, theirs.loss)
    torch.testing.assert_close(patched_forward, forward)
    compare_gradients(gradients(patched), gradients(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_inference_calls(kind: str, device: torch.device) -> None:
    """forward, encode, decode, error term and cache of an SAE that is being trained."""
    plain, x = make(kind, device), activations(device)
    patched = copy.deepcopy(plain)
    assert patch(patched, check=x).check is not None
    with torch.no_grad():
        torch.testing.assert_close(patched(x), plain(x))
        assert type(patched.encode(x)) is Tensor and torch.equal(patched.encode(x), plain.encode(x))
        torch.testing.assert_close(patched.decode(plain.encode(x)), plain.decode(plain.encode(x)))
        patched.use_error_term = plain.use_error_term = True
        torch.testing.assert_close(patched(x), plain(x))
        cached = patched.run_with_cache(x)[1]
        assert torch.equal(cached["hook_sae_acts_post"], plain.run_with_cache(x)[1]["hook_sae_acts_post"])
    unpatch(patched)
    assert not {"forward", "encode_with_hidden_pre", "training_forward_pass"} & patched.__dict__.keys()
    assert torch.equal(step(patched, x).loss, step(plain, x).loss)


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left(kind: str, device: torch.device) -> None:
    plain, x = make(kind, device), activations(device)
    patched = copy.deepcopy(plain)
    report = patch(patched, check=x)
    assert "training_forward_pass" in report.left and report.left["training_forward_pass"] in str(report)
    ours, theirs = step(patched, x, dead=5), step(plain, x, dead=5)
    assert type(ours.feature_acts) is Tensor
    torch.testing.assert_close(ours.loss, theirs.loss)
    compare_gradients(gradients(patched), gradients(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", ["bfloat16", "autocast"])
def test_half_precision(kind: str, context: str, device: torch.device) -> None:
    """The same latents but for what rounding decides, and the same dtypes everywhere."""
    dtype = torch.bfloat16 if context == "bfloat16" else torch.float32
    plain, x = make(kind, device, dtype), activations(device, dtype)
    patched, exact = copy.deepcopy(plain), copy.deepcopy(plain).to("cpu", torch.float64)
    patch(patched)
    outputs = []
    for sae in (plain, patched):
        with torch.autocast(device.type, torch.bfloat16, context == "autocast"):
            outputs.append(step(sae, x, dead=5))
    theirs, ours = outputs
    reference = step(exact, x.cpu().double(), dead=5)
    for name in ("sae_out", "feature_acts", "hidden_pre", "loss"):
        assert getattr(ours, name).dtype is getattr(theirs, name).dtype, name
    wanted = reference.loss.item()
    errors = [abs(output.loss.item() - wanted) / abs(wanted) for output in (ours, theirs)]
    assert errors[0] <= 2 * errors[1] + 0.02
    for name, grad in gradients(patched).items():
        other = gradients(plain)[name]
        assert grad.dtype is other.dtype and grad.isfinite().all()
        wanted_grad = gradients(exact)[name].to(grad.device)
        errors = [float((g.double() - wanted_grad).norm() / wanted_grad.norm()) for g in (grad, other)]
        assert errors[0] <= 1.5 * errors[1] + 0.05, name


def batches(device: torch.device, steps: int) -> Iterator[Tensor]:
    """Rows with structure to find: few of 48 directions each."""
    generator = torch.Generator(device).manual_seed(5)
    directions = torch.randn(48, D_IN, generator=generator, device=device)
    for _ in range(steps):
        chosen = torch.rand(BATCH, 48, generator=generator, device=device)
        yield torch.where(chosen > 0.94, chosen * 2, 0) @ directions


def train(sae: TrainingSAE[Any], steps: int, device: torch.device, watch: Callable[[int], Any] | None = None) -> Any:
    """SAELens's trainer; (losses, trainer)."""
    logger = LoggingConfig(log_to_wandb=False)
    config = SAETrainerConfig(
        n_checkpoints=0, checkpoint_path=None, save_final_checkpoint=False, total_training_samples=steps * BATCH,
        device=str(device), autocast=False, lr=2e-3, lr_end=2e-4, lr_scheduler_name="constant", lr_warm_up_steps=0,
        adam_beta1=0.9, adam_beta2=0.999, lr_decay_steps=0, n_restart_cycles=1, train_batch_size_samples=BATCH,
        dead_feature_window=100, feature_sampling_window=2000, logger=logger,
    )  # fmt: skip
    trainer = SAETrainer(config, sae, batches(device, steps + 1))
    losses = []
    original = trainer._train_step

    def watched(*args: Any, **kwargs: Any) -> TrainStepOutput:
        if watch is not None:
            watch(trainer.n_training_steps)
        output = original(*args, **kwargs)
        losses.append(output.losses["mse_loss"].item())
        return output

    trainer._train_step = watched
    trainer.fit()
    return torch.tensor(losses), trainer


# nn's own test_a_thousand_steps takes BatchTopK in every run of the tests.
FULL = [pytest.param(kind, marks=pytest.mark.full) for kind in ("topk, rescaled", "batchtopk, rescaled")]


@pytest.mark.parametrize("kind", [*FULL, "jumprelu"])
def test_a_thousand_steps_of_saelens_own_trainer(kind: str, device: torch.device, materialized: list[str]) -> None:
    """From one seed, sparse against dense: the same losses, L0 and dead share within noise, and at steps 0, 10 and 100
    gradients as near to float64 as the dense ones."""
    options = {"l0_coefficient": 0.02, "jumprelu_init_threshold": 0.1} if kind == "jumprelu" else {}
    plain = make(kind, device, **options)
    if kind == "jumprelu":
        plain.threshold.data.fill_(0.3)
        plain.b_enc.data.zero_()
    patched = copy.deepcopy(plain)
    patch(patched)

    def compare(steps: int) -> None:
        if steps not in (0, 10, 100):
            return
        dense, exact = copy.deepcopy(patched), copy.deepcopy(patched)
        for sae in (dense, exact):
            unpatch(sae)
        exact.double()
        if kind == "jumprelu":
            exact.threshold.data = patched.threshold.data.double()
        ours = copy.deepcopy(patched)
        x = next(batches(device, 1))
        for sae, given in ((ours, x), (dense, x), (exact, x.double())):
            step(sae, given, dead=5)
        for name, grad in gradients(ours).items():
            assert_close(grad, reference64=gradients(exact)[name], plain=gradients(dense)[name], name=name)

    sparse_losses, sparse = train(patched, 1000, device, compare)
    assert not materialized
    dense_losses, dense = train(plain, 1000, device)
    first, last = slice(0, 20), slice(-200, None)
    torch.testing.assert_close(sparse_losses[first], dense_losses[first], rtol=1e-3, atol=1e-4)
    assert dense_losses[last].mean() < 0.5 * dense_losses[first].mean()
    assert abs(sparse_losses[last].mean() / dense_losses[last].mean() - 1) < 0.1
    for name, tolerance in (("l0", 0.5), ("num_dead_features", 0.05 * D_SAE)):
        a, b = (getattr(trainer.sae.cfg.metadata, name) for trainer in (sparse, dense))
        assert abs(a - b) <= tolerance + 0.05 * b, name


def test_a_trained_sae_is_saved_and_patched_for_inference(device: torch.device, tmp_path: Any) -> None:
    sae = make("batchtopk, rescaled", device)
    patch(sae)
    _, trainer = train(sae, 20, device)
    trainer.sae.save_inference_model(tmp_path)
    loaded = SAE.load_from_disk(tmp_path, device=str(device))
    x = activations(device)
    with torch.no_grad():
        expected = loaded(x)
        assert "forward" in patch(loaded, check=x).accelerated
        torch.testing.assert_close(loaded(x), expected)

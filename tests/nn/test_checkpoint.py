"""Autoencoders on disk: there and back, and to and from the libraries whose layouts they have."""

import errno
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import prune

from gossamer import nn

D_IN, D_SAE, K = 12, 64, 5
KINDS = ("topk", "batchtopk", "jumprelu", "matryoshka", "standard", "gated")


def make(kind: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    if kind == "topk":
        model: Any = nn.TopKSAE(D_IN, D_SAE, K, dtype=dtype, device=device)
    elif kind == "batchtopk":
        model = nn.BatchTopKSAE(D_IN, D_SAE, K, threshold_rate=0.5, capacity=30, dtype=dtype, device=device)
        model.threshold.fill_(0.3)
    elif kind == "matryoshka":
        options: dict[str, Any] = {"widths": (7, 20, D_SAE), "inner_weights": (0.5, 1.0), "threshold_rate": 0.5}
        model = nn.MatryoshkaBatchTopKSAE(D_IN, D_SAE, K, **options, dtype=dtype, device=device)
        model.threshold.fill_(0.3)
    elif kind in ("standard", "gated"):
        model = {"standard": nn.StandardSAE, "gated": nn.GatedSAE}[kind](D_IN, D_SAE, dtype=dtype, device=device)
    else:
        options = {"bandwidth": 0.2, "l0_coefficient": 0.3, "initial_threshold": 0.4, "capacity": 40}
        model = nn.JumpReLUSAE(D_IN, D_SAE, **options, dtype=dtype, device=device)
        model.log_threshold.data += 0.1 * torch.randn(D_SAE, device=device)
    for name in ("W_enc", "b_enc", "b_dec", "b_gate", "b_mag", "r_mag"):
        parameter = getattr(model, name, torch.empty(0, device=device))
        parameter.data += 0.2 * torch.randn(parameter.shape, device=device)
    return model


def inputs(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(30, D_IN, generator=torch.Generator().manual_seed(1)).to(device, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: str, dtype: torch.dtype, device: torch.device, tmp_path: Path) -> None:
    model, x = make(kind, device, dtype), inputs(device, dtype)
    model.train()(x)
    nn.save_sae(model, tmp_path / "new" / "folder")
    again = nn.load_sae(tmp_path / "new" / "folder", device=device)
    assert repr(again) == repr(model)
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        found = again.state_dict()[name]
        assert found.dtype is tensor.dtype and found.device == tensor.device
        if name == "log_threshold":
            torch.testing.assert_close(found, tensor, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(found, tensor), name
    if kind == "jumprelu":
        assert again.bandwidth == model.bandwidth and again.capacity == model.capacity
    assert int(again.firing_counts.sum()) > 0
    assert {file.name for file in (tmp_path / "new" / "folder").iterdir()} == {
        "cfg.json",
        "sae_weights.safetensors",
        "training_state.safetensors",
    }


AUX = {"aux_coefficient": 0.5, "aux_k": 3, "dead_after": 17}
SETTINGS: dict[str, dict[str, Any]] = {
    "TopKSAE": {"k": 5, **AUX},
    "BatchTopKSAE": {"k": 5, "threshold_rate": 0.5, "capacity": 30, **AUX},
    "MatryoshkaSAE": {"k": 5, "widths": (7, 20, D_SAE), "inner_weights": (0.5, 1.0), **AUX},
    "MatryoshkaBatchTopKSAE": {"k": 5, "widths": (7, D_SAE), "inner_weights": (0.5,), "capacity": 30, **AUX},
    "StandardSAE": {"l1_coefficient": 0.3, "dead_after": 17},
    "GatedSAE": {"l1_coefficient": 0.3, "dead_after": 17},
    "JumpReLUSAE": {
        **{"bandwidth": 0.2, "l0_coefficient": 0.3, "capacity": 40, "penalty": "quadratic", "target_l0": 4.0},
        **{"tanh_scale": 3.0, "ste_to_input": True, "pre_act_coefficient": 0.1, "dead_after": 17},
    },
}


# sparsify has TopK alone.
@pytest.mark.parametrize(
    "kind, layout",
    [*((kind, "sae_lens") for kind in SETTINGS), *((kind, "sparsify") for kind in ("TopKSAE", "MatryoshkaSAE"))],
)
def test_settings(kind: str, layout: str, device: torch.device, tmp_path: Path) -> None:
    """What training needs comes back too, and SAELens does not mind it; older files have less, or nothing."""
    model = getattr(nn, kind)(D_IN, D_SAE, **SETTINGS[kind], device=device)
    model.train()(inputs(device))
    nn.save_sae(model, tmp_path, layout=layout)

    def settings(model: Any) -> dict[str, Any]:
        return {name: value for name, value in vars(model).items() if not name.startswith("_")}

    again = nn.load_sae(tmp_path, device=device)
    assert settings(again) == settings(model) | {"training": True}
    assert settings(model).items() >= SETTINGS[kind].items()
    assert int(again.firing_counts.sum()) == int(model.firing_counts.sum()) > 0
    if layout == "sae_lens":
        sae = pytest.importorskip("sae_lens").SAE.load_from_disk(tmp_path, device=str(device))
        with torch.no_grad():
            torch.testing.assert_close(sae(inputs(device)), again.eval()(inputs(device)), rtol=1e-4, atol=1e-5)
    config = json.loads((tmp_path / "cfg.json").read_text())
    holder = config["metadata"] if layout == "sae_lens" else config
    old = {"TopKSAE": (), "BatchTopKSAE": ("k", "threshold_rate", "capacity"), "StandardSAE": (), "GatedSAE": ()}
    old |= {"MatryoshkaSAE": ("widths",), "MatryoshkaBatchTopKSAE": ("k", "widths")}
    holder["gossamer"] = {name: SETTINGS[kind][name] for name in old.get(kind, ("bandwidth", "capacity"))}
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    needed = {name: SETTINGS[kind][name] for name in ("k", "widths") if name in SETTINGS[kind]}
    defaults = getattr(nn, kind)(D_IN, D_SAE, **needed)
    assert settings(nn.load_sae(tmp_path)) == settings(defaults) | holder["gossamer"]
    del holder["gossamer"]
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    # Without a word of ours each is the class that the other library takes it for.
    plain = {"BatchTopKSAE": "JumpReLUSAE", "MatryoshkaBatchTopKSAE": "JumpReLUSAE", "MatryoshkaSAE": "TopKSAE"}
    assert type(nn.load_sae(tmp_path)).__name__ == plain.get(kind, kind)


def test_dtype_of_the_reader(device: torch.device, tmp_path: Path) -> None:
    nn.save_sae(make("jumprelu", device), tmp_path)
    model = nn.load_sae(tmp_path, device=device, dtype=torch.bfloat16)
    assert model.W_enc.dtype is torch.bfloat16 and model.b_enc.dtype is torch.float32


@pytest.mark.parametrize(
    "make", [nn.TopKSAE, nn.MatryoshkaSAE, partial(nn.Transcoder, D_IN), partial(nn.Transcoder, D_IN, skip=True)]
)
def test_sparsify_itself(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the files, computes the same, and writes what is read here."""
    monkeypatch.setenv("SPARSIFY_DISABLE_TRITON", "1")
    library = pytest.importorskip("sparsify.sparse_coder").SparseCoder
    torch.manual_seed(0)
    model = make(D_IN, D_SAE, K)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    nn.save_sae(model, tmp_path / "ours", layout="sparsify")
    x, theirs = torch.randn(40, D_IN), library.load_from_disk(tmp_path / "ours", device="cpu")
    torch.testing.assert_close(theirs(x).sae_out, model(x), rtol=1e-4, atol=1e-5)
    theirs.save_to_disk(tmp_path / "theirs")
    assert torch.equal(nn.load_sae(tmp_path / "theirs")(x), model(x))


def test_sparsify(device: torch.device, tmp_path: Path) -> None:
    model = make("topk", device)
    nn.save_sae(model, tmp_path, layout="sparsify")
    tensors, config = load_file(tmp_path / "sae.safetensors"), json.loads((tmp_path / "cfg.json").read_text())
    # As its SparseCoder has them: an nn.Linear, and decoder rows.
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "encoder.weight": (D_SAE, D_IN),
        "encoder.bias": (D_SAE,),
        "W_dec": (D_SAE, D_IN),
        "b_dec": (D_IN,),
    }
    assert config["d_in"] == D_IN and config["num_latents"] == D_SAE and config["k"] == K
    x = inputs(device)
    assert torch.equal(nn.load_sae(tmp_path, device=device)(x), model(x))
    # Older files leave the number of latents to the expansion factor.
    del config["num_latents"]
    (tmp_path / "cfg.json").write_text(json.dumps(config | {"expansion_factor": 64 / 12}))
    assert nn.load_sae(tmp_path).d_sae == D_SAE
    x_centred = x - model.b_dec
    pre = torch.relu(x_centred @ tensors["encoder.weight"].to(device).t() + tensors["encoder.bias"].to(device))
    top = pre.topk(K)
    expected = torch.zeros_like(pre).scatter(1, top.indices, top.values) @ model.W_dec + model.b_dec
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sae_lens_loads_it(kind: str, device: torch.device, tmp_path: Path) -> None:
    sae_lens = pytest.importorskip("sae_lens")
    model, x = make(kind, device), inputs(device)
    nn.save_sae(model, tmp_path)
    sae = sae_lens.SAE.load_from_disk(tmp_path, device=str(device))
    theirs = {"topk": "TopKSAE", "standard": "StandardSAE", "gated": "GatedSAE"}
    assert type(sae).__name__ == theirs.get(kind, "JumpReLUSAE")
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(sae(x), model(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sae.encode(x), model.encode(x).to_dense(), rtol=1e-4, atol=1e-5)
        sae.save_model(tmp_path / "again")
    again = nn.load_sae(tmp_path / "again", device=device).eval()
    torch.testing.assert_close(again(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("subtract", [True, False])
@pytest.mark.parametrize("kind", ["topk", "topk, rescaled", "jumprelu", "standard", "gated"])
def test_it_loads_what_sae_lens_saves(kind: str, subtract: bool, device: torch.device, tmp_path: Path) -> None:
    pytest.importorskip("sae_lens")
    from sae_lens.registry import get_sae_class

    architecture = kind.split(",")[0]
    options = {"k": K, "rescale_acts_by_decoder_norm": "rescaled" in kind} if architecture == "topk" else {}
    sae_class, config_class = get_sae_class(architecture)
    config = config_class(d_in=D_IN, d_sae=D_SAE, device=str(device), apply_b_dec_to_input=subtract, **options)
    sae = sae_class(config)
    torch.manual_seed(2)
    for name, parameter in sae.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (0.2 if name == "threshold" else 0)
    sae.save_model(tmp_path)
    model, x = nn.load_sae(tmp_path, device=device), inputs(device)
    with torch.no_grad():
        torch.testing.assert_close(model(x), sae(x), rtol=1e-4, atol=1e-4)


def test_it_loads_a_batchtopk_sae(device: torch.device, tmp_path: Path) -> None:
    pytest.importorskip("sae_lens")
    from sae_lens import SAE, BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig, TrainingSAE

    config = BatchTopKTrainingSAEConfig(d_in=D_IN, d_sae=D_SAE, k=K, device=str(device))
    sae = BatchTopKTrainingSAE(config)
    sae.topk_threshold.fill_(0.25)
    sae.save_inference_model(tmp_path)
    x = inputs(device)
    with torch.no_grad():
        expected = SAE.load_from_disk(tmp_path, device=str(device))(x)
        torch.testing.assert_close(nn.load_sae(tmp_path, device=device)(x), expected, rtol=1e-4, atol=1e-5)
    # What is saved in training is refused, and what the error says to do about it works.
    sae.save_model(tmp_path / "training")
    with pytest.raises(ValueError, match=r"'batchtopk'.*TrainingSAE\.load_from_disk\(folder\)\.save_inference_model\("):
        nn.load_sae(tmp_path / "training")
    TrainingSAE.load_from_disk(tmp_path / "training", device=str(device)).save_inference_model(tmp_path / "again")
    with torch.no_grad():
        torch.testing.assert_close(nn.load_sae(tmp_path / "again", device=device)(x), expected, rtol=1e-4, atol=1e-5)


def test_it_loads_a_batchtopk_sae_of_folded_norms(device: torch.device, tmp_path: Path) -> None:
    """Whose latents have a threshold each, while SAELens keeps what `save` said of it."""
    pytest.importorskip("sae_lens")
    from sae_lens import SAE

    model, x = make("batchtopk", device).eval(), inputs(device)
    with torch.no_grad():
        model.W_dec.mul_(torch.linspace(0.3, 3, D_SAE, device=device)[:, None])
    nn.save_sae(model, tmp_path)
    SAE.load_from_disk(tmp_path, device=str(device), fold_W_dec_norm=True).save_model(tmp_path / "folded")
    again = nn.load_sae(tmp_path / "folded", device=device).eval()
    assert isinstance(again, nn.JumpReLUSAE)
    with torch.no_grad():
        torch.testing.assert_close(again(x), model(x), rtol=1e-4, atol=1e-4)
    assert isinstance(nn.load_sae(tmp_path), nn.BatchTopKSAE)


def test_tensors_without_a_place_are_refused(device: torch.device, tmp_path: Path) -> None:
    parametrized, pruned, larger = (make("topk", device) for _ in range(3))
    torch.nn.utils.parametrizations.weight_norm(parametrized, "W_dec")
    prune.random_unstructured(pruned, "W_enc", 0.5)
    larger.register_buffer("mean", torch.zeros(D_IN, device=device))
    for model, name in ((parametrized, "W_dec"), (pruned, "W_enc_mask"), (larger, "mean")):
        with pytest.raises(TypeError, match=rf"nn\.save_sae: the layouts have no place for .*{name}"):
            nn.save_sae(model, tmp_path / "new")
        assert not (tmp_path / "new").exists()
    prune.remove(pruned, "W_enc")
    nn.save_sae(pruned, tmp_path / "new")


TRAINED = {
    "jumprelu_bandwidth": 0.07,
    "l0_coefficient": 5,
    "jumprelu_tanh_scale": 3.0,
    "jumprelu_ste_to_input": True,
    "pre_act_loss_coefficient": 3e-6,
}
LOADED = {"bandwidth": 0.07, "l0_coefficient": 5, "tanh_scale": 3.0, "ste_to_input": True, "pre_act_coefficient": 3e-6}


@pytest.mark.parametrize("save", ["save_model", "save_inference_model"])
@pytest.mark.parametrize(
    "architecture, trained, loaded",
    [
        ("jumprelu", TRAINED | {"jumprelu_sparsity_loss_mode": "tanh"}, LOADED | {"penalty": "tanh"}),
        # SAELens has a target that it does not look at.
        (
            "jumprelu",
            {"target_l0": 9.0},
            {"bandwidth": 0.05, "penalty": "step", "target_l0": None, "l0_coefficient": 1},
        ),
        ("jumprelu", {"pre_act_loss_coefficient": None}, {"pre_act_coefficient": 0.0, "ste_to_input": False}),
        (
            "jumprelu",
            {"target_l0": 9.0, "jumprelu_sparsity_loss_mode": "quadratic"},
            {"target_l0": 9.0, "penalty": "quadratic"},
        ),
        ("topk", {"k": K, "aux_loss_coefficient": 0.7}, {"aux_coefficient": 0.7}),
        ("topk", {"k": K}, {"aux_coefficient": 1.0}),
        ("standard", {"l1_coefficient": 3.0}, {"l1_coefficient": 3.0}),
        ("gated", {"l1_coefficient": 3.0}, {"l1_coefficient": 3.0}),
    ],
)
def test_settings_of_sae_lens(
    architecture: str, trained: dict[str, Any], loaded: dict[str, Any], save: str, tmp_path: Path
) -> None:
    """Training goes on with the settings in SAELens's file, and ours returns them."""
    pytest.importorskip("sae_lens")
    from sae_lens import TrainingSAE
    from sae_lens.registry import get_sae_training_class

    sae_class, config_class = get_sae_training_class(architecture)
    sae = sae_class(config_class(d_in=D_IN, d_sae=D_SAE, device="cpu", **trained))
    getattr(sae, save)(tmp_path / "theirs")
    model = nn.load_sae(tmp_path / "theirs")
    assert {name: getattr(model, name) for name in loaded} == loaded
    nn.save_sae(model, tmp_path / "ours")
    assert {name: getattr(nn.load_sae(tmp_path / "ours"), name) for name in loaded} == loaded
    # SAELens knows nothing of our settings: from here on it trains with those of its own, and its file says so.
    TrainingSAE.load_from_disk(tmp_path / "ours").save_model(tmp_path / "last")
    again, default = nn.load_sae(tmp_path / "last"), config_class(d_in=D_IN, d_sae=D_SAE)
    if architecture in ("standard", "gated"):
        assert again.l1_coefficient == default.l1_coefficient
    elif architecture == "topk":
        assert again.aux_coefficient == default.aux_loss_coefficient
    else:
        assert again.bandwidth == default.jumprelu_bandwidth and again.pre_act_coefficient == 0.0
        assert again.penalty == "step" and again.target_l0 is None


def test_statistics_that_are_cut_short(device: torch.device, tmp_path: Path) -> None:
    """Not the zeros that there would be without the file."""
    model = make("topk", device)
    model.train()(inputs(device))
    nn.save_sae(model, tmp_path)
    statistics = tmp_path / "training_state.safetensors"
    whole = statistics.read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        statistics.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"training_state\.safetensors is not a whole .* Remove it to begin with"):
            nn.load_sae(tmp_path)
    statistics.unlink()
    assert int(nn.load_sae(tmp_path).firing_counts.sum()) == 0


def test_a_failing_disk_leaves_the_old_files(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("topk", device)
    nn.save_sae(model, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    model.W_enc.data.zero_()

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        # As safetensors says it, in an error that is no OSError.
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("gossamer.nn.checkpoint.save_file", full)
    message = r"nn\.save_sae: .*sae_weights\.safetensors could not be written: No space left on device\. Free space"
    with pytest.raises(OSError, match=message) as raised:
        nn.save_sae(model, tmp_path)
    assert raised.value.errno == errno.ENOSPC
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_errors(device: torch.device, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"nn\.save_sae: model must be an autoencoder of gossamer\.nn, got Linear"):
        nn.save_sae(torch.nn.Linear(2, 2), tmp_path)
    with pytest.raises(ValueError, match="layout must be"):
        nn.save_sae(make("topk", device), tmp_path, layout="pickle")
    with pytest.raises(ValueError, match="has TopK alone, and no place for a JumpReLUSAE"):
        nn.save_sae(make("jumprelu", device), tmp_path, layout="sparsify")
    with pytest.raises(FileNotFoundError, match=r"nn\.load_sae: .* must hold cfg\.json and sae_weights\.safet"):
        nn.load_sae(tmp_path)
    for name in ("l0=2", "l0=4"):
        nn.save_sae(make("topk", device), tmp_path / "run" / name)
    with pytest.raises(FileNotFoundError, match=r"Name one of its autoencoders: .*/run/l0=2, .*/run/l0=4\.$"):
        nn.load_sae(tmp_path / "run")
    nn.save_sae(make("topk", device), tmp_path)
    with pytest.raises(TypeError, match="dtype must be"):
        nn.load_sae(tmp_path, dtype=torch.int8)
    config = json.loads((tmp_path / "cfg.json").read_text())
    for change, message in (
        ({"architecture": "temporal"}, 'architecture = \'temporal\'; these modules are "topk", "jumprelu", "stand'),
        ({"architecture": "gated"}, r"must hold b_gate \[64\] by cfg.json, got nothing"),
        ({"normalize_activations": "layer_norm"}, "normalize_activations = 'layer_norm'"),
        ({"k": 0}, "must have k, an int of at least 1, got 0"),
        ({"d_sae": 65}, r"must hold W_dec \[65, 12\] by cfg.json, got \[64, 12\]"),
        ({"architecture": "jumprelu"}, r"must hold threshold \[64\] by cfg.json, got nothing"),
    ):
        (tmp_path / "cfg.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=message):
            nn.load_sae(tmp_path)
    (tmp_path / "cfg.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON of an autoencoder"):
        nn.load_sae(tmp_path)
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    weights = tmp_path / "sae_weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        nn.load_sae(tmp_path)
    folder = tmp_path / "sparsify"
    nn.save_sae(make("topk", device), folder, layout="sparsify")
    config = json.loads((folder / "cfg.json").read_text())
    (folder / "cfg.json").write_text(json.dumps(config | {"signed": True}))
    with pytest.raises(ValueError, match=r"signed = True, which these modules do not do\.$"):
        nn.load_sae(folder)
    (folder / "cfg.json").write_text(json.dumps(config | {"activation": "groupmax"}))
    with pytest.raises(ValueError, match=r"activation = 'groupmax', .* sae.encode does, with gemm.GroupMax\(k\)"):
        nn.load_sae(folder)
    save_file({}, folder / "sae.safetensors")
    (folder / "cfg.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="must hold W_dec"):
        nn.load_sae(folder)


def test_files_that_do_not_belong_together(device: torch.device, tmp_path: Path) -> None:
    """Statistics of other weights, both layouts in a folder, tensors and settings that would be ignored."""
    model, x = make("topk", device), inputs(device)
    model.train()(x)
    nn.save_sae(model, tmp_path)
    assert int(nn.load_sae(tmp_path).firing_counts.sum()) > 0
    other = make("topk", device)
    other.W_enc.data += 1
    nn.save_sae(other, tmp_path / "other")
    (tmp_path / "sae_weights.safetensors").write_bytes((tmp_path / "other" / "sae_weights.safetensors").read_bytes())
    assert int(nn.load_sae(tmp_path).firing_counts.sum()) == 0
    nn.save_sae(model, tmp_path, layout="sparsify")
    assert torch.equal(nn.load_sae(tmp_path, device=device)(x), model.eval()(x))
    config = json.loads((tmp_path / "cfg.json").read_text())
    (tmp_path / "cfg.json").write_text(json.dumps(config | {"signed": True}))
    with pytest.raises(ValueError, match="signed = True"):
        nn.load_sae(tmp_path)
    nn.save_sae(model, tmp_path)
    config = json.loads((tmp_path / "cfg.json").read_text())
    (tmp_path / "cfg.json").write_text(json.dumps(config | {"finetuning_scaling_factor": True}))
    with pytest.raises(ValueError, match="finetuning_scaling_factor = True"):
        nn.load_sae(tmp_path)
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "sae_weights.safetensors")
    save_file(weights | {"scaling_factor": torch.ones(D_SAE)}, tmp_path / "sae_weights.safetensors")
    with pytest.raises(ValueError, match="holds scaling_factor, with which these modules do nothing"):
        nn.load_sae(tmp_path)
    (tmp_path / "cfg.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds no settings"):
        nn.load_sae(tmp_path)

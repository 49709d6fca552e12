"""Crosscoders and cross-layer transcoders, against dense PyTorch and against circuit-tracer."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gossamer import nn
from tests.nn import dense

L, D_IN, D, D_SAE = 3, dense.D_IN, 10, dense.D_SAE
TANH = {"penalty": "tanh", "tanh_scale": 2.0, "ste_to_input": True, "pre_act_coefficient": 0.1}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("transcoder", {"aux_coefficient": 0.5, "dead_after": 1}),
    ("batchtopk transcoder", {"dead_after": 1}),
    ("jumprelu transcoder", {}),
    ("jumprelu transcoder", {**TANH, "dead_after": 1}),
]


def across(kind: str, device: torch.device, d: int = D, **options: Any) -> nn.CrossLayerTranscoder:
    """Its parameters are nowhere 0, but for biases that the first layer takes over."""
    torch.manual_seed(0)
    made: list[Any] = []
    for i in range(L):
        sizes = (D_IN, (L - i) * d, D_SAE)
        made.append(dense.CLASSES[kind](*sizes, device=device, **{**dense.usual(kind), **options}))
    with torch.no_grad():
        for layer in made:
            for parameter in layer.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    return nn.CrossLayerTranscoder(made)


def rows(m: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(x `[m, L, D_IN]`, y `[m, L, D]`)"""
    x = dense.sample(m * L, generator).view(m, L, D_IN)
    return x, dense.targets(x.flatten(0, 1)).view(m, L, D)


@pytest.mark.parametrize("path", ["sparse", "dense"])
@pytest.mark.parametrize("kind, options", CASES, ids=str)
def test_loss_and_gradients(
    kind: str, options: dict[str, Any], path: str, device: torch.device, generator: torch.Generator
) -> None:
    x, y = rows(40, generator)
    model = across(kind, device, **options)
    for layer in model.layers:
        layer.density.pinned = path
        layer.steps_since_fired += torch.arange(D_SAE, device=device) % 3  # type: ignore[operator]
    got, grads = dense.compare(model, x, y)
    assert got.reconstruction.shape == y.shape and got.l0 > 3 * L
    assert "layers.1.b_dec" not in grads and all(grad.any() for grad in grads.values())
    assert bool(got.dead_loss > 0) == ("dead_after" in options)


def test_transcoders_have_the_arguments_of_their_autoencoders(device: torch.device) -> None:
    for kind in ("batchtopk transcoder", "jumprelu transcoder"):
        model = dense.make(kind, device)
        assert repr(model).startswith(f"{type(model).__name__}(d_in=16, d_out=10, d_sae=96, ")
    with pytest.raises(
        ValueError, match=r"nn\.JumpReLUTranscoder: its L0 .* target_l0 = 3\. Give l0_coefficient in its"
    ):
        nn.JumpReLUTranscoder(4, 4, 8, target_l0=3)
    assert nn.JumpReLUTranscoder(4, 4, 8, target_l0=3, l0_coefficient=0.1, penalty="quadratic").target_l0 == 3
    with pytest.raises(ValueError, match=r"nn\.JumpReLUTranscoder: bandwidth must"):
        nn.JumpReLUTranscoder(4, 4, 8, bandwidth=-1)
    with pytest.raises(ValueError, match=r"nn\.BatchTopKTranscoder: threshold_rate must"):
        nn.BatchTopKTranscoder(4, 4, 8, 2, threshold_rate=2)
    with pytest.raises(TypeError, match=r"Transcoder\.__init__\(\) missing .* 'k'"):
        nn.BatchTopKTranscoder(4, 4, 8)  # type: ignore[call-arg]


def test_biases_become_those_of_the_first_layer(device: torch.device) -> None:
    made = [nn.Transcoder(4, (3 - i) * 2, 8, 2, device=device) for i in range(3)]
    for i, layer in enumerate(made):
        layer.b_dec.data.copy_(torch.arange(len(layer.b_dec)) + 10.0**i)
    wanted = sum(torch.nn.functional.pad(layer.b_dec.detach(), (6 - len(layer.b_dec), 0)) for layer in made)
    model = nn.CrossLayerTranscoder(made)
    torch.testing.assert_close(model.layers[0].b_dec.detach(), wanted)
    assert not any(layer.b_dec.any() or layer.b_dec.requires_grad for layer in made[1:])
    y = torch.randn(40, 3, 2, device=device)
    model.initialize_(y)
    torch.testing.assert_close(model(torch.zeros(1, 3, 4, device=device))[0].flatten(), model.layers[0].b_dec)


@pytest.mark.parametrize("training", [True, False])
def test_modules_are_thin(training: bool, device: torch.device, generator: torch.Generator) -> None:
    """`forward` is `decode` of `encode`, and a layer reads no later layer."""
    x, y = rows(24, generator)
    x, y = x.view(4, 6, L, D_IN), y.view(4, 6, L, D)
    model = across("jumprelu transcoder", device).train(training)
    out = model(x)
    assert out.shape == y.shape
    torch.testing.assert_close(out, model.decode(model.encode(x)))
    torch.testing.assert_close(out, model.loss(x, y).reconstruction)
    changed = x.clone()
    changed[..., 1, :] = 0
    moved = (model(changed) != out).flatten(0, 1).any(0).any(-1)
    assert moved.tolist() == [False, True, True]
    assert model(x[0, 0]).shape == (L, D) and model(x[:0]).shape == (0, 6, L, D)
    model.initialize_(y)
    median = model.layers[0].b_dec.view(L, D)
    assert (y - median).norm(dim=-1).mean() < (y - y.flatten(0, 1).mean(0)).norm(dim=-1).mean() * 1.01


def test_a_crosscoder_is_an_autoencoder(device: torch.device, generator: torch.Generator) -> None:
    """Of any class, and its loss is the sum over layers."""
    x = dense.sample(24 * L, generator).view(4, 6, L, D_IN)
    flat = x.flatten(-2)
    torch.manual_seed(0)
    for sae in (
        nn.TopKSAE(L * D_IN, D_SAE, 6, device=device),
        nn.MatryoshkaBatchTopKSAE(L * D_IN, D_SAE, 6, device=device),
        nn.JumpReLUSAE(L * D_IN, D_SAE, l0_coefficient=0.1, device=device),
        nn.StandardSAE(L * D_IN, D_SAE, device=device),
    ):
        same = copy.deepcopy(sae)
        model = nn.Crosscoder(sae, L)
        model.initialize_(x)
        same.initialize_(flat)
        got, want = model.loss(x), same.loss(flat)
        assert torch.equal(got.loss, want.loss) and torch.equal(got.reconstruction, want.reconstruction.view_as(x))
        by_layer = (x - got.reconstruction).square().sum(-1).mean((0, 1))
        torch.testing.assert_close(got.mse, by_layer.sum())
        assert torch.equal(model(x), same(flat).view_as(x))
        torch.testing.assert_close(model.decode(model.encode(x)), model(x))
        norms = torch.stack([part.norm(dim=1) for part in sae.W_dec.split(D_IN, dim=1)], dim=1)
        torch.testing.assert_close(model.decoder_norms, norms)


@pytest.mark.parametrize("kind, options", CASES[:3], ids=str)
def test_compiled(kind: str, options: dict[str, Any], device: torch.device, generator: torch.Generator) -> None:
    """In one graph; autocast computes in 16 bits."""
    x, y = rows(24, generator)
    model = across(kind, device, **options)
    eager = copy.deepcopy(model)
    got = torch.compile(model.loss, fullgraph=True, backend="aot_eager")(x, y)
    want = eager.loss(x, y)
    torch.testing.assert_close(got.loss, want.loss)
    torch.testing.assert_close(dense.gradients(got, model), dense.gradients(want, eager))
    with torch.autocast(device.type, torch.bfloat16):
        half = model.loss(x, y)
    assert half.reconstruction.dtype is torch.bfloat16
    torch.testing.assert_close(half.mse, eager.loss(x, y).mse, rtol=0.05, atol=0)


def atoms(count: int, size: int, seed: int) -> Tensor:
    made = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(made, dim=1)


def codes(m: int, count: int, generator: torch.Generator) -> Tensor:
    """`[m, count]`: three numbers of 0.5 to 1.5 a row."""
    chosen = torch.rand(m, count, generator=generator).topk(3).indices
    size = 0.5 + torch.rand(m, 3, generator=generator)
    return torch.zeros(m, count).scatter(1, chosen, size)


def recovered(wanted: Tensor, rows: Tensor) -> float:
    """The share of directions with a row of a cosine of at least 0.9."""
    cosine = wanted @ torch.nn.functional.normalize(rows.detach().cpu(), dim=1).t()
    return float((cosine.amax(1) > 0.9).float().mean())


@pytest.mark.parametrize("seed", range(3))
def test_a_dictionary_across_layers(seed: int, device: torch.device) -> None:
    """A third of the atoms of a crosscoder is in the first layer alone, a third in the second, and a third in both."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    count, d = 36, 20
    where = torch.zeros(count, 2, 1)
    where[: 2 * count // 3, 0] = where[count // 3 :, 1] = 1
    wanted = torch.stack([atoms(count, d, 1), atoms(count, d, 2)], 1) * where
    model = nn.Crosscoder(nn.TopKSAE(2 * d, 2 * count, 3), 2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(250):
        x = (codes(256, count, generator) @ wanted.flatten(1)).view(-1, 2, d)
        optimizer.zero_grad()
        model.loss(x.to(device)).loss.backward()
        optimizer.step()
    flat = torch.nn.functional.normalize(wanted.flatten(1), dim=1)
    assert recovered(flat, model.sae.W_dec) >= 0.9
    # The norms tell the layers of each atom.
    nearest = (flat @ torch.nn.functional.normalize(model.sae.W_dec.detach().cpu(), dim=1).t()).argmax(1)
    norms = model.decoder_norms.detach().cpu()[nearest]
    share = norms[:, 0] / norms.sum(1)
    assert share[: count // 3].mean() > 0.85 and share[2 * count // 3 :].mean() < 0.15


@pytest.mark.parametrize("kind", ["transcoder", "batchtopk transcoder"])
def test_a_dictionary_that_layers_write_together(kind: str, device: torch.device) -> None:
    """Atoms of the first layer, which write to two, and of the second."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    count, d = 32, 20
    reads = [atoms(count, d, 1), atoms(count, d, 2)]
    writes = [atoms(count, 2 * d, 3), atoms(count, d, 4)]
    made: Any = nn.Transcoder if kind == "transcoder" else nn.BatchTopKTranscoder
    model = nn.CrossLayerTranscoder([made(d, size * d, 2 * count, 3) for size in (2, 1)]).to(device)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(300):
        fired = [codes(256, count, generator) for _ in reads]
        x = torch.stack([code @ read for code, read in zip(fired, reads)], 1)
        y = (fired[0] @ writes[0]).view(-1, 2, d)
        y[:, 1] += fired[1] @ writes[1]
        optimizer.zero_grad()
        model.loss(x.to(device), y.to(device)).loss.backward()
        optimizer.step()
    for layer, wanted in zip(model.layers, writes):
        assert recovered(wanted, layer.W_dec) >= 0.9  # type: ignore[arg-type]


def saved(kind: str, x: Tensor, folder: Path) -> tuple[Any, Any]:
    """(a cross-layer transcoder in the folder `clt`, a transcoder in the file `layer_3.safetensors`)"""
    model = across(kind, x.device, D_IN)
    model.loss(x, x)
    model.eval()
    nn.save_sae(model, folder / "clt", layout="circuit_tracer")
    layer = nn.JumpReLUTranscoder(D_IN, D_IN, D_SAE, skip=True, device=x.device)
    for parameter in (layer.W_dec, layer.W_skip, layer.b_dec):
        parameter.data += 0.2 * torch.randn_like(parameter)  # type: ignore[union-attr, arg-type]
    nn.save_sae(layer, folder / "layer_3.safetensors", layout="circuit_tracer")
    return model, layer


@pytest.mark.parametrize("kind", ["batchtopk transcoder", "jumprelu transcoder"])
def test_there_and_back(kind: str, device: torch.device, generator: torch.Generator, tmp_path: Path) -> None:
    x = rows(12, generator)[0]
    model, layer = saved(kind, x, tmp_path)
    found = {name: t for file in (tmp_path / "clt").iterdir() for name, t in load_file(file).items()}
    names = {"W_enc": (D_SAE, D_IN), "b_enc": (D_SAE,), "b_dec": (D_IN,), "threshold": (D_SAE,)}
    shapes = {f"{name}_{i}": shape for name, shape in names.items() for i in range(L)}
    shapes |= {f"W_dec_{i}": (D_SAE, L - i, D_IN) for i in range(L)}
    assert {name: tuple(t.shape) for name, t in found.items()} == shapes
    again = nn.load_sae(tmp_path / "clt", device=device).eval()
    assert [type(layer) for layer in again.layers] == [nn.JumpReLUTranscoder] * L
    torch.testing.assert_close(again(x), model(x))
    torch.testing.assert_close(nn.load_sae(tmp_path / "layer_3.safetensors", device=device)(x), layer(x))


@pytest.mark.parametrize("kind", ["batchtopk transcoder", "jumprelu transcoder"])
def test_circuit_tracer(kind: str, device: torch.device, generator: torch.Generator, tmp_path: Path) -> None:
    """The library reads the files, computes the same, and writes files that `load_sae` reads."""
    tracer = pytest.importorskip("circuit_tracer.transcoder.cross_layer_transcoder")
    alone = pytest.importorskip("circuit_tracer.transcoder.single_layer_transcoder")
    x, file = rows(12, generator)[0], tmp_path / "layer_3.safetensors"
    model, layer = saved(kind, x, tmp_path)
    for lazy in (False, True):
        options = {"device": torch.device("cpu"), "dtype": torch.float32, "lazy_encoder": lazy, "lazy_decoder": lazy}
        theirs = tracer.load_clt(str(tmp_path / "clt"), **options)
        out = theirs(x.cpu().transpose(0, 1)).transpose(0, 1)
        torch.testing.assert_close(out.to(device), model(x), rtol=1e-4, atol=1e-5)
        single = alone.load_relu_transcoder(str(file), 3, **options)
        torch.testing.assert_close(single(x.cpu()).to(device), layer(x), rtol=1e-4, atol=1e-5)
    # Files of the library itself, of ReLU.
    theirs = tracer.CrossLayerTranscoder(2, 8, 4, lazy_decoder=False, dtype=torch.float32, device=torch.device("cpu"))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(parameter)))
    theirs.to_safetensors(str(tmp_path / "relu"))
    given = torch.randn(5, 2, 4)
    torch.testing.assert_close(nn.load_sae(tmp_path / "relu")(given), theirs(given.transpose(0, 1)).transpose(0, 1))


def test_files_that_do_not_fit(device: torch.device, generator: torch.Generator, tmp_path: Path) -> None:
    """Errors name them: nothing is read as something else."""
    x = rows(12, generator)[0]
    model, layer = saved("jumprelu transcoder", x, tmp_path)
    two_layers = nn.CrossLayerTranscoder([nn.JumpReLUTranscoder(4, size, 8) for size in (8, 4)])
    clt, file = tmp_path / "clt", tmp_path / "layer_3.safetensors"

    def refused(path: Path, message: str, error: type[Exception] = ValueError) -> None:
        with pytest.raises(error, match=message):
            nn.load_sae(path)

    with pytest.raises(
        ValueError, match=r"nn\.save_sae: .* holds W_dec_2\.safetensors, of a transcoder with more layers"
    ):
        nn.save_sae(two_layers, clt, layout="circuit_tracer")
    for name in ("W_dec_2", "W_enc_1"):
        moved = (clt / f"{name}.safetensors").rename(tmp_path / "moved")
        refused(clt, rf"must hold {name}\.safetensors of a transcoder of 3 layers")
        moved.rename(clt / f"{name}.safetensors")
    (clt / "W_enc_3.safetensors").write_bytes((clt / "W_enc_2.safetensors").read_bytes())
    refused(clt, r"holds W_enc_3\.safetensors, of a transcoder with more layers")
    (clt / "W_enc_3.safetensors").unlink()
    nn.save_sae(nn.TopKSAE(8, 8, 2), clt)
    refused(clt, r"cfg\.json of another lies beside it")
    nn.save_sae(nn.JumpReLUSAE(8, 8), tmp_path / "square")
    refused(tmp_path / "square" / "sae_weights.safetensors", r"cfg\.json of another lies beside it. Give the folder")
    alone = (tmp_path / "square" / "sae_weights.safetensors").rename(tmp_path / "alone.safetensors")
    refused(alone, r"must hold W_enc \[8, 8\], .* circuit-tracer's layout, got threshold of another layout \[8\]")
    tensors = load_file(file)
    for name, changed, message in (
        ("b_enc", None, r"got b_enc missing"),
        ("W_enc", tensors["W_enc"].t().contiguous(), r"must hold W_enc \[16, 96\]"),
        ("activation_function.threshold", -tensors["b_enc"] - 1, "thresholds of at least 0, got -1"),
    ):
        wrong = {key: tensor for key, tensor in (tensors | {name: changed}).items() if tensor is not None}
        save_file(wrong, tmp_path / "wrong.safetensors")
        refused(tmp_path / "wrong.safetensors", message)
    with pytest.raises(ValueError, match=r"folder must be a \.safetensors file for one transcoder"):
        nn.save_sae(layer, tmp_path, layout="circuit_tracer")
    with pytest.raises(TypeError, match=r'got CrossLayerTranscoder\. Use layout="circuit_tracer"'):
        nn.save_sae(model, tmp_path / "other")
    with pytest.raises(TypeError, match=r"nn\.save_sae: model must be a transcoder of gossamer\.nn, got NoneType"):
        nn.save_sae(None, tmp_path / "other", layout="circuit_tracer")  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_rank")
def test_one_process_of_a_group(device: torch.device, generator: torch.Generator, tmp_path: Path) -> None:
    """Two and more are in tests/distributed."""
    x, y = rows(24, generator)
    for kind, options in CASES:
        model = across(kind, device, **options)
        sharded = nn.CrossLayerTranscoder(nn.shard_sae(layer) for layer in copy.deepcopy(model).layers)  # type: ignore[type-var]
        got, want = sharded.loss(x, y), model.loss(x, y)
        torch.testing.assert_close(got.loss, want.loss)
        torch.testing.assert_close(dense.gradients(got, sharded), dense.gradients(want, model))
    with pytest.raises(TypeError, match=r"nn\.save_sae: model holds a slice .* Save model\.gathered\(\)"):
        nn.save_sae(sharded, tmp_path, layout="circuit_tracer")
    code = nn.Crosscoder(nn.shard_sae(nn.TopKSAE(L * D_IN, D_SAE, 6).to(device)), L)
    assert code(x).shape == x.shape and code.decoder_norms.shape == (D_SAE, L)


X = torch.ones(3, 2, 4)


def two(*sizes: int) -> nn.CrossLayerTranscoder:
    return nn.CrossLayerTranscoder(nn.Transcoder(4, size, 8, 2) for size in sizes)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: nn.Crosscoder(torch.nn.Linear(4, 4), 2), TypeError, "nn.Crosscoder: sae must be .* got Linear"),
        (lambda: nn.Crosscoder(nn.Transcoder(4, 4, 8, 2), 2), TypeError, "nn.Crosscoder: sae must be .* got Transcod"),
        (lambda: nn.Crosscoder(nn.TopKSAE(4, 8, 2), 3), ValueError, "sae must have d_in of 3 layers .*, got 4"),
        (lambda: nn.Crosscoder(nn.TopKSAE(4, 8, 2), 0), ValueError, "layers must be at least 1, got 0"),
        (lambda: nn.Crosscoder(nn.TopKSAE(4, 8, 2), 2)(X), ValueError, r"x must have shape \[..., 2, 2\], got \[3, 2"),
        (lambda: nn.CrossLayerTranscoder([]), ValueError, "layers must have a transcoder .* got none"),
        (lambda: nn.CrossLayerTranscoder([nn.TopKSAE(4, 8, 2)]), TypeError, "layers must be transcoders .* TopKSAE"),
        (lambda: two(8, 8), ValueError, r"layers\[1\] must have d_out of 1 layers, where .* 8 of 2, got 8"),
        (lambda: nn.CrossLayerTranscoder(nn.Transcoder(d, 24 - 4 * d, 8, 2) for d in (4, 5)), ValueError, "d_in = 4"),
        (lambda: two(8, 4).decode([]), ValueError, "rows must have latents of 2 layers, got 0"),
        (lambda: two(8, 4)([1, 2]), TypeError, r"nn\.CrossLayerTranscoder: x must be a torch\.Tensor, got list"),
        (lambda: nn.Crosscoder(nn.TopKSAE(4, 8, 2), 2)("x"), TypeError, r"nn\.Crosscoder: x must be .*, got str"),
        (lambda: two(8, 4)(X[:, :1]), ValueError, r"x must have shape \[..., 2, 4\], got \[3, 1, 4\]"),
        (lambda: two(8, 4).loss(X, X[:2]), ValueError, r"nn\.CrossLayerTranscoder: y must have .* got \[2, 2, 4\]"),
        (lambda: two(8, 4).loss(X, X.int()), TypeError, r"nn\.CrossLayerTranscoder: y must be float"),
        (lambda: nn.save_sae(two(8, 4), "x", layout="circuit_tracer"), ValueError, "no place for a Transcoder"),
        (
            lambda: nn.save_sae(nn.BatchTopKTranscoder(4, 4, 8, 2), "x"),
            ValueError,
            re.escape('no place for a BatchTopKTranscoder here. Use layout="circuit_tracer"'),
        ),
    ],
)  # fmt: skip
def test_errors(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()

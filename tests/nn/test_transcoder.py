"""nn.Transcoder, against dense PyTorch and, on disk, against what sparsify computes."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gossamer import extract, gemm, nn, sae
from tests.nn import dense

D_IN, D_OUT, D_SAE = dense.D_IN, dense.D_OUT, dense.D_SAE


@pytest.mark.parametrize("skip", [False, True])
def test_initialisation(skip: bool, dtype: torch.dtype, device: torch.device) -> None:
    model = nn.Transcoder(D_IN, D_OUT, D_SAE, 6, skip=skip, dtype=dtype, device=device)
    assert model.W_enc.shape == (D_IN, D_SAE) and model.W_dec.shape == (D_SAE, D_OUT)
    assert model.b_enc.shape == (D_SAE,) and model.b_dec.shape == (D_OUT,)
    norms = model.W_enc.float().norm(dim=0)
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=0.01)
    assert not any(p.any() for name, p in model.named_parameters() if name != "W_enc")
    assert model.W_enc.dtype is model.W_dec.dtype is dtype and model.b_enc.dtype is model.b_dec.dtype is torch.float32
    x = torch.randn(3, 2, D_IN, device=device).to(dtype)
    out = model(x)
    assert out.shape == (3, 2, D_OUT) and out.dtype is dtype and not out.any()
    assert repr(model) == f"Transcoder(d_in=16, d_out=10, d_sae=96, k=6{', skip=True' if skip else ''})"
    if skip:
        assert model.W_skip is not None and model.W_skip.shape == (D_OUT, D_IN) and model.W_skip.dtype is dtype
    else:
        assert model.W_skip is None and "W_skip" not in model.state_dict()
    # Nothing trains the encoder yet, but the decoder is on its way.
    terms = model.loss(x, torch.ones(3, 2, D_OUT, device=device, dtype=dtype))
    assert terms.mse.item() == D_OUT and terms.l0.item() > 1
    terms.loss.backward()
    assert model.W_dec.grad is not None and model.W_dec.grad.any()


def test_modules_are_thin(device: torch.device, generator: torch.Generator) -> None:
    """b_dec is no part of the encoder; the skip connection is no part of `decode`."""
    x = dense.sample(30, generator).view(2, 3, 5, D_IN)
    model = dense.make("transcoder", device, skip=True)
    rows = model.encode(x)
    same = sae.encode(x, model.W_enc, model.b_enc, activation=gemm.TopK(6))
    assert torch.equal(rows.to_dense(), same.to_dense())
    torch.testing.assert_close(model.decode(rows), sae.decode(same, model.W_dec, model.b_dec))
    torch.testing.assert_close(model(x), model.decode(rows) + x @ model.W_skip.t())
    assert model(x[0, 0, 0]).shape == (D_OUT,) and model(x[:0]).shape == (0, 3, 5, D_OUT)
    # The gradient of x goes both ways.
    given = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(given).sum(), given)
    z = given @ model.W_enc + model.b_enc
    acts = torch.zeros_like(z).scatter(-1, z.topk(6).indices, 1) * z.relu()
    (wanted,) = torch.autograd.grad((acts @ model.W_dec + given @ model.W_skip.t()).sum(), given)
    torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("skip", [False, True])
def test_training(skip: bool, device: torch.device) -> None:
    """From its start at 0 it learns what no linear map can."""
    generator = torch.Generator(device).manual_seed(0)
    torch.manual_seed(0)
    model = nn.Transcoder(D_IN, D_OUT, 4 * D_SAE, 8, skip=skip, device=device)
    x = dense.sample(2000, generator)
    y = dense.targets(x)
    model.initialize_(y)
    ones = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    linear = (ones @ torch.linalg.lstsq(ones, y).solution - y).square().sum(-1).mean()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        x = dense.sample(128, generator)
        optimizer.zero_grad()
        model.loss(x, dense.targets(x)).loss.backward()
        optimizer.step()
    x = dense.sample(500, generator)
    assert model.eval().loss(x, dense.targets(x)).mse < 0.7 * linear


def sparsify(tensors: dict[str, Tensor], config: dict[str, Any], x: Tensor) -> Tensor:
    """What sparsify's SparseCoder makes of its files."""
    inner = x if config["transcode"] else x - tensors["b_dec"]
    pre = (inner @ tensors["encoder.weight"].t() + tensors["encoder.bias"]).relu()
    top = pre.topk(config["k"])
    out = torch.zeros_like(pre).scatter(1, top.indices, top.values) @ tensors["W_dec"] + tensors["b_dec"]
    return out + x @ tensors["W_skip"].t() if config["skip_connection"] else out


@pytest.mark.parametrize("transcode", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_sparsify(
    skip: bool, transcode: bool, device: torch.device, generator: torch.Generator, tmp_path: Path
) -> None:
    """Also where a skip connection is beside an autoencoder, which is a transcoder with other biases."""
    torch.manual_seed(0)
    model = nn.Transcoder(D_IN, D_IN, D_SAE, 6, skip=skip, device=device)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    x = dense.sample(40, generator)
    nn.save_sae(model, tmp_path, layout="sparsify")
    tensors = {name: t.to(device) for name, t in load_file(tmp_path / "sae.safetensors").items()}
    shapes = {"encoder.weight": (D_SAE, D_IN), "encoder.bias": (D_SAE,), "W_dec": (D_SAE, D_IN), "b_dec": (D_IN,)}
    assert {name: t.shape for name, t in tensors.items()} == shapes | ({"W_skip": (D_IN, D_IN)} if skip else {})
    config = json.loads((tmp_path / "cfg.json").read_text())
    assert config["transcode"] is True and config["skip_connection"] is skip and config["num_latents"] == D_SAE
    torch.testing.assert_close(model(x), sparsify(tensors, config, x), rtol=1e-4, atol=1e-5)
    config["transcode"] = transcode
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    again = nn.load_sae(tmp_path, device=device)
    assert type(again) is (nn.Transcoder if transcode or skip else nn.TopKSAE)
    torch.testing.assert_close(again(x), sparsify(tensors, config, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("d_out", [D_IN, D_OUT])
def test_there_and_back(
    d_out: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"skip": True, "aux_coefficient": 0.2, "aux_k": 3, "dead_after": 7, "dtype": dtype}
    model = nn.Transcoder(D_IN, d_out, D_SAE, 6, device=device, **options)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    x = dense.sample(40, generator).to(dtype)
    model(x)
    nn.save_sae(model, tmp_path, layout="sparsify")
    again = nn.load_sae(tmp_path, device=device)
    assert type(again) is nn.Transcoder and repr(again) == repr(model)
    assert again.state_dict().keys() == model.state_dict().keys() and model.firing_counts.any()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor) and again.state_dict()[name].dtype is tensor.dtype
    assert (again.aux_coefficient, again.aux_k, again.dead_after) == (0.2, 3, 7)
    assert torch.equal(again(x), model(x))


def test_sae_lens_is_not_fooled(device: torch.device, tmp_path: Path) -> None:
    """It has no TopK transcoder, and would read one as something else."""
    model = nn.Transcoder(D_IN, D_IN, D_SAE, 6, skip=True, device=device)
    with pytest.raises(ValueError, match=r'nn\.save_sae: layout="sae_lens" has no place .* Use layout="sparsify"'):
        nn.save_sae(model, tmp_path)
    assert not list(tmp_path.iterdir())
    sae_lens = pytest.importorskip("sae_lens")
    # Nor by the weights of an autoencoder that was there before.
    nn.save_sae(nn.TopKSAE(D_IN, D_SAE, 6), tmp_path)
    nn.save_sae(model, tmp_path, layout="sparsify")
    with pytest.raises((KeyError, ValueError, TypeError)):
        sae_lens.SAE.load_from_disk(tmp_path)
    assert type(nn.load_sae(tmp_path)) is nn.Transcoder
    from gossamer.integrations.sae_lens import patch

    with pytest.raises(TypeError, match="got Transcoder"):
        patch(model)


def test_its_latents_are_extracted(device: torch.device, generator: torch.Generator, tmp_path: Path) -> None:
    model, x = dense.make("transcoder", device), dense.sample(40, generator)
    extract.extract(x, model, tmp_path)
    found = extract.Extraction(tmp_path).read(0).to_dense()
    torch.testing.assert_close(found.to(device), model.eval().encode(x).to_dense().detach())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("skip", [False, True])
def test_one_process_of_a_group(skip: bool, device: torch.device, generator: torch.Generator) -> None:
    """Two and more are in tests/distributed."""
    x = dense.sample(40, generator)
    model = dense.make("transcoder", device, skip=skip)
    wanted = copy.deepcopy(model).loss(x, dense.targets(x))
    for got in (
        nn.data_parallel_sae(copy.deepcopy(model))(x, dense.targets(x)),
        nn.shard_sae(model).loss(x, dense.targets(x)),
    ):
        torch.testing.assert_close(got.loss, wanted.loss)


X = torch.ones(3, 4)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: nn.Transcoder(4, 0, 8, 2), ValueError, r"d_out must be at least 1, got 0"),
        (lambda: nn.Transcoder(4, 6.0, 8, 2), TypeError, r"d_out must be an int, got float"),
        (lambda: nn.Transcoder(4, 6, 8, 9), ValueError, r"k must be at most d_sae = 8, got 9"),
        (lambda: nn.Transcoder(4, 6, 8, 2).loss(X, X), ValueError, r"y must have .* = \[3, 6\] .* got \[3, 4\]"),
        (lambda: nn.Transcoder(4, 6, 8, 2).loss(X, X[:1, :1]), ValueError, r"y must have .* = \[3, 6\] .* \[1, 1\]"),
        (lambda: nn.Transcoder(4, 4, 8, 2).loss(X, X.int()), TypeError, r"y must be float32, .* got int32"),
    ],
)  # fmt: skip
def test_errors(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"nn\.Transcoder: {message}"):
        make()

"""The cases of `benchmarks/ffn`: what they cover, and that they have as many entries as their names say."""

import pytest
import torch

from benchmarks.engine.runner import Settings, run_case
from benchmarks.ffn import bench_block, bench_model, bench_training
from benchmarks.ffn.model import Sizes, make

CUDA = torch.device("cuda")
SMALL = Sizes(4, 64, 320, 2, 256, 128)


def test_cases_of_a_gpu_cover_what_is_reported() -> None:
    models = [(case.name, *case.parameters.values()) for case in bench_model.cases(CUDA, False)]
    assert len(set(models)) == len(models)
    for layers, entries in ((8, 39), (18, 33), (28, 29), (38, 24)):
        assert ("model", layers, 2048, 5632, 16384, entries) in models
        assert ("model, plain", layers, 2048, 8192, 16384, entries) in models
    assert {m[5] for m in models if m[:2] == ("model", 28)} == {911, 300, 100, 60, 29, 10, 1}
    assert any(m[0] == "model, silu" for m in models)
    blocks = [(case.name, *case.parameters.values()) for case in bench_block.cases(CUDA, False)]
    assert len(set(blocks)) == len(blocks)
    assert {b[1] for b in blocks if b[0] == "gated" and b[4] == 29 and b[5] == "0%"} == {1, 4, 16, 2048, 16384, 65536}
    assert {b[4] for b in blocks if b[0] == "plain"} == {29, 100, 300, 900}


@pytest.mark.native
def test_training_cases_are_right(device: torch.device) -> None:
    for case in bench_training.cases(device, True):
        result = run_case(case, device, Settings(rounds=1, burst=0.0), 0)
        outcomes = {o.provider.name: o.status for o in result.outcomes}
        assert not result.failed and outcomes["gossamer"] == outcomes["gossamer, lists"] == outcomes["dense"] == "ok"
    reported = {(c.name, *c.parameters.values()) for c in bench_training.cases(CUDA, False)}
    assert {r[1:5] for r in reported if r[4] == 29} == {
        (16384, 2048, 5632, 29),
        (8192, 2048, 5632, 29),
        (16384, 2048, 8192, 29),
    }


@pytest.mark.parametrize("gated", [True, False])
def test_a_model_has_the_entries_that_it_was_asked_for(
    gated: bool, device: torch.device, generator: torch.Generator
) -> None:
    options = {"batch": 2, "gated": gated, "activation": "relu", "entries": 12.0, "dtype": torch.float32}
    ids, model = make(SMALL, **options, device=device, generator=generator)  # type: ignore[arg-type]
    counts: list[torch.Tensor] = []

    def counting(layer, x, rotation, dense):  # type: ignore[no-untyped-def]
        x = layer.attend(x, rotation)
        h = layer.norm(x)
        counts.append(((layer.mlp.gate_proj if gated else layer.mlp.up_proj)(h[0]) > 0).sum(1).double())
        return x + layer.mlp(h)

    out = model(ids, through=counting)
    torch.testing.assert_close(out, model(ids, dense=True), atol=1e-4, rtol=1e-3)
    each = torch.stack(counts)
    assert 11 < each.mean() < 13
    # First tokens and layers are not like others.
    assert each[:, :2].mean() > 2 * each.mean() and each[1:3].mean() > each[0].mean()


@pytest.mark.native
@pytest.mark.parametrize("kind, activation", [("gated", "jumprelu"), ("plain", "jumprelu"), ("gated", "relu2")])
@pytest.mark.parametrize("nnz", [4, 100, 300])
def test_swept_blocks_are_right_and_as_dense_as_they_say(
    kind: str, activation: str, nnz: int, device: torch.device, generator: torch.Generator
) -> None:
    case = bench_block.block_case(kind, 40, nnz, 0.0, (64, 300), torch.float32, 6, True, activation)
    result = run_case(case, device, Settings(rounds=1, burst=0.0), 0)
    assert not result.failed and [o.status for o in result.outcomes] == ["ok", "ok"]
    x, block, _ = case.make(device, generator)[0]
    active = block.gate_proj if kind == "gated" else block.up_proj
    entries = (bench_block.activated(active(x), activation) != 0).sum(1).double().mean()
    assert 0.9 * nnz <= entries <= 1.1 * nnz

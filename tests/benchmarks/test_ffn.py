"""The cases of `benchmarks/ffn`: what they cover, and that they have as many entries as their names say."""

from dataclasses import replace

import pytest
import torch

from benchmarks.engine.runner import Settings, run_case
from benchmarks.ffn import bench_block, bench_model, bench_training
from gossamer.train import preset

CUDA = torch.device("cuda")


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


@pytest.mark.native
@pytest.mark.parametrize("gated", [True, False])
def test_a_model_has_the_entries_that_it_was_asked_for(gated: bool, device: torch.device) -> None:
    sizes = {"layers": 4, "hidden": 64, "intermediate": 320, "vocabulary": 256, "length": 128}
    ids, model = bench_model.make(preset("small", **sizes, gated=gated), 2, 12, device)
    counts: list[torch.Tensor] = []
    for block in model.blocks():
        part = block.gate_proj if gated else block.up_proj
        part.register_forward_hook(lambda module, args, out: counts.append((out > 0).sum(-1).double()))
    bench_model.go(model, "plain PyTorch", False)
    bench_model.logits(ids, model)
    each = torch.stack(counts)
    assert 11 < each.mean() < 13 and each.amax() > 2 * each.mean()


@pytest.mark.native
def test_model_cases_are_right(device: torch.device) -> None:
    for case in bench_model.cases(device, True):
        eager = replace(case, providers=tuple(p for p in case.providers if "compile" not in p.name))
        result = run_case(eager, device, Settings(rounds=1, burst=0.0), 0)
        assert not result.failed and {o.status for o in result.outcomes} == {"ok"}


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

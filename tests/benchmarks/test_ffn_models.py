"""The cases of `benchmarks/ffn`: what they cover, and models that have as many entries as their names say."""

import pytest
import torch

from benchmarks.ffn import bench_block, bench_model
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

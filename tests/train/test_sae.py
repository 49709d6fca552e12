"""Runs of autoencoders: that they learn, go on to the bit, and leave files that SAELens reads."""

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo.model import ByteModel, ModelConfig
from gossamer import nn
from gossamer.extract.source import Source
from gossamer.train import SAEConfig, SAERun, checkpoint, evaluate_sae
from gossamer.train.sae import KINDS, in_units_of_x
from tests.train.stopping import Stopped, curve, fill_disk, harm, killed, stop

pytestmark = pytest.mark.native
ROOT = Path(__file__).parents[2]
SMALL = SAEConfig(d_sae=48, batch=16, buffer=64, steps=60, lr=1e-3, sweep={"l0": [2, 4]})


def kind(name: str, config: SAEConfig = SMALL) -> SAEConfig:
    sweep: dict[str, list[Any]] = {"l1_coefficient": [0.3, 1.0]} if name in ("standard", "gated") else {"l0": [2, 4]}
    return replace(config, kind=name, sweep=sweep)


def rows(count: int = 700, scale: float = 3.0, seed: int = 0) -> Tensor:
    """Four of 24 directions each, times a scale, and a mean."""
    generator = torch.Generator().manual_seed(seed)
    atoms = torch.nn.functional.normalize(torch.randn(24, 12, generator=torch.Generator().manual_seed(9)))
    which = torch.rand(count, 24, generator=generator).topk(4).indices
    return (torch.zeros(count, 24).scatter(1, which, 1 + torch.rand(count, 4, generator=generator)) @ atoms + 1) * scale


def files(folder: Path) -> dict[str, bytes]:
    """The autoencoders' files, and the last checkpoint's tensors."""
    found = {str(f.relative_to(folder)): f.read_bytes() for f in folder.glob("*=*/*")}
    tensors = load_file(checkpoint.found(folder / "checkpoints")[-1][1])
    return found | {name: tensor.float().numpy().tobytes() for name, tensor in tensors.items()}


def stream() -> Tensor:
    """The residual stream of the demo's byte model, with its first weights, on the README."""
    torch.manual_seed(0)
    model, text = ByteModel(ModelConfig()), bytearray((ROOT / "README.md").read_bytes())
    tokens = torch.frombuffer(text, dtype=torch.uint8).long().split(model.config.context)[:-1]
    with torch.no_grad():
        return model.residual(torch.stack(tokens[:32])).flatten(0, 1)


def run(config: SAEConfig, source: Any, folder: Path, **options: Any) -> SAERun:
    return SAERun(config, source, folder, **{"checkpoint_every": 15, "log_every": 5, **options})


def compare_stopped(config: SAEConfig, folder: Path, device: str) -> None:
    """Over an edge of blocks and an epoch of 42 steps; at a checkpoint, and between two."""
    run(config, rows(), folder / "whole", device=device).train()
    for at in (10, 15, 40):
        with pytest.raises(Stopped):
            run(config, rows(), folder / "parts", device=device).train(stop(at))
        with (folder / "parts" / "log.jsonl").open("a") as log:
            log.write('{"step": 3, "lo')
    last = run(config, rows(), folder / "parts", device=device)
    assert last.step == 30
    last.train()
    assert curve(folder / "parts") == curve(folder / "whole")
    assert files(folder / "parts") == files(folder / "whole")


@pytest.mark.parametrize("name", KINDS)
def test_stopped_runs_go_on_to_the_bit(name: str, tmp_path: Path) -> None:
    compare_stopped(kind(name), tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", KINDS)
def test_on_a_gpu_stopped_runs_go_on_to_the_bit(name: str, dtype: str, tmp_path: Path) -> None:
    compare_stopped(kind(name, replace(SMALL, dtype=dtype, d_sae=512)), tmp_path, "cuda")


CHILD = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from gossamer.train import SAEConfig, SAERun
from tests.train.test_sae import stream
run = SAERun(SAEConfig(**eval(sys.argv[1])), stream(), Path(sys.argv[2]), checkpoint_every=5, log_every=5)
print("began", flush=True)
run.train()
"""


@pytest.mark.full
def test_killed_again_and_again_it_is_the_run_that_was_not(tmp_path: Path) -> None:
    def start(folder: str, times: int) -> int:
        config = vars(replace(kind("batchtopk"), steps=200))
        return killed(CHILD, config, tmp_path / folder, times=times, longest=0.4)

    assert start("whole", 0) == 0 and start("killed", 5) > 2
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


@pytest.mark.parametrize("name", KINDS)
def test_it_learns_in_any_unit(name: str, tmp_path: Path) -> None:
    """With a mean beside the directions, which only b_dec explains; files are in the units of the source."""
    config = replace(kind(name), steps=200, lr=4e-3, sweep={}, l0=None if name in ("standard", "gated") else 4)
    whole = run(config, rows(scale=30.0 if name != "jumprelu" else 0.05), tmp_path)
    whole.train()
    (found,) = whole.results
    assert found["explained"] > 0.75 and found["dead"] < 0.7, {**found, "density": 0}
    assert whole.records[-1]["explained/0"] == pytest.approx(found["explained"], abs=0.06)
    loaded = nn.load_sae(tmp_path / "sae").eval()
    again = evaluate_sae(loaded, whole.held_out)
    assert again["explained"] == pytest.approx(found["explained"], abs=1e-5) and again["l0"] == found["l0"]
    x, scaled = whole.held_out, whole.models.scale
    inner = whole.models[0].eval()
    assert torch.equal(in_units_of_x(inner, scaled)(x), inner(x * scaled) / scaled) and (scaled == 1) == (
        name == "jumprelu"
    )


@pytest.mark.parametrize("name", KINDS)
def test_sae_lens_reads_what_a_run_wrote(name: str, tmp_path: Path) -> None:
    sae_lens = pytest.importorskip("sae_lens")
    whole = run(kind(name), rows(), tmp_path)
    whole.train()
    for number, folder in enumerate(whole.config.names):
        theirs = sae_lens.SAE.load_from_disk(tmp_path / folder)
        ours = in_units_of_x(whole.models[number], whole.models.scale)
        torch.testing.assert_close(theirs(whole.held_out), ours(whole.held_out), rtol=1e-4, atol=1e-4)


def test_each_autoencoder_of_a_sweep_is_the_one_trained_alone(tmp_path: Path) -> None:
    """One stream serves all: its rows are read once."""
    reads = []

    class Counted:
        def __len__(self) -> int:
            return 700

        def rows_from(self, start: int) -> Iterator[Tensor]:
            for batch in rows()[start:].split(50):
                reads.append(len(batch))
                yield batch

    config = replace(SMALL, steps=30)
    run(config, Counted(), tmp_path / "both").train()
    assert sum(reads) <= 700
    for l0 in (2, 4):
        run(replace(config, sweep={"l0": [l0]}), rows(), tmp_path / str(l0)).train()
        for name in ("sae_weights.safetensors", "training_state.safetensors"):
            alone, both = (tmp_path / f / f"l0={l0}" / name for f in (str(l0), "both"))
            assert alone.read_bytes() == both.read_bytes()


def test_sources_give_the_same_rows_and_an_epoch_gives_each_once(tmp_path: Path) -> None:
    """A tensor, files and an iterator without a length."""
    x, config = rows(200), replace(SMALL, steps=11, sweep={}, held_out=16)
    save_file({"acts": x[:90].clone()}, tmp_path / "a.safetensors")
    save_file({"acts": x[90:].clone()}, tmp_path / "b.safetensors")
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    runs = [run(config, source, tmp_path / str(i)) for i, source in enumerate((x, paths, iter(x.split(33))))]
    seen = []
    for each in runs:
        seen.append(torch.cat([*each._batches()]))
        assert torch.equal(each.held_out, x[:16]) and torch.equal(seen[-1], seen[0])
    assert sorted(seen[0].tolist()) == sorted(x[16:192].tolist()) and not torch.equal(seen[0], x[16:192])
    with pytest.raises(ValueError, match=r"steps must be given for a source that does not know its length"):
        run(replace(config, steps=None), iter(x.split(33)), tmp_path / "no")
    with pytest.raises(ValueError, match=r"must have 64 rows from row 144 on for 50 steps, got 56. Give fewer steps"):
        run(replace(config, steps=50), iter(x.split(33)), tmp_path / "short").train()


@pytest.mark.parametrize("how", ["truncated", "changed", "empty"])
def test_a_broken_checkpoint_is_named_and_the_older_one_is_good(tmp_path: Path, how: str) -> None:
    run(SMALL, rows(), tmp_path / "whole").train()
    run(SMALL, rows(), tmp_path / "run").train()
    file = checkpoint.found(tmp_path / "run" / "checkpoints")[-1][1]
    harm(file, how)
    with pytest.raises(ValueError, match=r"step-00000060.* is corrupt or truncated.*Remove it.*step-00000045"):
        run(SMALL, rows(), tmp_path / "run")
    file.unlink()
    run(SMALL, rows(), tmp_path / "run").train()
    assert files(tmp_path / "run") == files(tmp_path / "whole")


def test_a_full_disk_leaves_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch, 30)
    with pytest.raises(OSError, match=r"step-00000030.safetensors could not be written: No space left on device"):
        run(SMALL, rows(), tmp_path).train()
    assert [step for step, _ in checkpoint.found(tmp_path / "checkpoints")] == [15]
    monkeypatch.undo()
    again = run(SMALL, rows(), tmp_path)
    assert again.step == 15
    again.train()
    assert again.step == SMALL.steps


@pytest.mark.parametrize("spoils, good", [("row", 30), ("weight", 15)])
def test_numbers_that_are_not_finite_stop_the_run(spoils: str, good: int, tmp_path: Path) -> None:
    """Also in the step of a checkpoint, whose loss is that of the weights before it."""
    source = rows()
    whole = run(replace(SMALL, buffer=16), source, tmp_path)
    if spoils == "row":
        source[whole.config.held_out + 32 * 16 + 3, 2] = torch.nan
    else:
        weight = whole.models[1].W_dec
        weight.register_hook(lambda grad: grad * (math.nan if whole.step == 29 else 1))
    message = {"row": r"loss of steps 31 to 35 is \[nan, nan\]", "weight": "a weight is not finite after step 30"}
    with pytest.raises(FloatingPointError, match=message[spoils] + rf".*The checkpoint of step {good} is good"):
        whole.train()
    assert checkpoint.found(tmp_path / "checkpoints")[-1][0] == good


def test_other_settings_and_sources_are_refused(tmp_path: Path) -> None:
    run(replace(SMALL, options={"aux_k": 3}), rows(), tmp_path)
    with pytest.raises(ValueError, match=r"holds a run of other settings: lr 0.001 there and 0.1 here"):
        run(replace(SMALL, lr=0.1, options={"aux_k": 3}), rows(), tmp_path)
    with pytest.raises(ValueError, match=r"holds a run of other settings: source [0-9a-f]{64} there and"):
        run(replace(SMALL, options={"aux_k": 3}), rows(seed=1), tmp_path)
    with pytest.raises(ValueError, match=r"source must have a batch of 16 rows beside 16 .* got 20 rows"):
        run(SMALL, rows(20), tmp_path / "few")
    for changes, message in (
        ({"kind": "vae"}, "kind must be one of topk, batchtopk, "),
        ({"buffer": 70}, "buffer must be a multiple of batch = 16, got 70"),
        ({"sweep": {"l0": []}}, "sweep must have a list of values for each name"),
        ({"sweep": {"l0": [2, 2]}}, "sweep must name each value once"),
        ({"options": {"widht": 3}}, "arguments of nn.TopKSAE: got an unexpected keyword argument 'widht'"),
        ({"options": {"k": 8}}, "options must not have k, which follows from l0. Give l0"),
        ({"sweep": {"target_l0": [4, 8]}}, "sweep must not have target_l0, which follows from l0. Give l0"),
        ({"options": {"seed": 8}}, "options must not have seed. Give it beside them"),
        ({"sweep": {"l0": 16}}, "sweep must have a list of values for each name, got {'l0': 16}"),
        ({"seed": -1}, "seed must be an int from 0 to .*, got -1"),
        ({"sweep": {"seed": [0, "a"]}}, "seed must be an int from 0 to .*, got 'a'"),
        ({"kind": "gated", "sweep": {}, "l0": 3}, "kind gated takes no l0, got 3. Give its option l1_coefficient"),
    ):
        with pytest.raises(ValueError, match=message):
            run(replace(SMALL, **changes), rows(), tmp_path / "other")
    for name in ("checkpoint_every", "log_every", "keep"):
        with pytest.raises(ValueError, match=f"train: {name} must be at least 1, got 0"):
            run(SMALL, rows(), tmp_path / "other", **{name: 0})


def test_rows_of_two_widths_are_refused_by_name(tmp_path: Path) -> None:
    for name, width in (("a", 12), ("b", 7)):
        np.save(tmp_path / f"{name}.npy", rows()[:400, :width].numpy())
    message = r"b.npy must have shape .* with d_in = 12 like .*a.npy, got 7. Leave it out, or give rows of one width"
    with pytest.raises(ValueError, match=message):
        run(SMALL, [tmp_path / "a.npy", tmp_path / "b.npy"], tmp_path / "run")
    message = r"batch 1 of source must have shape .* with d_in = 12 like batch 0 of source, got 7"
    with pytest.raises(ValueError, match=message):
        run(SMALL, iter([rows()[:400], rows()[:400, :7]]), tmp_path / "run").train()


def test_rows_with_a_gradient_train_like_those_without(tmp_path: Path) -> None:
    run(SMALL, rows(), tmp_path / "plain").train()
    run(SMALL, rows().requires_grad_(), tmp_path / "grad").train()
    assert files(tmp_path / "plain") == files(tmp_path / "grad")


def test_a_run_trains_once(tmp_path: Path) -> None:
    whole = run(SMALL, iter(rows(1200).split(50)), tmp_path)
    with pytest.raises(Stopped):
        whole.train(stop(10))
    with pytest.raises(RuntimeError, match=r"a SAERun trains once\. Another of the same folder goes on"):
        whole.train()


def test_a_run_that_ends_early_reads_no_whole_block(tmp_path: Path) -> None:
    reads = []

    class Slow:
        def __len__(self) -> int:
            return 1400

        def rows_from(self, start: int) -> Iterator[Tensor]:
            for number, row in enumerate(rows(1400)[start:].split(1)):
                reads.append(number)
                time.sleep(0.001 if number > 700 else 0)
                yield row

    with pytest.raises(Stopped):
        run(replace(SMALL, buffer=640, steps=None), Slow(), tmp_path).train(stop(5))
    assert len(reads) < 1300


class WithLosses:
    """Rows of a model whose losses are given."""

    def __init__(self, losses: Any) -> None:
        self.losses, self.asked = losses, False

    def __len__(self) -> int:
        return 700

    def rows_from(self, start: int) -> Iterator[Tensor]:
        # cuBLAS reads it in the model's first product.
        self.asked = self.asked or "CUBLAS_WORKSPACE_CONFIG" in os.environ
        yield from rows()[start:].split(50)


def test_a_model_that_has_no_loss_costs_no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*edits: Any) -> list[float]:
        raise TypeError("no loss")

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    source = WithLosses(broken)
    whole = run(SMALL, source, tmp_path / "broken")
    assert source.asked
    with pytest.raises(TypeError, match="no loss"):
        whole.train()
    kept = json.loads((tmp_path / "broken" / "results.json").read_text())
    assert [found["name"] for found in kept] == ["l0=2", "l0=4"] and "loss" not in kept[0]
    assert nn.load_sae(tmp_path / "broken" / "l0=4").k == 4
    for name, measured, names in (
        ("none", [], set()),
        ("same", [1.0, 1.0, 1.0], {"model loss", "loss without", "loss"}),
    ):
        run(SMALL, WithLosses(lambda *edits, measured=measured: measured), tmp_path / name).train()
        again = json.loads((tmp_path / name / "results.json").read_text())
        assert [set(new) - set(old) for new, old in zip(again, kept)] == [names, names]


@pytest.mark.gpu
def test_losses_of_a_model_on_another_device(tmp_path: Path) -> None:
    def losses(*edits: Any) -> list[float]:
        found = [edit(rows()[:32]) for edit in edits]
        assert all(edited.device.type == "cpu" for edited in found)
        return [0.0, 1.0, float((found[2] - found[0]).square().mean())]

    whole = run(SMALL, WithLosses(losses), tmp_path, device="cuda")
    whole.train()
    assert "loss recovered" in whole.results[0]


def test_a_run_that_is_refused_closes_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, close = [], Source.close
    monkeypatch.setattr(Source, "close", lambda source: (closed.append(source), close(source)))
    with pytest.raises(ValueError, match="options must be arguments"):
        run(replace(SMALL, options={"widht": 3}), rows(), tmp_path)
    assert len(closed) == 1


def test_files_that_no_run_wrote_are_named(tmp_path: Path) -> None:
    run(SMALL, rows(), tmp_path).train()
    log = tmp_path / "log.jsonl"
    whole = log.read_text()
    for line in ("\0\0\n", "[]\n", '{"loss/0": 1}\n'):
        log.write_text(whole + line)
        with pytest.raises(ValueError, match=r"log.jsonl is damaged at the line .*Remove the line"):
            run(SMALL, rows(), tmp_path)
    log.write_text(whole)
    foreign = tmp_path / "checkpoints" / "step-mine.safetensors"
    foreign.write_bytes(b"")
    with pytest.raises(ValueError, match=r"step-mine.safetensors is no checkpoint.*Move it to another folder"):
        run(SMALL, rows(), tmp_path)
    foreign.unlink()
    other = tmp_path / "checkpoints" / "step-00000099.safetensors"
    save_file({"x": torch.ones(2)}, other, {"crc32": "{", "step": "99"})
    with pytest.raises(ValueError, match=r"step-00000099.safetensors is corrupt"):
        run(SMALL, rows(), tmp_path)

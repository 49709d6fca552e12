"""Runs: what is learnt, and that a run that was stopped goes on as if it had not been."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gossamer import train
from gossamer.train import Config, Corpus, Run, checkpoint, loop
from tests.train.corpora import write_corpus
from tests.train.stopping import Stopped, curve, fill_disk, harm, killed, stop

pytestmark = pytest.mark.native
SMALL = Config(
    layers=2, hidden=32, intermediate=44, heads=2, vocabulary=64, length=16, batch=4, micro_batch=2, steps=12, lr=1e-2,
    warmup=2, l1=0.05, reinitialize=0.1,
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, tokens=6000, vocabulary=64)
    return Corpus(folder)


def weights(folder: Path) -> dict[str, bytes]:
    """Weights and moments of the last checkpoint."""
    tensors = load_file(checkpoint.found(folder / "checkpoints")[-1][1])
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_it_learns_and_l1_makes_it_sparse(corpus: Corpus, tmp_path: Path) -> None:
    """The text follows its rule 70% of the time: a model that found it has half of the loss of one that did not."""
    dense = Run(replace(SMALL, steps=150, l1=0.0, reinitialize=0.0), corpus, tmp_path / "dense")
    dense.train()
    sparse = Run(replace(SMALL, steps=150, l1=0.3), corpus, tmp_path / "sparse")
    sparse.train()
    first, last = dense.records[0], dense.records[-1]
    assert first["loss"] == pytest.approx(math.log(64), abs=0.1)
    assert last["validation"] < 0.65 * first["loss"] and sparse.records[-1]["validation"] < 0.7 * first["loss"]
    assert sparse.records[-1]["l0"] < 0.5 * last["l0"]


def test_micro_batches_add_up_to_the_batch(corpus: Corpus, tmp_path: Path) -> None:
    runs = [Run(replace(SMALL, micro_batch=size), corpus, tmp_path / str(size)) for size in (1, 4)]
    for run in runs:
        run.train()
    for a, b in zip(*(run.records for run in runs)):
        for key in ("loss", "l1", "l0", "dead", "norm", "coefficient", "lr"):
            assert a[key] == pytest.approx(b[key], rel=2e-3, abs=1e-5), (a["step"], key)


def test_the_gradient_is_of_cross_entropy_plus_l1(corpus: Corpus, tmp_path: Path) -> None:
    run = Run(replace(SMALL, l1=0.7, clip=1e9), corpus, tmp_path)
    model = train.Transformer(run.config).double()
    model.dtype = torch.float64
    out = model(run.windows.batch(run.windows.shuffled(0, 4, 0)))
    (out.loss + 0.7 * out.activity.l1.mean()).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    run.train()
    assert run.records[0]["norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_stopped_runs_go_on_to_the_bit(corpus: Corpus, tmp_path: Path) -> None:
    """At a checkpoint, between two, and while the log has half a line."""
    Run(SMALL, corpus, tmp_path / "whole", checkpoint_every=4).train()

    for at in (1, 4, 6, 11):
        with pytest.raises(Stopped):
            Run(SMALL, corpus, tmp_path / "parts", checkpoint_every=4).train(stop(at))
        with (tmp_path / "parts" / "log.jsonl").open("a") as log:
            log.write('{"step": 3, "lo')
    run = Run(SMALL, corpus, tmp_path / "parts", checkpoint_every=4)
    assert run.step == 8
    run.train()
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


CHILD = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from gossamer.train import Corpus, Run, Config
run = Run(Config(**eval(sys.argv[1])), Corpus(Path(sys.argv[2])), Path(sys.argv[3]), checkpoint_every=2)
print("began", flush=True)
run.train()
"""


@pytest.mark.full
def test_killed_at_random_moments_it_gives_the_same_curve(corpus: Corpus, tmp_path: Path) -> None:
    def run(folder: str, times: int) -> int:
        config = vars(replace(SMALL, steps=40))
        return killed(CHILD, config, corpus.folder, tmp_path / folder, times=times, longest=0.6)

    assert run("whole", 0) == 0 and run("killed", 12) > 2
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


@pytest.mark.parametrize("how", ["truncated", "changed", "empty"])
def test_a_broken_checkpoint_is_named_and_the_older_one_is_good(corpus: Corpus, tmp_path: Path, how: str) -> None:
    Run(SMALL, corpus, tmp_path / "whole", checkpoint_every=4).train()
    run = Run(SMALL, corpus, tmp_path / "run", checkpoint_every=4)
    run.train()
    files = [file for _, file in checkpoint.found(tmp_path / "run" / "checkpoints")]
    assert [file.name for file in files] == ["step-00000008.safetensors", "step-00000012.safetensors"]
    harm(files[1], how)
    with pytest.raises(ValueError, match=r"step-00000012.* is corrupt or truncated.*Remove it.*step-00000008"):
        Run(SMALL, corpus, tmp_path / "run")
    files[1].unlink()
    again = Run(SMALL, corpus, tmp_path / "run", checkpoint_every=4)
    assert again.step == 8
    again.train()
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_a_full_disk_leaves_the_older_checkpoint(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, 8)
    with pytest.raises(OSError, match=r"step-00000008.safetensors could not be written: No space left on device"):
        Run(SMALL, corpus, tmp_path, checkpoint_every=4).train()
    assert [step for step, _ in checkpoint.found(tmp_path / "checkpoints")] == [4]
    assert not list((tmp_path / "checkpoints").glob(".*"))
    monkeypatch.undo()
    run = Run(SMALL, corpus, tmp_path, checkpoint_every=4)
    assert run.step == 4
    run.train()
    assert run.step == SMALL.steps


@pytest.mark.parametrize("spoils, good", [("loss", 8), ("gradient", 4)])
def test_a_loss_or_gradient_that_is_no_number_stops_the_run(
    spoils: str, good: int, corpus: Corpus, tmp_path: Path
) -> None:
    """Also in the step of a checkpoint, which a gradient that is NaN would spoil while the loss is finite."""
    run = Run(SMALL, corpus, tmp_path, checkpoint_every=4)
    step, weight = run._step, run.model.model.norm.weight

    def spoilt() -> torch.Tensor:
        if spoils == "loss" and run.step == good + 1:
            with torch.no_grad():
                weight[0] = torch.nan
        if spoils == "gradient" and run.step == good + 3:
            weight.register_hook(lambda grad: grad * torch.nan)
        return step()

    run._step = spoilt  # type: ignore[method-assign]
    message = rf"the loss of step {good + 2 if spoils == 'loss' else 8} is .*The checkpoint of step {good} is good"
    with pytest.raises(FloatingPointError, match=message):
        run.train()
    assert checkpoint.found(tmp_path / "checkpoints")[-1][0] == good
    assert len(curve(tmp_path)) == (9 if spoils == "loss" else 7)


def test_on_lists_of_active_entries_it_learns_the_same(corpus: Corpus, tmp_path: Path) -> None:
    """The curve of dense products but for rounding, from the first step on, when half of the neurons are active."""
    runs = [Run(replace(SMALL, method=method), corpus, tmp_path / method) for method in ("fused", "gather")]
    for run in runs:
        run.train()
    assert [run.records[-1]["sparse layers"] for run in runs] == [0, 2]
    assert runs[1].model.model.layers[0].mlp.last_path == "gather"
    for a, b in zip(*(run.records for run in runs)):
        for key in ("loss", "l1", "l0", "dead", "norm"):
            assert a[key] == pytest.approx(b[key], rel=2e-3, abs=1e-5), (a["step"], key)


def test_a_step_that_overflows_lists_is_refused_before_the_optimizer(corpus: Corpus, tmp_path: Path) -> None:
    """Lists have room for 16 of 44 neurons, of which half are active at first."""
    run = Run(replace(SMALL, method="gather", on_overflow="raise"), corpus, tmp_path / "run")
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    with pytest.raises(OverflowError, match=r"in step 1, \d+ of 32 tokens of layer \d .*allows 4.* those of step 0"):
        run.train()
    assert run.step == 0 and all(torch.equal(before[name], t) for name, t in run.model.state_dict().items())
    whole = [Run(replace(SMALL, on_overflow=rule), corpus, tmp_path / rule) for rule in train.config.ON_OVERFLOW]
    for run in whole:
        run.train()
    assert curve(tmp_path / "raise") == curve(tmp_path / "compute")
    with pytest.raises(ValueError, match=r"on_overflow must be one of compute, raise, got 'drop'"):
        replace(SMALL, on_overflow="drop")


@pytest.mark.gpu
def test_on_a_gpu_blocks_go_on_lists_once_few_neurons_are_active(corpus: Corpus, tmp_path: Path) -> None:
    """And those of a run that goes on between two choices, as those of one that was not stopped."""
    config = replace(
        SMALL, dtype="bfloat16", hidden=512, intermediate=8192, heads=8, length=64, batch=64, micro_batch=64, steps=70,
        method="auto", lr=1e-3, l1=3e-2,
    )  # fmt: skip
    Run(config, corpus, tmp_path / "whole", device="cuda", checkpoint_every=50).train()
    with pytest.raises(Stopped):
        Run(config, corpus, tmp_path / "parts", device="cuda", checkpoint_every=50).train(stop(55))
    Run(config, corpus, tmp_path / "parts", device="cuda", checkpoint_every=50).train()
    found = curve(tmp_path / "whole")
    assert found[0]["sparse layers"] == 0 and max(record["sparse layers"] for record in found) > 0
    assert curve(tmp_path / "parts") == found


def test_blocks_are_chosen_by_their_light_entries(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, means = Run(replace(SMALL, method="auto"), corpus, tmp_path), list[float]()

    def faster(mean: float, *_: object) -> bool:
        means.append(mean)
        return mean < 4

    monkeypatch.setattr(loop, "lists_are_faster", faster)
    monkeypatch.setattr(loop, "FULL", 0)
    run.device, run.step = torch.device("cuda"), loop.CHOSEN
    entries = {"l0/00": 30.0, "l0/01": 5.0, "light/00": 2.0, "light/01": 5.0, "hot/00": 9.0, "hot/01": 0.0}
    run.records = [entries] * loop.CHOSEN
    run._choose()
    assert [block.method for block in run.model.blocks()] == ["gather", "fused"] and means == [2.0, 5.0]
    assert [block.density.hot.pinned for block in run.model.blocks()] == ["16", "0"]


def test_other_settings_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    Run(SMALL, corpus, tmp_path)
    with pytest.raises(ValueError, match=r"holds a run of other settings: steps 12 there and 13 here, l1 0.05 there"):
        Run(replace(SMALL, steps=13, l1=0.1), corpus, tmp_path)
    for name in ("checkpoint_every", "keep"):
        with pytest.raises(ValueError, match=f"train: {name} must be at least 1, got 0"):
            Run(SMALL, corpus, tmp_path, **{name: 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"vocabulary must be at least that of the corpus, 64, got 32"):
        Run(replace(SMALL, vocabulary=32), corpus, tmp_path / "other")
    with pytest.raises(ValueError, match=r"the corpus must have sequences of 5000 tokens"):
        Run(replace(SMALL, length=5000), corpus, tmp_path / "long")


def test_a_profile_is_written(corpus: Corpus, tmp_path: Path) -> None:
    Run(SMALL, corpus, tmp_path, profiled=True).train()
    assert json.loads((tmp_path / "profile.json").read_text())["traceEvents"]


@pytest.mark.gpu
def test_on_a_gpu_it_goes_on_to_the_bit_and_in_bfloat16(corpus: Corpus, tmp_path: Path) -> None:
    config = replace(SMALL, dtype="bfloat16", hidden=64, intermediate=128)
    Run(config, corpus, tmp_path / "whole", device="cuda", checkpoint_every=4).train()
    with pytest.raises(Stopped):
        Run(config, corpus, tmp_path / "parts", device="cuda", checkpoint_every=4).train(stop(9))
    Run(config, corpus, tmp_path / "parts", device="cuda", checkpoint_every=4).train()
    assert [r["loss"] for r in curve(tmp_path / "parts")] == [r["loss"] for r in curve(tmp_path / "whole")]
    assert curve(tmp_path / "whole")[-1]["validation"] < math.log(64)

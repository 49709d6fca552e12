"""The recipe: L1's weight by step, dead neurons, new weights for them, scalars."""

import pytest
import torch

from gossamer import nn, sparsity
from tests.syncs import without_a_sync

pytestmark = pytest.mark.native
PAPER = sparsity.L1Schedule(3e-4, warmup=5000, ramp=5000)


def test_schedules() -> None:
    """The paper's two: constant, and 5,000 steps at 0 before 5,000 of a line."""
    assert [sparsity.L1Schedule(2e-5)(step) for step in (0, 7, 40_000)] == [2e-5] * 3
    found = [PAPER(step) for step in (0, 4999, 5000, 7500, 10_000, 30_000)]
    assert found == pytest.approx([0, 0, 0, 1.5e-4, 3e-4, 3e-4])
    assert sparsity.L1Schedule(1.0, warmup=3)(2) == 0 and sparsity.L1Schedule(1.0, warmup=3)(3) == 1


@pytest.mark.parametrize("name", ["coefficient", "warmup", "ramp"])
def test_a_schedule_refuses_negative_numbers(name: str) -> None:
    with pytest.raises(ValueError, match=f"sparsity.L1Schedule: {name} must be at least 0"):
        sparsity.L1Schedule(**{"coefficient": 1.0, name: -1})


def test_a_neuron_is_dead_that_fired_in_no_micro_batch_of_the_step() -> None:
    tracker = sparsity.DeadNeuronTracker()
    fired = torch.randint(0, 2, (5, 3, 7))
    for part in fired:
        tracker.add(part)
    assert torch.equal(tracker.step(), (fired == 0).all(0))
    tracker.add(fired[0])
    assert torch.equal(tracker.step(), fired[0] == 0), "a step's counts must not reach the next"
    with pytest.raises(ValueError, match="step must follow add"):
        tracker.step()


def test_add_leaves_what_it_is_given() -> None:
    tracker, first = sparsity.DeadNeuronTracker(), torch.tensor([1, 0])
    tracker.add(first)
    tracker.add(torch.tensor([1, 1]))
    assert first.tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equation_6(dtype: torch.dtype) -> None:
    weight = torch.randn(50, 400, dtype=dtype)
    before, dead = weight.clone(), torch.rand(50) < 0.3
    sparsity.reinitialize_(weight, dead, rate=0.1, std=0.02, generator=torch.Generator().manual_seed(1))
    noise = torch.empty(50, 400, dtype=dtype).normal_(0, 0.02, generator=torch.Generator().manual_seed(1))
    wanted = 0.9 * before.double() + 0.1 * noise.double()
    step = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(weight[dead].double(), wanted[dead], rtol=step, atol=step)
    assert torch.equal(weight[~dead], before[~dead]), "a neuron that fires keeps its bits"
    fresh = torch.zeros(50, 400, dtype=dtype)
    sparsity.reinitialize_(fresh, torch.ones(50, dtype=torch.bool), rate=1.0, std=0.02)
    assert fresh.double().std().item() == pytest.approx(0.02, rel=0.05)


def test_it_brings_dead_neurons_back() -> None:
    """Gates that are negative on all of the data fire again within some steps, and without it never do."""
    torch.manual_seed(0)
    x = torch.rand(512, 16) + 0.5
    for rate, revived in ((0.0, False), (0.1, True)):
        block = nn.GatedMLP(16, 64, "relu", l1=True)
        with torch.no_grad():
            block.gate_proj.weight.copy_(-torch.rand(64, 16) * 0.02)
        tracker = sparsity.DeadNeuronTracker()
        for _ in range(60):
            tracker.add(block(x).activity.fired)
            sparsity.reinitialize_(block.gate_proj.weight, tracker.step(), rate=rate)
        assert (block(x).activity.fired > 0).float().mean().item() > 0.9 if revived else tracker.dead.all()


def test_reinitialize_refuses_what_does_not_fit() -> None:
    weight = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"weight must have shape \[N, K\] and dead \[N\], got \[3, 4\] and \[4\]"):
        sparsity.reinitialize_(weight, torch.zeros(4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\], got 2"):
        sparsity.reinitialize_(weight, torch.zeros(3, dtype=torch.bool), rate=2)


@pytest.mark.gpu
def test_a_step_of_the_recipe_does_not_wait_for_the_device() -> None:
    block = nn.GatedMLP(64, 256, "relu", l1=True, device="cuda")
    x, tracker = torch.randn(32, 64, device="cuda"), sparsity.DeadNeuronTracker()
    generator = torch.Generator("cuda")
    with without_a_sync():
        for step in range(3):
            out = block(x)
            (out.out.sum() + out.activity.l1).backward()
            tracker.add(out.activity.fired)
            generator.manual_seed(step)
            sparsity.reinitialize_(block.gate_proj.weight, tracker.step(), generator=generator)


def test_scalars() -> None:
    dead = torch.zeros(2, 10, dtype=torch.bool)
    dead[1, :3] = True
    found = sparsity.scalars(torch.tensor([5.0, 7.0]), dead, loss=2.5)
    assert found == pytest.approx(
        {"loss": 2.5, "l0": 6, "dead": 0.15, "l0/00": 5, "l0/01": 7, "dead/00": 0, "dead/01": 0.3}
    )
    assert all(type(value) is float for value in found.values())

"""Neurons that many rows have, as columns of dense products under gradients."""

from typing import Any

import pytest
import torch

from gossamer._core.ops import INTERPRET
from gossamer.ffn.costs import hot_bound
from gossamer.ffn.records import SparseTraining, SparseTrainingBwd
from gossamer.ffn.sparse_training import sparse_training
from gossamer.rowsparse.formats import empty_twell, sums_over_rows
from tests.ffn.trained import check, drawn, leaves, operator_arguments, reference, taken

pytestmark = pytest.mark.kernels

SHAPE = (40, 24, 90, 20) if INTERPRET else (300, 72, 600, 40)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Neurons are hot that few of the rows of a test have."""
    from gossamer.ffn._triton import train_hot

    monkeypatch.setattr(train_hot, "LEAST", SHAPE[0] // 4)
    monkeypatch.setattr(train_hot, "SAMPLED", train_hot.SAMPLED)
    return train_hot


@pytest.mark.parametrize("m, frequent, capacity", [(70, 5, 16), (70, 30, 16), (31, 0, 16), (31, 120, 16), (70, 5, 0)])
def test_the_most_frequent_are_chosen(
    m: int, frequent: int, capacity: int, device: torch.device, generator: torch.Generator, soon: Any
) -> None:
    """Those over the share, or the most frequent where there are more than slots, also where all are as frequent."""
    from gossamer.rowsparse._triton.twell import launch_pack_twell

    n, tile = 120, 16
    slots, limit = (16, n) if frequent == n else (8, 40)
    soon.SAMPLED, soon.LEAST = 32, 17
    rate = torch.full((n,), 0.02, device=device)
    rate[torch.randperm(n, device=device, generator=generator)[:frequent]] = 0.9 if frequent < n else 1.0
    z = (torch.rand(m, n, device=device, generator=generator) < rate).float()
    z[::2, :60] = 1.0 if frequent == 5 else z[::2, :60]
    packed = empty_twell(z, m, n, tile, slots)
    launch_pack_twell(z, None, tile, packed)
    hot = soon.choose(packed, tile, n, limit, True, capacity)
    step = m // soon.SAMPLED | 1
    # Rows that are heavy, or overflow a tile, do not count.
    most = torch.stack([part.sum(1) for part in z.split(tile, 1)]).amax(0)
    counted = (most <= slots) & (z.sum(1) <= limit)
    assert counted.sum() > 5 and (frequent != 5 or not counted[::2].any())
    held = (z * counted[:, None])[::step].sum(0).int()
    used = int(hot.listed[0])
    assert used == min(capacity, int(hot.listed[1]))
    listed = hot.listed[2 : 2 + used].tolist()
    least = max(int(hot_bound(len(z[::step]), 4, device)), -(-soon.LEAST // step))
    assert int(hot.listed[1]) == int((held > least).sum())
    assert len({*listed}) == used and all(held[j] > least for j in listed)
    others = [j for j in range(n) if j not in listed]
    if used and frequent > capacity:
        assert min(held[listed]) >= max(held[others])
    slots = hot.slots.tolist()
    assert [slots[j] for j in listed] == list(range(used)) and all(slots[j] == -1 for j in others)
    assert hot.values.shape == (2, m, capacity) and not hot.values.any()


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
def test_gradients(
    gated: bool, activation: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator, soon: Any
) -> None:
    """Some neurons of most rows, beside a row that is dense."""
    a, grad = drawn(SHAPE, dtype, device, generator, 2.0)
    a["gate_bias"][::9] = 4.0
    a["gate_bias"][4:8] = 0.0
    a["x"][17] *= 16
    check(taken(a, gated), grad, activation)


@pytest.mark.parametrize("capacity", [16, 48])
@pytest.mark.parametrize("gated", [True, False])
def test_penalty_and_counts(
    gated: bool, capacity: int, device: torch.device, generator: torch.Generator, soon: Any
) -> None:
    """Beside heavy rows, with more hot neurons than slots and with fewer: counts, the L1 penalty and all gradients, the
    same twice."""
    a, grad = drawn(SHAPE, torch.float32, device, generator, 2.0)
    a["gate_bias"][::4] = torch.linspace(-1.5, 4.0, len(a["gate_bias"][::4]), device=device)
    a["x"][[2, 30]] *= 32
    a = taken(a, gated)
    ours, wide = leaves(a), leaves(a, torch.float64)
    arguments = operator_arguments(ours, SHAPE[2] // 3, SHAPE[0] * SHAPE[2], 256, capacity)
    _, l1, _, fired, *_, (_, heavy), hot, values = found = sparse_training(SparseTraining(*arguments))
    used, (_, m, _) = int(hot[0]), values.shape
    assert 8 < used <= capacity and 0 < int(heavy[0]) < m // 2
    gate = torch.relu(wide["x"] @ wide["gate"].t() + wide["gate_bias"])
    hidden = gate * (wide["x"] @ wide["up"].t() + wide["up_bias"]) if gated else gate
    exact = hidden.abs().sum() / m
    active = gate.detach() > 0
    active[heavy[1 : 1 + int(heavy[0])].long()] = False
    assert fired.tolist() == (gate > 0).sum(0).tolist()
    assert torch.equal(values[0, :, :used] != 0, active[:, hot[2 : 2 + used].long()])
    torch.testing.assert_close(l1.double(), exact.detach(), rtol=1e-6, atol=1e-6)
    names = list(a)
    whole = 3 * exact + (reference(wide) * grad.double()).sum()
    want = torch.autograd.grad(whole, [wide[name] for name in names])
    loss = [3 * of[1] + (of[0] * grad).sum() for of in (found, sparse_training(SparseTraining(*arguments)))]
    got, again = (torch.autograd.grad(one, [ours[name] for name in names]) for one in loss)
    for name, result, same, exactly in zip(names, got, again, want, strict=True):
        assert torch.equal(result, same), name
        torch.testing.assert_close(
            result.double(), exactly, rtol=2e-5, atol=2e-5 * float(exactly.abs().max()), msg=name
        )


def test_a_choice_that_ends_early_leaves_no_counts(
    device: torch.device, generator: torch.Generator, soon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that chooses may not be compiled yet when the rows are counted."""
    from gossamer._core import launch
    from gossamer.rowsparse._triton.twell import launch_pack_twell

    # On the CPU shared words are fresh for each call.
    words = torch.zeros(4096, dtype=torch.int32, device=device)
    monkeypatch.setattr(launch.counters, "get", lambda *_: words)
    z = (torch.rand(31, 40, device=device, generator=generator) < torch.linspace(0, 1, 40, device=device)).float()
    packed = empty_twell(z, 31, 40, 16, 16)
    launch_pack_twell(z, None, 16, packed)
    before = soon.choose(packed, 16, 40, 40, False, 16)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(soon, "_ffn_hot_choose_kernel", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        soon.choose(packed, 16, 40, 40, False, 16)
    assert all(map(torch.equal, before, soon.choose(packed, 16, 40, 40, False, 16)))


@pytest.mark.gpu
def test_a_call_that_ends_early_leaves_nothing_to_the_next(
    device: torch.device, generator: torch.Generator, soon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both passes end at each of their launches in turn, as they do at a kernel that is not compiled yet. A whole call
    after these has the bits of one before them."""
    from gossamer._core.launch import Kernel
    from gossamer.ffn._triton.sparse_training import sparse_training, sparse_training_bwd

    a, grad = drawn(SHAPE, torch.float32, device, generator, 2.0)
    a["gate_bias"][::4] = torch.linspace(-1.5, 4.0, len(a["gate_bias"][::4]), device=device)
    a["x"][[2, 30]] *= 32
    call = SparseTraining(*operator_arguments(a, SHAPE[2] // 3, SHAPE[0] * SHAPE[2], 256, 16))
    launches, last = [0], [10**9]
    real = Kernel.__call__

    def counted(*args: Any, **options: Any) -> None:
        if launches[0] == last[0]:
            raise KeyboardInterrupt
        launches[0] += 1
        real(*args, **options)

    def both() -> list[torch.Tensor]:
        launches[0] = 0
        found = sparse_training(call)
        kept = found.rows, found.hot, found.hot_values
        given = SparseTrainingBwd(grad, None, *call[:7], found.values, found.columns, *kept, False)
        return [found.out, found.l1, found.nnz, found.fired, *kept[1:], *sparse_training_bwd(given)]

    monkeypatch.setattr(Kernel, "__call__", counted)
    both()
    before = both()
    # The last launch first: no later call clears the words that an earlier one left.
    for last[0] in reversed(range(launches[0])):
        with pytest.raises(KeyboardInterrupt):
            both()
    last[0] = 10**9
    assert launches[0] == 0 and all(map(torch.equal, before, both()))
    assert launches[0] > 15 and int(before[4][0]) == 16


@pytest.mark.parametrize("gated", [True, False])
def test_slots_not_in_use_take_no_part(
    gated: bool, device: torch.device, generator: torch.Generator, soon: Any
) -> None:
    """A neuron without a slot that is nowhere active changes nothing, and has gradients of 0, though its weights and
    rows of x and of the output's gradient are not finite."""
    a, grad = drawn(SHAPE, torch.float32, device, generator, 2.0)
    a["gate_bias"][5:50:5] = 4.0
    a["gate_bias"][0] = -1.0
    a["x"][:, 0] = -a["x"][:, 0].abs() - 0.1
    a["gate"][:, 1] = -1.0
    a["x"][:, 1] = 0.0
    a["gate"][0] = 0.0
    a["gate"][0, 1] = -1.0
    a = taken(a, gated)
    worse = {name: t.clone() for name, t in a.items()}
    worse["gate"][0, 0] = torch.inf
    worse["down"][:, 0] = torch.nan
    if gated:
        worse["up"][0], worse["up_bias"][0] = torch.nan, torch.inf

    def both(operands: dict[str, torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
        ours = leaves(operands)
        found = sparse_training(SparseTraining(*operator_arguments(ours, SHAPE[2], SHAPE[0] * SHAPE[2], 256, 144)))
        hot = found[7]
        assert 8 < int(hot[0]) < 144 and 0 not in hot[2 : 2 + int(hot[0])].tolist()
        return [found[0].detach(), *torch.autograd.grad(found[0], list(ours.values()), grad)]

    for one, other in zip(both(worse, grad), both(a, grad), strict=True):
        assert other.isfinite().all() and torch.equal(one, other)
    # No neuron is active in row 3, where x is not finite.
    worse["x"][3, 1] = torch.inf
    grad[3] = torch.inf
    found = dict(zip(["out", *worse], both(worse, grad), strict=True))
    assert not found["gate"][0].any() and not found["down"][:, 0].any() and not found["gate_bias"][0]
    assert not gated or not (found["up"][0].any() or found["up_bias"][0].any())


@pytest.mark.parametrize("m", [0, 5, 512, 777])
def test_sums_over_rows(m: int, device: torch.device, generator: torch.Generator) -> None:
    rows = torch.randn(m, 3, 40, device=device, generator=generator)[:, 1].bfloat16()
    exact = rows.double().sum(0)
    torch.testing.assert_close(sums_over_rows(rows, torch.float32).double(), exact, rtol=1e-5, atol=1e-4)

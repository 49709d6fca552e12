"""Adaptive numbers of keys in a layer: what their rule knows is the layer's own."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.attention import AdaptiveK, indexer_scores
from gossamer.nn import GatedSparseAttention

SIZES: dict[str, Any] = {"k_base": 24, "k_min": 8, "k_max": 40, "d_indexer": 16}
GIVEN = {
    "variance": AdaptiveK("variance", 8, 24, 40, mean=torch.tensor([0.02])),
    "entropy": AdaptiveK("entropy", 8, 24, 40),
    "learned": AdaptiveK("learned", 8, 24, 40, mean=torch.tensor(0.3), predictor=torch.linspace(-1, 1, 20).view(4, 5)),
}


def layer(adaptive: Any, device: torch.device | str = "cpu", **options: Any) -> GatedSparseAttention:
    torch.manual_seed(0)
    return GatedSparseAttention(64, 4, num_kv_heads=2, adaptive=adaptive, **{**SIZES, **options}).to(device)


def counts(module: GatedSparseAttention, x: Tensor) -> Tensor:
    return module.select(*module.index(x)).to_mask().sum(-1)[:, 0]


@pytest.mark.parametrize("rule", GIVEN)
def test_moves_saves_and_loads(rule: str, device: torch.device) -> None:
    """To another device, to 16 bits and back, through files and copies; a state_dict without it leaves it."""
    module, x = layer(GIVEN[rule], device), torch.randn(2, 100, 64, device=device)
    names = {f"adaptive_k.{name}" for name in ("mean", "predictor") if getattr(GIVEN[rule], name) is not None}
    assert {name for name in module.state_dict() if "adaptive" in name} == names
    assert all(tensor.device == x.device for tensor in module.state_dict().values())
    wanted = counts(module, x)
    assert wanted.unique().numel() > 3
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = layer(rule, device)
    fresh.adaptive = AdaptiveK(rule, 8, 24, 40, 1.0, *(None if t is None else torch.zeros_like(t) for t in (
        GIVEN[rule].mean, GIVEN[rule].predictor)))  # fmt: skip
    fresh.load_state_dict(torch.load(file), strict=True)
    for other in (fresh, copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(counts(other, x), wanted)
    published = layer(None).state_dict()
    before = copy.deepcopy(module.state_dict())
    module.load_state_dict(published, strict=True)
    assert all(torch.equal(module.state_dict()[name], before[name]) for name in names)
    if device.type == "cpu":
        assert torch.equal(counts(copy.deepcopy(module).double(), x.double()), wanted)
    narrow = module.bfloat16()
    known = narrow.adaptive
    assert known is not None and narrow(x.bfloat16()).shape == x.shape
    for name in names:
        assert torch.equal(narrow.state_dict()[name], before[name])
    assert all(tensor.is_meta for tensor in module.to("meta").state_dict().values())


@pytest.mark.parametrize("granularity", [1, 4])
def test_the_usual_variance_is_that_of_scores(granularity: int, device: torch.device) -> None:
    module = layer("variance", device, granularity=granularity)
    x = torch.randn(2, 70, 64, device=device)
    with pytest.raises(ValueError, match=r"has to know the usual variance of scores. Call calibrate\(x\)"):
        module(x)
    module.calibrate(x)
    q, k, w = module.index(x)
    scores = indexer_scores(q, k, w, module.indexer.idx_bias, causal=True).double()
    found = [
        torch.stack([part.max() for part in row[: t + 1].split(granularity)]).var()
        for b, t in torch.cartesian_prod(torch.arange(2), torch.arange(8, 70)).tolist()
        for row in [scores[b, t]]
    ]
    wanted = torch.stack(found).mean()
    torch.testing.assert_close(module.adaptive_k.mean.double(), wanted, rtol=1e-4, atol=0)
    assert counts(module, x)[:, 45:].unique().numel() > 2
    module.train()(x).sum().backward()
    first = module.adaptive_k.mean.clone()
    module.calibrate(2 * x, share=0.25)
    alone = layer("variance", device, granularity=granularity)
    alone.calibrate(2 * x)
    torch.testing.assert_close(module.adaptive_k.mean, 0.75 * first + 0.25 * alone.adaptive_k.mean)
    # Padding has no part, and what a file holds is known.
    padded = torch.cat([x, torch.randn(2, 9, 64, device=device)], 1)
    module.calibrate(padded, torch.tensor([70, 70], device=device))
    torch.testing.assert_close(module.adaptive_k.mean, first)
    other = layer("variance", device, granularity=granularity)
    other.load_state_dict(module.state_dict())
    assert torch.equal(counts(other, x), counts(module, x))


@pytest.mark.parametrize("granularity", [1, 4])
@pytest.mark.parametrize("rule", GIVEN)
def test_numbers_are_those_that_are_selected(rule: str, granularity: int, device: torch.device) -> None:
    module, x = layer(GIVEN[rule], device, granularity=granularity), torch.randn(2, 90, 64, device=device)
    numbers = module.numbers_of_keys(x)[:, 44:]
    units, found = numbers / granularity, counts(module, x)[:, 44:]
    near = (units - units.round()).abs() < 1e-2
    # The last unit may have keys that are not seen.
    short = granularity * units.floor() - found
    assert bool(((short >= 0) & (short < granularity))[~near].all()) and not bool(near.all())


@torch.no_grad()
@pytest.mark.parametrize("rule", GIVEN)
def test_decoding_selects_the_same(rule: str, device: torch.device) -> None:
    module, x = layer(rule, device), torch.randn(2, 60, 64, device=device)
    if rule == "variance":
        module.calibrate(x)
    if rule == "learned":
        module.adaptive_k.predictor[:, 4] = 0.2
    module.eval()
    whole, cache = module(x), module.cache(2, 60)
    for first, last in ((0, 30), *((t, t + 1) for t in range(30, 60))):
        torch.testing.assert_close(module(x[:, first:last], cache=cache), whole[:, first:last], rtol=1e-4, atol=1e-5)


def test_a_network_learns_how_many(device: torch.device) -> None:
    """By regression, to numbers that follow from the scores; the indexer gets no gradient."""
    module, x = layer("learned", device), torch.randn(4, 80, 64, device=device)
    assert bool((counts(module, x)[:, 24:] == 24).all())
    teacher = layer(AdaptiveK("variance", 8, 24, 40, mean=torch.tensor(0.006)), device)
    teacher.load_state_dict({name: t for name, t in module.state_dict().items() if "adaptive" not in name})
    wanted = teacher.numbers_of_keys(x)[:, 8:]
    optimizer = torch.optim.Adam(module.adaptive_k.parameters(), lr=0.02)
    losses = []
    for _ in range(80):
        loss = (module.numbers_of_keys(x)[:, 8:] - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0] and module.indexer.idx_q_proj.weight.grad is None
    assert counts(module, x)[:, 40:].unique().numel() > 2


def test_compiles(device: torch.device, compiled: Any) -> None:
    module, x = layer(GIVEN["learned"], device), torch.randn(1, 50, 64, device=device)
    torch.testing.assert_close(compiled(module)(x), module(x), rtol=1e-4, atol=1e-5)


def test_errors() -> None:
    with pytest.raises(
        TypeError, match=r"adaptive must be an attention.AdaptiveK, the name of a rule or None, got int"
    ):
        layer(3)
    with pytest.raises(ValueError, match="rule must be one of variance, entropy, learned, got 'mean'"):
        layer("mean")
    x = torch.randn(1, 8, 64)
    with pytest.raises(ValueError, match=r'calibrate: adaptive must be the rule "variance".* got .entropy.'):
        layer("entropy").calibrate(x)
    with pytest.raises(ValueError, match=r"x must have a query that sees more than k_min = 8 keys, got .* 8 tokens"):
        layer("variance").calibrate(x)
    with pytest.raises(ValueError, match=r"numbers_of_keys: adaptive must be a rule, got None"):
        layer(None).numbers_of_keys(x)

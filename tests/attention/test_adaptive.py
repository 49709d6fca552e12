"""How many keys a query takes where that is adaptive, against the formulas in float64."""

import pytest
import torch
from torch import Tensor

from gossamer.attention import AdaptiveK, select_topk
from gossamer.attention.levels import LEVELS
from tests.attention.indexer import inputs, visible
from tests.attention.test_select_topk import lengths_of, sorted_first, sorted_units, stored

RULES = [
    AdaptiveK("variance", 5, 20, 40, temperature=0.7, mean=torch.tensor(0.02)),
    AdaptiveK("entropy", 5, 20, 40, temperature=0.9),
    AdaptiveK("learned", 5, 20, 40, mean=torch.tensor([0.3]), predictor=torch.linspace(-1, 1, 20).view(4, 5)),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.rule)
def test_adaptive_k_is_of_each_query_alone(rule: AdaptiveK, device: torch.device) -> None:
    case = (2, 3, 18, 70, 16, True, [70, 40])
    q, k, w, bias = inputs(case, torch.float32, device)
    move = {
        name: None if t is None else t.to(device) for name, t in (("mean", rule.mean), ("predictor", rule.predictor))
    }
    rule = AdaptiveK(rule.rule, rule.k_min, rule.k_base, rule.k_max, rule.temperature, **move)
    found = select_topk(
        q, k, w, bias, k=rule, lengths=lengths_of(case, device), window=2, sinks=1, causal=True
    ).to_mask()
    seen = visible(case).to(device)
    keys = stored(case, q, k, w, bias)
    scores = (keys - 1).double() * (w.double().sigmoid().sum(-1, keepdim=True) / LEVELS)
    exact = adaptive64(rule, scores, seen)
    counts = found.sum(-1)[:, 0]
    wanted = torch.minimum(exact.floor().long(), seen.sum(-1))
    # Next to an integer the two may round apart.
    near = (exact - exact.round()).abs() < 1e-3
    assert torch.equal(counts.where(~near, 0), wanted.where(~near, 0)) and not near.all()
    assert torch.equal(found, sorted_first(keys, seen, counts, 2, 1))
    assert counts.unique().numel() > 3


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.rule)
def test_adaptive_k_of_units(rule: AdaptiveK, device: torch.device) -> None:
    """In units of four keys: the same rule on their scores, with a quarter of its bounds."""
    case = (2, 3, 18, 70, 16, True, [70, 40])
    q, k, w, bias = inputs(case, torch.float32, device)
    mean, predictor = (None if t is None else t.to(device) for t in (rule.mean, rule.predictor))
    asked = AdaptiveK(rule.rule, 8, 20, 40, rule.temperature, mean, predictor)
    found = select_topk(q, k, w, bias, k=asked, lengths=lengths_of(case, device), window=1, granularity=4, causal=True)
    seen, keys = visible(case).to(device), stored(case, q, k, w, bias)

    def units(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, -x.shape[2] % 4)).unflatten(2, (-1, 4)).amax(3)

    scores = (units(keys) - 1).double() * (w.double().sigmoid().sum(-1, keepdim=True) / LEVELS)
    exact = adaptive64(AdaptiveK(rule.rule, 2, 5, 10, rule.temperature, mean, predictor), scores, units(seen))
    near = (exact - exact.round()).abs() < 1e-3
    wanted = sorted_units(keys, seen, 4 * exact.floor().long(), 1)
    assert torch.equal(found.to_mask() & ~near[:, None, :, None], wanted & ~near[:, None, :, None]) and not near.all()


def adaptive64(rule: AdaptiveK, scores: Tensor, seen: Tensor) -> Tensor:
    """The documented formulas in float64, query by query."""
    out = torch.zeros(seen.shape[:2], dtype=torch.float64)
    for i, t in torch.cartesian_prod(torch.arange(seen.shape[0]), torch.arange(seen.shape[1])).tolist():
        s = scores[i, t][seen[i, t]].cpu()
        n = len(s)
        variance = s.var() if n > 1 else torch.zeros((), dtype=torch.float64)
        if rule.rule == "variance":
            assert rule.mean is not None
            k = rule.k_base * (0.5 + 1 / (1 + rule.temperature * variance / rule.mean.cpu().double()))
        elif rule.rule == "entropy":
            p = s.softmax(0)
            k = rule.k_base * (0.5 - rule.temperature * (p * p.log()).sum() / torch.log(torch.tensor(n + 1.0)))
        else:
            assert rule.mean is not None and rule.predictor is not None
            net = rule.predictor.cpu().double()
            hidden = (net[:, :3] @ torch.stack([s.mean(), variance.sqrt(), s.max()]) + net[:, 3]).relu()
            k = rule.k_min + (rule.k_max - rule.k_min) * (net[:, 4] @ hidden + rule.mean.cpu().double()).sigmoid()
        out[i, t] = k.clamp(rule.k_min, rule.k_max)
    return out.to(scores.device)

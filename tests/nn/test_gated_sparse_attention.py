"""Gated sparse attention against its plain reference."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.peers.plain_gated_sparse_attention import PlainGatedSparseAttention
from gossamer import attention
from gossamer.nn import GatedSparseAttention
from gossamer.nn.gated_sparse_attention import RotaryEmbedding
from gossamer.testing import assert_close

NAMES = {
    "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "indexer.idx_q_proj.weight",
    "indexer.idx_k_proj.weight", "indexer.idx_w_proj.weight", "indexer.idx_w_proj.bias", "indexer.idx_bias",
    "value_gate.gate_proj.weight", "value_gate.gate_proj.bias", "output_gate.gate_proj.weight",
    "output_gate.gate_proj.bias", "rotary_emb.inv_freq",
}  # fmt: skip


def pair(dtype: torch.dtype, device: torch.device, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A module and its reference with the same random parameters, gates and biases included."""
    torch.manual_seed(0)
    given = {"k_base": 24, "k_min": 8, "k_max": 40, "d_indexer": 16, **options}
    made = [kind(64, 4, num_kv_heads=2, **given) for kind in (GatedSparseAttention, PlainGatedSparseAttention)]
    for parameter in made[0].parameters():
        nn.init.normal_(parameter, std=0.2)
    made[1].load_state_dict(made[0].state_dict(), strict=True)
    ours, reference = (module.to(device) for module in made)
    return ours.to(dtype), reference.double()


def test_parameters() -> None:
    module = GatedSparseAttention(64, 4)
    assert set(module.state_dict()) == NAMES
    assert "rotary_emb.inv_freq" in dict(module.named_buffers())
    for gate in (module.value_gate, module.output_gate):
        assert bool((gate.gate_proj.bias == 0.5).all()) and 0 < gate.gate_proj.weight.abs().max() < 0.05
    without = GatedSparseAttention(64, 4, value_gate=False, output_gate=False)
    assert set(without.state_dict()) == {name for name in NAMES if "gate" not in name}


@pytest.mark.parametrize("options", [{}, {"value_gate": False}, {"output_gate": False}], ids=str)
@pytest.mark.parametrize("length, dense", [(20, False), (70, True)])
def test_dense(options: dict[str, bool], length: int, dense: bool, device: torch.device) -> None:
    """Where all keys are taken: short sequences, and a warm-up."""
    ours, reference = pair(torch.float32, device, **options)
    ours.dense = reference.dense = dense
    x = torch.randn(2, length, 64, device=device)
    _compare(ours, reference, x)


@pytest.mark.parametrize("scopes", [1, 2])
def test_given_selection(scopes: int, device: torch.device) -> None:
    ours, reference = pair(torch.float32, device)
    mask = torch.rand(2, scopes, 50, 50, device=device) < 0.3
    mask |= torch.eye(50, dtype=torch.bool, device=device)
    selection = attention.Selection.from_mask(mask)
    taken = mask.repeat_interleave(4 // scopes, 1)
    x = torch.randn(2, 50, 64, device=device)
    positions = torch.randint(0, 1000, (2, 50), device=device)
    of_reference = attention.Selection.from_mask(taken)
    for given in (None, positions):
        out = ours(x, position_ids=given, selection=selection)
        wanted = reference(x.double(), position_ids=given, selection=of_reference)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adaptive", [None, "entropy"])
def test_selects(adaptive: str | None, device: torch.device) -> None:
    ours, reference = pair(torch.float32, device, adaptive=adaptive)
    x = torch.randn(2, 100, 64, device=device)
    selection = ours.select(*ours.index(x))
    taken = selection.to_mask()
    counts = taken.sum(-1)
    least, most = (24, 24) if adaptive is None else (8, 40)
    seen = torch.arange(1, 101, device=device)
    assert bool((counts >= seen.clamp(max=least)).all()) and bool((counts <= seen.clamp(max=most)).all())
    if adaptive is None:
        # Scores are stored in steps: keys whose scores are nearly equal may be taken for each other.
        scores = reference.scores(*reference.index(x.double()))
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :24]
        wanted = torch.zeros_like(taken[:, 0]).scatter(2, best, True).tril()
        assert int((wanted & taken[:, 0]).sum()) > 0.99 * int(wanted.sum())
        torch.testing.assert_close(ours(x).double(), reference(x.double()), rtol=0.05, atol=0.05)
    reference.adaptive = None
    wanted = reference(x.double(), selection=selection)
    torch.testing.assert_close(ours(x).double(), wanted, rtol=1e-4, atol=1e-5)


def test_selects_units(device: torch.device) -> None:
    """Of four neighbouring keys; the reference has none, and takes the selection."""
    ours, reference = pair(torch.float32, device, granularity=4)
    x = torch.randn(2, 100, 64, device=device)
    selection = ours.select(*ours.index(x))
    taken = selection.to_mask()[:, 0]
    assert torch.equal(taken[:, 99], taken[:, 99, ::4].repeat_interleave(4, 1)) and bool((taken.sum(-1) <= 24).all())
    assert bool((taken[:, 23::4].sum(-1) == 24).all())
    with pytest.raises(NotImplementedError, match=r"granularity=1 is implemented alone"):
        reference(x.double())
    reference.granularity = 1
    torch.testing.assert_close(ours(x).double(), reference(x.double(), selection=selection), rtol=1e-4, atol=1e-5)


def test_inference_is_as_training(device: torch.device) -> None:
    """Without gradients angles are kept, until they are others."""
    module, _ = pair(torch.float32, device)
    module.dense, rotary = True, module.rotary_emb

    def check(length: int) -> None:
        x = torch.randn(2, length, 64, device=device)
        usual = module(x).detach()
        for context in (torch.inference_mode, torch.no_grad):
            with context():
                torch.testing.assert_close(module(x), usual, rtol=1e-4, atol=1e-4)

    for length in (50, 50, 70, 50):
        check(length)
    with torch.no_grad():
        kept = rotary.of_first(50, torch.ones(1, device=device))[0]
        assert kept is rotary.of_first(50, torch.ones(1, device=device))[0]
        again = copy.deepcopy(module)
        torch.testing.assert_close(
            again(torch.ones(1, 50, 64, device=device)), module(torch.ones(1, 50, 64, device=device))
        )
        assert pickle.loads(pickle.dumps(again)).rotary_emb._first is None
        rotary.inv_freq.mul_(0.5)
    check(50)
    module.load_state_dict({**module.state_dict(), "rotary_emb.inv_freq": rotary.inv_freq * 3})
    check(50)
    rotary.inv_freq = rotary.inv_freq + 1
    check(50)


@pytest.mark.parametrize("dense", [True, False])
def test_padding_without_a_cache(dense: bool, device: torch.device) -> None:
    """Whatever stands behind a sequence, NaN included, its tokens are as they are alone."""
    ours, reference = pair(torch.float32, device)
    ours.dense = reference.dense = dense
    x, lengths = torch.randn(3, 50, 64, device=device), [50, 37, 0]
    for b, length in enumerate(lengths):
        x[b, length:] = torch.nan
    x.requires_grad_()
    given = torch.tensor(lengths, device=device)
    out = ours(x, lengths=given)
    for b, length in enumerate(lengths):
        torch.testing.assert_close(out[b, :length], ours(x[b : b + 1, :length])[0], rtol=1e-4, atol=1e-5)
        assert bool((out[b, length:] == 0).all())
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert bool(grad.isfinite().all()) and bool((grad[1, 37:] == 0).all())
    if dense:
        wanted = reference(x.double(), lengths=given)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"GatedSparseAttention: lengths must have shape \[B\] = \[3\] like x"):
        ours(x, lengths=given[:2])


@pytest.mark.parametrize("granularity, activation", [(1, "sigmoid"), (4, "sigmoid"), (1, "relu")])
def test_straight_through(granularity: int, activation: str, device: torch.device) -> None:
    """The indexer gets the gradient of logits to which its scores are added; the rest, and results, stay the same."""
    module, _ = pair(torch.float32, device, granularity=granularity, indexer_activation=activation)
    x = torch.randn(2, 60, 64, device=device)
    towards = torch.randn(2, 60, 64, device=device)
    names = [name for name, _ in module.named_parameters() if name.startswith("indexer")]
    module(x).backward(towards)
    plain = {name: p.grad for name, p in module.named_parameters()}
    assert all(plain[name] is None for name in names)
    module.zero_grad()
    module.indexer_gradient = "straight_through"
    out = module(x)
    out.backward(towards)
    for name, parameter in module.named_parameters():
        if name not in names:
            torch.testing.assert_close(parameter.grad, plain[name], rtol=1e-5, atol=1e-5)
    # In float64, which runs on the CPU alone.
    wide = copy.deepcopy(module).cpu().double()
    taken = module.select(*module.index(x)).to_mask().cpu()
    q, k, v, gate, (q_idx, k_idx, w) = wide.project(x.cpu().double())
    indexer = (q_idx, k_idx, w, wide.indexer.idx_bias)
    scores = attention.indexer_scores(*indexer, causal=True, activation=activation)[:, None]
    logits = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 16**-0.5
    logits = (logits + (scores - scores.detach()).where(taken, 0)).masked_fill(~taken, -torch.inf)
    wanted = wide.finish(logits.softmax(-1) @ v.repeat_interleave(2, 1), gate)
    grads = torch.autograd.grad(wanted, [wide.get_parameter(name) for name in names], towards.cpu().double())
    for name, grad in zip(names, grads):
        got = module.get_parameter(name).grad
        torch.testing.assert_close(got.cpu().double(), grad, rtol=1e-3, atol=1e-4, msg=name)
    with torch.no_grad():
        assert torch.equal(module(x), module(x))
    short = module(x[:, :20])  # dense: there is no selection to go through
    assert torch.autograd.grad(short.sum(), module.indexer.idx_bias, allow_unused=True)[0] is None


def test_a_relu_selects(device: torch.device) -> None:
    """By the scores of DeepSeek-V3.2's indexer, with a cache and by a mask of pairs, too."""
    module = GatedSparseAttention(64, 4, k_base=24, k_min=8, d_indexer=16, indexer_activation="relu").to(device)
    x = torch.randn(2, 90, 64, device=device)
    q, k, w = module.index(x)
    scores = torch.einsum("bhqd,bkd->bhqk", q, k).relu().mul(0.25).mul(w.mT[..., None]).sum(1)
    seen = torch.ones(90, 90, dtype=torch.bool, device=device).tril()
    kth = scores.masked_fill(~seen, -torch.inf).sort(-1, descending=True).values[..., 23:24]
    taken = module.select(q, k, w).to_mask()[:, 0]
    step = (kth.abs() + w.abs().sum(-1, keepdim=True) / 512) / 256
    assert bool((taken | ~(seen & (scores > kth + step))).all()) and not bool((taken & (scores < kth - step)).any())
    with torch.no_grad():
        whole, cache = module(x), module.cache(2, 90)
        torch.testing.assert_close(module(x[:, :80], cache=cache), whole[:, :80], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(module(x[:, 80:], cache=cache), whole[:, 80:], rtol=1e-4, atol=1e-5)
        by_pairs = module(x, torch.ones(2, 1, 90, 90, dtype=torch.bool, device=device))
        assert float((by_pairs - whole).abs().max()) < 0.1
    with pytest.raises(NotImplementedError, match='adaptive with indexer_activation="relu" is not implemented'):
        module.adaptive = "entropy"


def test_hooks_are_heeded(device: torch.device) -> None:
    ours, _ = pair(torch.float32, device)
    x = torch.randn(1, 20, 64, device=device)
    plain = ours(x)
    seen: list[Tensor] = []
    ours.v_proj.register_forward_hook(lambda module, args, out: seen.append(out))
    torch.testing.assert_close(ours(x), plain)
    assert len(seen) == 1


def _compare(ours: nn.Module, reference: nn.Module, x: Tensor, mask: Tensor | None = None) -> None:
    """Results, and gradients of x and of all parameters that have one."""
    single = PlainGatedSparseAttention.__new__(PlainGatedSparseAttention)
    single.__dict__ = {**ours.__dict__}
    leaf, exact, usual = x.clone().requires_grad_(), x.double().requires_grad_(), x.clone().requires_grad_()
    out, wanted, plain = ours(leaf, mask), reference(exact, mask), single(usual, mask)
    assert_close(out, reference64=wanted, plain=plain)
    towards = torch.randn(out.shape, device=x.device)
    names = [name for name, _ in ours.named_parameters() if not name.startswith("indexer")]
    found = []
    for module, result, start in ((ours, out, leaf), (reference, wanted, exact), (single, plain, usual)):
        leaves = [start, *(module.get_parameter(name) for name in names)]
        found.append(torch.autograd.grad(result, leaves, towards.to(result.dtype)))
    for name, a, b, c in zip(["x", *names], *found):
        assert_close(a, reference64=b, plain=c, name=f"gradient of {name}")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads, and head_dim be even .*, got 3, 4 and 16"),
        ({"head_dim": 7}, "head_dim be even with rotary embeddings, got 4, 4 and 7"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"num_heads": 5}, "num_heads must divide hidden_size where head_dim is None, got 5 and 64"),
        ({"d_indexer": 0}, "d_indexer must be at least 1, got 0"),
        ({"granularity": 2}, "granularity must be 1 or 4, got 2"),
        ({"indexer_activation": "tanh"}, "indexer_activation must be one of 'sigmoid', 'relu', got 'tanh'"),
        ({"indexer_gradient": "kl"}, 'indexer_gradient must be "none" or "straight_through", got \'kl\''),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"nn.GatedSparseAttention: .*{message}"):
        GatedSparseAttention(**{"hidden_size": 64, "num_heads": 4, **change})


def test_frequencies_of_a_module_in_16_bits_are_those_of_a_wide_one(device: torch.device) -> None:
    rotary = RotaryEmbedding(16, 10000.0, device)
    positions = torch.arange(4090, 4096, device=device)
    wide = rotary(positions)
    narrow = copy.deepcopy(rotary).bfloat16()
    for _ in range(2):
        assert all(torch.equal(got, want) for got, want in zip(narrow(positions), wide))
    assert narrow.state_dict().keys() == {"inv_freq"}
    assert all(got.device.type == "meta" for got in narrow.to("meta")(positions.to("meta")))


def test_another_rotary_embedding_may_stand_there(device: torch.device) -> None:
    class Scaled(torch.nn.Module):
        def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
            return usual(positions / 2)  # type: ignore[no-any-return]

    module, _ = pair(torch.float32, device)
    module.dense, usual = True, copy.deepcopy(module.rotary_emb)
    x = torch.randn(1, 20, 64, device=device)
    module.rotary_emb = Scaled()
    with torch.no_grad():
        got = module(x)
        module.rotary_emb = copy.deepcopy(usual)
        module.rotary_emb.inv_freq /= 2
        torch.testing.assert_close(got, module(x))


def test_angles_of_an_inference_tensor_are_not_kept() -> None:
    with torch.inference_mode():
        rotary = RotaryEmbedding(8, 1e4)
        x = torch.ones(1)
        rotary.of_first(4, x)
        rotary.load_state_dict({"inv_freq": torch.ones(4)})
        torch.testing.assert_close(rotary.of_first(4, x), rotary(torch.arange(4)))


def published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict as the article's own code has it: other names in the indexer, no frequencies."""
    names = {"idx_q_proj": "q_proj", "idx_k_proj": "k_proj", "idx_w_proj": "weight_proj", "idx_bias": "bias"}
    found = {}
    for name, tensor in state.items():
        for ours, theirs in names.items():
            name = name.replace(f"indexer.{ours}", f"indexer.{theirs}")
        if name != "rotary_emb.inv_freq":
            found[name] = tensor
    return found


@pytest.mark.parametrize("nested", [False, True])
def test_both_published_layouts_load_strictly(nested: bool) -> None:
    torch.manual_seed(0)
    one, other = (GatedSparseAttention(64, 4, d_indexer=16) for _ in range(2))
    state = published(one.state_dict())
    assert "indexer.weight_proj.bias" in state and "indexer.bias" in state and len(state) == len(NAMES) - 1
    target = nn.Sequential(other) if nested else other
    target.load_state_dict({f"0.{k}": v for k, v in state.items()} if nested else state, strict=True)
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    with pytest.raises(RuntimeError, match=r"indexer\.idx_bias"):
        other.load_state_dict({k: v for k, v in state.items() if k != "indexer.bias"}, strict=True)
    with pytest.raises(RuntimeError, match="topk_selector"):
        other.load_state_dict({**state, "topk_selector.k_predictor.0.bias": torch.zeros(32)}, strict=True)


def test_a_published_network_of_the_learned_rule_loads(device: torch.device) -> None:
    """As the article's code computes it: sigmoid(Linear(relu(Linear([mean, std, max]))))."""
    torch.manual_seed(0)
    sizes = {"k_base": 16, "k_min": 4, "k_max": 64, "d_indexer": 16}
    module = GatedSparseAttention(64, 4, adaptive="learned", **sizes).to(device)
    network = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
    rest = {k: v for k, v in module.state_dict().items() if not k.startswith("adaptive_k")}
    added = {f"topk_selector.k_predictor.{k}": v for k, v in network.state_dict().items()}
    module.load_state_dict({**published(rest), **added}, strict=True)
    x = torch.randn(2, 90, 64, device=device)
    numbers = module.numbers_of_keys(x)
    scores = attention.indexer_scores(*module.index(x), module.indexer.idx_bias, causal=True).double()
    for query in (30, 89):
        row = scores[0, query, : query + 1]
        wanted = 4 + 60 * network.double()(torch.stack([row.mean(), row.std(), row.max()]).cpu()).item()
        assert abs(numbers[0, query].item() - wanted) < 0.05


def test_published_arguments() -> None:
    """GSA Triton's order, and its k_base for sequences shorter than that."""
    module = GatedSparseAttention(64, 4, 96, 32, 2, 80, 16)
    found = (module.k_max, module.indexer.head_dim, module.indexer.num_heads, module.k_base, module.k_min)
    assert found == (96, 32, 2, 80, 16)
    with pytest.warns(UserWarning, match="ascend, got 256, 2048, 512: a query takes k_base = 512 keys"):
        assert GatedSparseAttention(64, 4, k_max=512).k_base == 512
    with pytest.warns(UserWarning, match="k_base = 100 keys, or at least k_min = 100"):
        assert GatedSparseAttention(64, 4, k_base=100).k_min == 100


KINDS = {
    "bool": lambda m: m,
    "whole": lambda m: m.long(),
    "added": lambda m: torch.zeros(m.shape, device=m.device).masked_fill(~m, torch.finfo(torch.float32).min),
    "infinite": lambda m: torch.zeros(m.shape, device=m.device, dtype=torch.float16).masked_fill(~m, -torch.inf),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [20, 70])
def test_padding_anywhere(kind: str, length: int, device: torch.device) -> None:
    """Tokens among padding that holds NaN are as tokens alone; a mask of ones changes nothing."""
    ours, _ = pair(torch.float32, device)
    x = torch.randn(2, length, 64, device=device)
    mask = torch.rand(2, length, device=device) < 0.7
    mask[0, :5] = False
    places = torch.arange(length, device=device)
    out = ours(x.masked_fill(~mask[..., None], torch.nan), KINDS[kind](mask))
    for b in range(2):
        alone = ours(x[b : b + 1, mask[b]], position_ids=places[mask[b]])
        torch.testing.assert_close(out[b, mask[b]], alone[0], rtol=1e-4, atol=1e-5)
        assert bool((out[b, ~mask[b]] == 0).all())
    everything = KINDS[kind](torch.ones_like(mask))
    torch.testing.assert_close(ours(x, everything), ours(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length, batch", [(20, 1), (70, 2)])
def test_a_mask_of_pairs(kind: str, length: int, batch: int, device: torch.device) -> None:
    ours, reference = pair(torch.float32, device)
    x = torch.randn(2, length, 64, device=device)
    mask = torch.rand(batch, 1, length, length, device=device) < 0.6
    mask[:, :, 7] = False
    _compare(ours, reference, x, KINDS[kind](mask))


def test_errors_of_a_call(device: torch.device) -> None:
    module = GatedSparseAttention(64, 4, k_base=8, k_min=4, k_max=16, d_indexer=16).to(device)
    x = torch.randn(2, 10, 64, device=device)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[B, T\] .* got \[10\]"):
        module(x, torch.arange(10, device=device))
    with pytest.raises(ValueError, match=r"attention_mask must have shape .* got \[2, 4, 10, 10\]"):
        module(x, torch.ones(2, 4, 10, 10, device=device))
    with pytest.raises(TypeError, match="position_ids"):
        module(x, position_ids=torch.ones(2, 10, dtype=torch.bool, device=device))
    with pytest.raises(TypeError, match="position_ids"):
        module(x, position_ids=torch.ones(2, 10, device=device))
    with pytest.raises(ValueError, match=r"position_ids must have shape \[T\] or \[B, T\] .* got \[2, 9\]"):
        module(x, position_ids=torch.ones(2, 9, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="attention_mask must be None with a cache, lengths or a selection"):
        module(x, torch.ones(2, 10, device=device), lengths=torch.tensor([3, 4], device=device))
    with torch.no_grad(), pytest.raises(ValueError, match="cache must be of B = 2 sequences like x, got 3"):
        module(x, cache=module.cache(3, 20))


@pytest.mark.parametrize("tokens", [1, 40, 90])
def test_merged_projections(tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results stay, no weight is copied in inference, gradients are those of the layers, and a conversion undoes it."""
    module = GatedSparseAttention(64, 4, num_kv_heads=2, k_base=8, k_min=4, k_max=16, d_indexer=16).to(device)
    x = torch.randn(1, tokens, 64, device=device)
    wanted = module(x)
    gradients = torch.autograd.grad(wanted.sum(), [module.k_proj.weight, module.value_gate.gate_proj.weight])
    module.merge_projections()
    torch.testing.assert_close(module(x), wanted)
    again = torch.autograd.grad(module(x).sum(), [module.k_proj.weight, module.value_gate.gate_proj.weight])
    torch.testing.assert_close(again, gradients)
    joined = torch.cat
    with torch.no_grad():
        with monkeypatch.context() as patch:
            copied: list[Any] = []
            patch.setattr(torch, "cat", lambda parts, *dim: copied.append(parts) or joined(parts, *dim))
            torch.testing.assert_close(module(x), wanted)
            assert not any(part is module.q_proj.weight for parts in copied for part in parts)
        module.v_proj.weight.mul_(2)
        changed = module(x)
        assert not torch.equal(changed, wanted)
        other = GatedSparseAttention(64, 4, num_kv_heads=2, k_base=8, k_min=4, k_max=16, d_indexer=16).to(device)
        other.load_state_dict(module.state_dict())
        torch.testing.assert_close(other(x), changed)
        torch.testing.assert_close(module.double().float()(x), changed)
    module.v_proj.half()
    with pytest.raises(TypeError, match=r"merge_projections: layers must have one dtype, got float16, float32\. "):
        module.merge_projections()
    assert module.v_proj.weight.dtype is torch.float16
    module.q_proj = torch.nn.Sequential(module.q_proj)
    with pytest.raises(TypeError, match=r"merge_projections: layers must be plain nn\.Linear, but q_proj is"):
        module.merge_projections()


def test_frequencies_of_a_file_in_16_bits_are_not_taken(device: torch.device) -> None:
    """At large positions they would be other angles."""
    rotary, positions = RotaryEmbedding(16, 10000.0, device), torch.arange(4090, 4096, device=device)
    wide = rotary(positions)
    for assign in (False, True):
        rotary.load_state_dict({"inv_freq": rotary.inv_freq.bfloat16()}, assign=assign)
        assert all(torch.equal(got, want) for got, want in zip(rotary(positions), wide))

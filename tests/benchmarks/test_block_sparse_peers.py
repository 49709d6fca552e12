"""What stands beside block-sparse operators says what it does, and is offered where it runs."""

import sys
from types import ModuleType

import pytest
import torch

from benchmarks.blocksparse import bench_attention, bench_scatter_reduce, bench_softmax, bench_transformer
from benchmarks.peers import block_sparse


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if blksprs were: nothing of it is called."""
    for module in (block_sparse, bench_attention):
        monkeypatch.setattr(module, "find_spec", lambda name: name == "blksprs")
    names = {"ops": (), "ops.conversion": ("to_dense", "to_sparse")}
    names["ops.flash_attention"] = ("flash_attention", "flash_attention_build_layout_cache")
    for name in ("blksprs", *(f"blksprs.{part}" for part in names)):
        made = ModuleType(name)
        for function in names.get(name.removeprefix("blksprs."), ()):
            setattr(made, function, None)
        monkeypatch.setitem(sys.modules, name, made)


def test_a_softmax_that_computes_in_float32_says_so() -> None:
    for dtype, name in ((torch.float32, "blksprs"), (torch.bfloat16, "blksprs, float32")):
        case = bench_softmax.softmax_case(1024, 64, 50, dtype, False)
        assert [p.name for p in case.providers if "blksprs" in p.name] == [name]


def test_a_scatter_of_16_bits_has_a_peer_in_float32() -> None:
    cases = list(bench_scatter_reduce.cases(torch.device("cuda"), False))
    names = {(c.dtype, c.parameters["reduce"]): [p.name for p in c.providers if "blksprs" in p.name] for c in cases}
    assert names == {
        (torch.float32, "sum"): ["blksprs, in no fixed order"],
        (torch.bfloat16, "sum"): ["blksprs, float32, in no fixed order"],
        (torch.bfloat16, "amax"): [],
    }


def test_flash_attention_is_named_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    case = bench_attention.attention_case(8192, 16, 128, 128, 50, torch.bfloat16, True)
    flash = next(p for p in case.providers if p.name == "FlexAttention, FLASH")
    with pytest.raises(ModuleNotFoundError, match="flash_attn"):
        flash.prepare(*[None] * 5)


@pytest.mark.parametrize("d", [64, 128])
def test_flex_attention_has_a_backward_pass_for_blocks_of_64(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's lowering asks: its own tiles for others, and one that divides these."""
    choices = pytest.importorskip("torch._inductor.choices").InductorChoices
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(choices, "get_flex_attention_bwd_configs", choices.get_flex_attention_bwd_configs)
    own = choices().get_flex_attention_bwd_configs(d, torch.bfloat16)
    bench_attention.fit_backward_tiles()
    for block in (128, 64):
        monkeypatch.setattr(bench_attention, "_compiling_for", [block])
        found = choices().get_flex_attention_bwd_configs(d, torch.bfloat16, "cuda")
        assert found == own if block == 128 else len(found) == 1
        assert all(block % size == 0 for c in found for size in (c.block_m1, c.block_n1, c.block_m2, c.block_n2))


def test_recomputed_layers_have_the_same_gradients() -> None:
    """The reference of a transformer holds the scores of one layer at a time."""
    case = next(iter(bench_transformer.cases(torch.device("cpu"), True)))
    inputs = case.make(torch.device("cpu"), torch.Generator().manual_seed(0))[0]
    want = case.reference(*inputs)
    for provider in case.providers:
        out = provider.call(*inputs)
        assert case.error(provider.result(out, *inputs) if provider.result else out, want) < 1e-5


@pytest.mark.parametrize("block, d, offered", [(64, 64, True), (64, 128, True), (128, 128, False), (128, 64, False)])
def test_attention_has_no_blocks_of_128(block: int, d: int, offered: bool) -> None:
    case = bench_attention.attention_case(8192, 16, d, block, 50, torch.bfloat16, False)
    assert ("blksprs" in [p.name for p in case.providers]) == offered

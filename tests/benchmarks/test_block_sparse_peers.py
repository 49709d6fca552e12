"""What stands beside block-sparse operators says what it does, and is offered where it runs."""

import sys
from types import ModuleType

import pytest
import torch

from benchmarks.blocksparse import bench_attention, bench_softmax
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


@pytest.mark.parametrize("block, d, offered", [(64, 64, True), (64, 128, True), (128, 128, False), (128, 64, False)])
def test_attention_has_no_blocks_of_128(block: int, d: int, offered: bool) -> None:
    case = bench_attention.attention_case(8192, 16, d, block, 50, torch.bfloat16, False)
    assert ("blksprs" in [p.name for p in case.providers]) == offered

"""The kernels with NVIDIA's own instructions, which the examples leave to the other GPUs' sake, compile as well."""

import pytest
import torch

pytest.importorskip("triton")

from gossamer.attention._gluon import select_topk as hopper
from gossamer.attention._triton import (
    candidates,
    indexer_loss,
    indexer_scores,
    key_lists,
    select_topk,
    sparse_decode,
    threshold,
)
from gossamer.attention._triton._products import stages_of
from tests import aot

pytestmark = pytest.mark.native

EXAMPLES = {**indexer_scores.EXAMPLES, **select_topk.EXAMPLES, **threshold.EXAMPLES}
KERNELS = {kernel.fn.__name__: kernel for kernel, example in EXAMPLES.items() if {"ACTIVATION", "PACKED"} & {*example}}


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_with_instructions_of_nvidia(name: str, forced: bool, target: str, unit: int) -> None:
    kernel = KERNELS[name]
    example = EXAMPLES[kernel]
    if unit > 1 and "UNIT" not in example:
        pytest.skip("knows no units")
    given = {"ACTIVATION": "tanh", "PACKED": True, "FORCED": forced}
    own = {flag: value for flag, value in given.items() if flag in example}
    own |= {"UNIT": unit} if "UNIT" in example else {}
    if forced and "FORCED" not in own:
        pytest.skip("keeps nothing")
    compiled = aot.compile_kernel(kernel, aot.complete(kernel, example | own), target)
    assert compiled.metadata.shared <= aot.SHARED_MEMORY_LIMIT[target]
    text = compiled.asm["ptx"]
    assert ("tanh.approx.f32" in text) == ("ACTIVATION" in own) and ("set.ge.u32.f16x2" in text) == ("PACKED" in own)
    if target == "sm_90":
        used = aot.resources(compiled)
        assert used["LOCAL"] == used["STACK"] == 0, f"spills: {used}"


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize(
    "heads, d, dtype", [(64, 256, "bf16"), (16, 1024, "bf16"), (16, 128, "fp32"), (9, 100, "fp32")]
)
def test_heads_as_rows_at_their_limits(
    heads: int, d: int, dtype: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4" if target == "gfx942" else None)
    kernel, x = select_topk._index_keys_of_few_kernel, torch.empty(0, d, dtype=getattr(torch, _NAMES[dtype]))
    own = {"HEADS": heads, "D": d, "num_stages": stages_of(3, x)}
    example = aot.complete(kernel, select_topk.EXAMPLES[kernel] | own)
    signature = {name: f"*{dtype}" if of == "*bf16" else of for name, of in example["signature"].items()}
    compiled = aot.compile_kernel(kernel, {**example, "signature": signature}, target)
    assert compiled.metadata.shared <= aot.SHARED_MEMORY_LIMIT[target]
    if target == "sm_90":
        used = aot.resources(compiled)
        assert used["LOCAL"] == 0 and used["STACK"] <= 16, f"spills: {used}"


_NAMES = {"bf16": "bfloat16", "fp32": "float32"}


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", [name for name in KERNELS if "scores" in name or name == "_index_keys_kernel"])
def test_float32_without_tensor_cores_stays_in_registers(name: str, d: int) -> None:
    kernel = KERNELS[name]
    own = {"D": d, **(indexer_scores.backward_tile(d, 4) if "bwd" in name else {})}
    example = aot.complete(kernel, EXAMPLES[kernel] | own)
    signature = {name: "*fp32" if of == "*bf16" else of for name, of in example["signature"].items()}
    used = aot.resources(aot.compile_kernel(kernel, {**example, "signature": signature}, "sm_90"))
    assert used["LOCAL"] == 0 and used["STACK"] <= 64, f"spills: {used}"


@pytest.mark.parametrize("name", ["decode", "rows", "keys"])
@pytest.mark.parametrize("d, v, dtype", [(128, 128, "float32"), (576, 512, "float32"), (576, 512, "bfloat16")])
def test_rows_fit_amd(name: str, d: int, v: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the shared memory of gfx942, of either width of elements."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    x, wide = torch.empty(0, dtype=getattr(torch, dtype)), max(d, v) > 256
    if name == "decode":
        kernel = sparse_decode._sparse_decode_parts_kernel
        chunk, most = (64, 512) if x.element_size() == 2 else (32, 256)
        config = sparse_decode.Config(16, 16, 1, 16, 1, d, v, min(v, most), chunk if wide else 0, 0, True)
        own = {"CONFIG": config, "num_warps": 8 if wide else 4, "num_stages": stages_of(1 if wide else 2, x)}
        own = sparse_decode.EXAMPLES[kernel] | own
    else:
        kernel = getattr(indexer_loss, f"_indexer_{name}_kernel")
        chunk = 32 if wide or dtype == "float32" else 128
        own = {"SIZES": indexer_loss.Sizes(d, v, chunk, 1, 4, 64, "relu"), "num_stages": stages_of(3, x)}
        own = indexer_loss.EXAMPLES[kernel] | own
    example = aot.complete(kernel, own)
    kind = {"float32": "*fp32", "bfloat16": "*bf16"}[dtype]
    signature = {name: kind if of == "*bf16" else of for name, of in example["signature"].items()}
    compiled = aot.compile_kernel(kernel, {**example, "signature": signature}, "gfx942")
    assert compiled.metadata.shared <= aot.SHARED_MEMORY_LIMIT["gfx942"]


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("parts", [1, 2, indexer_loss.PARTS.value])
def test_lists_of_every_width(parts: int, causal: bool, target: str) -> None:
    """Attention lists the keys of one or two words of queries, the indexer's loss those of more."""
    ((kernel, example),) = key_lists.EXAMPLES.items()
    own = {"PARTS": parts, "CAUSAL": causal, "BLOCK": key_lists.keys_of_tile(parts)}
    compiled = aot.compile_kernel(kernel, aot.complete(kernel, example | own), target)
    assert compiled.metadata.shared <= aot.SHARED_MEMORY_LIMIT[target]
    used = aot.resources(compiled)
    assert used["LOCAL"] == used["STACK"] == 0, f"spills: {used}"


@pytest.mark.parametrize("heads, d, dtype", [(2, 64, "bf16"), (8, 64, "fp16"), (4, 128, "bf16")])
@pytest.mark.parametrize("bias, lengths, relu", [(None, "*i32", True), ("*fp32", None, True), ("*fp32", None, False)])
def test_every_shape_that_hopper_scores(
    heads: int, d: int, dtype: str, bias: str | None, lengths: str | None, relu: bool
) -> None:
    ((kernel, example),) = hopper.EXAMPLES.items()
    kinds = {
        "q_desc": f"tensordesc<{dtype}[1, 1, {hopper.ROWS}, {d}],{hopper.LAYOUTS[4]!r}>",
        "k_desc": f"tensordesc<{dtype}[1, {hopper.COLUMNS}, {d}],{hopper.LAYOUTS[3]!r}>",
    }
    given = (
        example | kinds | {"bias_ptr": bias, "lengths_ptr": lengths, "w_ptr": f"*{dtype}", "HEADS": heads, "RELU": relu}
    )
    compiled = aot.compile_kernel(kernel, aot.complete(kernel, given), "sm_90")
    assert compiled.metadata.shared <= aot.SHARED_MEMORY_LIMIT["sm_90"]
    used = aot.resources(compiled)
    assert used["LOCAL"] == used["STACK"] == 0, f"spills: {used}"


@pytest.mark.parametrize("lists, relu", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("flags, unit", [(None, 1), ("*i32", 1), (None, candidates.STRETCH)])
def test_what_hopper_scores_for(lists: bool, relu: bool, flags: str | None, unit: int) -> None:
    """All keys, those of marked blocks, one of each stretch, and lists."""
    ((kernel, example),) = hopper.EXAMPLES.items()
    own = (
        {"flags_ptr": flags}
        if lists
        else {"keys_ptr": "*i16", "bound_ptr": None, "counts_ptr": None, "flags_ptr": flags}
    )
    used = aot.resources(
        aot.compile_kernel(kernel, aot.complete(kernel, example | own | {"UNIT": unit, "RELU": relu}), "sm_90")
    )
    # Three programs share a multiprocessor.
    assert used["LOCAL"] == used["STACK"] == 0 and used["REG"] <= 168

"""Python functions that a call of a patched module runs: host time is most of a step of decoding, where each function's
code has left the caches since the layer before."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gossamer._core.operator import forget


def functions(call: Callable[[], Any], warm_up: int = 40, kind: str = "call") -> int:
    """The number of Python functions that a call runs after so many others, or with "c_call" of C functions: a tracker
    knows its density by then."""
    count = 0

    def listen(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event == kind

    with torch.no_grad():
        for _ in range(warm_up):
            call()
        before = sys.getprofile()
        sys.setprofile(listen)
        try:
            call()
        finally:
            sys.setprofile(before)
    return count


CASES = [("silu", False), ("silu", True), ("relu", True), ("opt", True), ("t5", False)]


@pytest.mark.native
@pytest.mark.parametrize("kind, sparse", CASES)
def test_a_patched_block_runs_few_functions_more(kind: str, sparse: bool) -> None:
    transformers = pytest.importorskip("transformers")
    from gossamer.integrations.transformers import patch

    if kind == "opt":
        sizes = {"hidden_size": 16, "ffn_dim": 32, "num_attention_heads": 2, "word_embed_proj_dim": 16, "vocab_size": 9}
        plain = transformers.OPTModel(transformers.OPTConfig(**sizes, num_hidden_layers=1)).decoder.layers[0].eval()
    elif kind == "t5":
        config = transformers.T5Config(d_model=16, d_ff=32, feed_forward_proj="gated-gelu")
        plain = transformers.models.t5.modeling_t5.T5DenseGatedActDense(config).eval()
    else:
        config = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, hidden_act=kind, num_attention_heads=2)
        plain = transformers.models.llama.modeling_llama.LlamaMLP(config)
    patched, x = copy.deepcopy(plain), torch.randn(1, 3, 16)
    if kind == "relu":
        for block in (plain, patched):
            nn.init.constant_(block.gate_proj.weight, 0.1)  # half of the rows let all neurons through
    patch(patched, sparse=sparse)
    # That of `patch`, two that look for the path, and for blocks in layers no other.
    assert functions(lambda: patched(x)) <= functions(lambda: plain(x)) + 3
    assert functions(lambda: patched(x), kind="c_call") <= functions(lambda: plain(x), kind="c_call") + 4


@pytest.mark.native
@pytest.mark.parametrize("rows, calls", [(1, 1), (512, 1), (513, 8)])
def test_few_rows_are_seldom_counted(rows: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that counts takes the host as long as several others; few rows wait for it."""
    from gossamer import nn as gossamer_nn

    block = gossamer_nn.MLP(16, 32, activation="relu", method="auto")
    nn.init.constant_(block.up_proj.weight, 0.1)
    counted, record = [], block.density.record
    monkeypatch.setattr(block.density, "record", lambda *given, **named: counted.append(record(*given, **named)))
    with torch.no_grad():
        for _ in range(40):
            block(torch.ones(rows, 16))
        assert block.last_path == "dense" and block.density.settled
        counted.clear()
        for _ in range(256):
            block(torch.ones(rows, 16))
    assert len(counted) == calls


@pytest.mark.native
@pytest.mark.parametrize("kind", ["silu", "relu"])
def test_a_block_that_is_moved_settles_anew(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    from gossamer.integrations.transformers import patch
    from gossamer.nn.plain import KEPT

    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, hidden_act=kind, num_attention_heads=2)
    patched = transformers.models.llama.modeling_llama.LlamaMLP(config)
    nn.init.constant_(patched.gate_proj.weight, 0.1)
    patch(patched, sparse=True)
    with torch.no_grad():
        for _ in range(40):
            patched(torch.ones(3, 16))
        known = patched.sparse_block if kind == "relu" else patched.__dict__[KEPT]
        assert known.settled(torch.ones(3, 16)) == "dense"
        patched.double()
        assert not patched.sparse_block.density.settled if kind == "relu" else KEPT not in patched.__dict__
        assert patched(torch.ones(3, 16, dtype=torch.float64)).dtype is torch.float64


@pytest.mark.gpu
@pytest.mark.parametrize("k, n, sparse", [(2048, 5632, False), (4096, 14336, True)])
def test_a_repeated_call_reads_the_block_as_it_is(
    k: int, n: int, sparse: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows repeat their launches, or are left to the class: other weights, a hook and another device are seen."""
    transformers = pytest.importorskip("transformers")
    from gossamer.integrations.transformers import patch

    options = {"hidden_act": "relu" if sparse else "silu", "mlp_bias": True, "num_attention_heads": 16}
    config = transformers.LlamaConfig(hidden_size=k, intermediate_size=n, **options)
    plain: Any = transformers.models.llama.modeling_llama.LlamaMLP(config).to(device, torch.bfloat16)
    if sparse:
        nn.init.constant_(plain.gate_proj.bias, -1.5)  # z has a deviation of 0.6
    patched = copy.deepcopy(plain)
    patch(patched, sparse=sparse)

    def same(x: torch.Tensor) -> None:
        want, got = plain(x), patched(x)
        assert got.shape == want.shape and float((got - want).norm() / want.norm().clamp(min=1e-30)) < 2e-2

    with torch.no_grad():
        for shape in ((1, 1, k), (3, k), (2, 8, k)):
            for _ in range(41):
                same(torch.randn(shape, device=device, dtype=torch.bfloat16))
        x = torch.randn(1, 1, k, device=device, dtype=torch.bfloat16)
        # The fixture that poisons new memory runs 11 functions for each tensor, and recordings have its allocators.
        monkeypatch.undo()
        forget()
        assert functions(lambda: patched(x)) <= functions(lambda: plain(x)) + 3 * (not sparse)
        assert not sparse or patched.sparse_block.last_path == "gather"
        for own, other in zip(plain.parameters(), patched.parameters()):
            own.data = own.data.flip(0)
            other.data = own.data.clone()
        same(x)
        handle = patched.down_proj.register_forward_hook(lambda module, given, out: 0 * out)
        assert not patched(x).any()
        handle.remove()
        same(x)
        for block in (plain, patched):
            block.act_fn = nn.GELU()
        same(x)
        patched.down_proj.weight.data = patched.down_proj.weight.data.cpu()
        # The class's own forward has PyTorch's error.
        with pytest.raises((ValueError, RuntimeError), match=r"down_weight must be on cuda|on the same device"):
            patched(x)


@pytest.mark.native
@pytest.mark.parametrize("kind", ["Standard", "JumpReLU", "TopK", "Gated"])
def test_a_patched_small_sae_runs_few_functions_more(kind: str) -> None:
    sae_lens = pytest.importorskip("sae_lens")
    from gossamer.integrations.sae_lens import patch

    options = {"k": 4} if kind == "TopK" else {}
    plain = getattr(sae_lens, f"{kind}SAE")(getattr(sae_lens, f"{kind}SAEConfig")(d_in=8, d_sae=32, **options))
    patched, x = copy.deepcopy(plain), torch.randn(3, 8)
    report = patch(patched)
    assert functions(lambda: patched(x)) <= functions(lambda: plain(x)) + 3
    # Nothing of that is kept where the result would be another.
    with torch.no_grad():
        assert torch.equal(patched(x), plain(x))
        for sae in (plain, patched):
            sae.hook_sae_acts_post.register_forward_hook(lambda module, given, out: 2 * out)
        assert torch.equal(patched(x), plain(x))
        assert torch.equal(copy.deepcopy(patched)(x), plain(x))
        report.density.pinned = "sparse"
        patched(x)
        report.density.pinned = None
        patched.decode = lambda acts: acts
        assert patched(x).shape == (3, 32)
        del patched.decode
        for sae in (plain, patched):
            sae._use_error_term = True
        assert torch.equal(patched(x), plain(x))

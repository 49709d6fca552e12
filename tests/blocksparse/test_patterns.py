"""Patterns against their definition, element by element."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer import blocksparse
from gossamer.blocksparse import Layout, patterns
from tests.graphs import follows

SIZES = [((64, 64), (16, 16)), ((50, 90), (16, 32)), ((90, 50), (32, 16)), ((1, 200), (64, 16)), ((33, 33), (16, 16))]


def blocks_of(elements: Tensor, block: tuple[int, int]) -> Tensor:
    return Layout.from_dense(elements, block).to_dense()


def apart(size: tuple[int, int]) -> Tensor:
    """How far each query stands behind each key."""
    return torch.arange(size[0])[:, None] + (size[1] - size[0]) - torch.arange(size[1])


@pytest.mark.parametrize("size, block", SIZES, ids=str)
def test_causal(size: tuple[int, int], block: tuple[int, int], device: torch.device) -> None:
    layout = blocksparse.causal(size, block, device=device)
    assert torch.equal(layout.to_dense().cpu(), blocks_of(apart(size) >= 0, block)) and layout.size == size


@pytest.mark.parametrize("window", [(0, 0), (20, 0), (5, 40), (1000, 1000)], ids=str)
@pytest.mark.parametrize("dilation", [1, 3, 48, 70])
@pytest.mark.parametrize("size, block", SIZES, ids=str)
def test_sliding_window(size, block, dilation: int, window: tuple[int, int], device: torch.device) -> None:
    layout = blocksparse.sliding_window(size, block, window, dilation=dilation, device=device)
    by = apart(size)
    elements = (by >= -window[1]) & (by <= window[0]) & (by % dilation == 0)
    assert torch.equal(layout.to_dense().cpu(), blocks_of(elements, block))


@pytest.mark.parametrize("size, block", SIZES, ids=str)
def test_global_tokens(size: tuple[int, int], block: tuple[int, int], device: torch.device) -> None:
    m, n = size
    for tokens in (0, 1, torch.tensor([[3, 40], [-1, -1]], device=device)):
        layout = blocksparse.global_tokens(size, block, tokens, device=device)
        chosen = (tokens if isinstance(tokens, Tensor) else torch.arange(tokens)[None]).cpu()
        elements = torch.zeros(len(chosen), m, n, dtype=torch.bool)
        for matrix, found in zip(elements, chosen.tolist()):
            for key in found:
                if 0 <= key < n:
                    matrix[:, key] = True
                if 0 <= key - (n - m) < m and key >= 0:
                    matrix[key - (n - m)] = True
        expected = blocks_of(elements, block)
        assert torch.equal(layout.to_dense().cpu().view_as(expected), expected)


def test_lengths(device: torch.device) -> None:
    lengths = torch.tensor([64, 17, 0], device=device)
    layout = blocksparse.causal((64, 64), 16, lengths=lengths)
    held = torch.arange(64) < lengths.cpu()[:, None]
    elements = (apart((64, 64)) >= 0) & held[:, :, None] & held[:, None, :]
    assert torch.equal(layout.to_dense().cpu(), blocks_of(elements, (16, 16)))
    assert layout.shape == (3, 4, 4)


PATTERNS = {
    "causal": lambda size, block, **given: blocksparse.causal(size, block, **given),
    "window": lambda size, block, **given: blocksparse.sliding_window(size, block, (40, 3), **given),
    "dilated": lambda size, block, **given: blocksparse.sliding_window(size, block, (200, 0), dilation=48, **given),
    "global": lambda size, block, **given: blocksparse.global_tokens(size, block, 17, **given),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("size, block", [*SIZES, ((0, 40), (16, 16)), ((40, 0), (16, 16))], ids=str)
def test_the_host_counts_the_blocks(
    size, block, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capacity is the number of blocks, and nothing asks the device: the host counts on a copy of its own, once."""

    def asked(tensor: Tensor, *_):
        raise AssertionError("the device was asked")

    assert PATTERNS[name](size, block, device="cpu").device.type == "cpu"
    with monkeypatch.context() as patch:
        for question in ("__int__", "__bool__", "item", "tolist"):
            patch.setattr(Tensor, question, asked)
        layout = PATTERNS[name](size, block, device=device)
    count = int(layout.to_dense().sum())
    assert layout.capacity == max(count, 1) and layout.filled == (count > 0) and not layout.overflowed


@pytest.mark.parametrize("name", PATTERNS)
def test_tensors_without_numbers(name: str) -> None:
    """Fake tensors and a trace have no number to count by."""
    size, block = (96, 160), (32, 32)
    known = PATTERNS[name](size, block)
    patterns._count.cache_clear()
    with FakeTensorMode():
        fake = PATTERNS[name](size, block)
    assert (fake.capacity, fake.filled) == (known.capacity, known.filled)
    patterns._count.cache_clear()
    traced = make_fx(lambda x: x + PATTERNS[name](size, block).to_dense(), tracing_mode="symbolic")(torch.zeros(3, 5))
    assert torch.equal(traced(torch.ones(3, 5)), 1.0 + known.to_dense())


class _NoTensor(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"the count of blocks calls {func}")


@pytest.mark.parametrize(
    "name, numbers, expected",
    [
        ("_near", (1 << 18, 0, 1), (33_558_528, 8192)),
        ("_near", (31, 0, 1), (3 * 8192 - 3, 2 * 8192 - 2)),
        ("_of_tokens", (17,), (4 * 8192 - 4, 2 * 8192 - 3)),
    ],
)
def test_blocks_of_long_sequences_are_counted_without_tensors(name: str, numbers, expected) -> None:
    """67 million blocks, as tensors of which a count would take gigabytes and seconds."""
    with _NoTensor():
        assert patterns._counted(name, (1 << 17, 1 << 17), (16, 16), numbers) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", PATTERNS)
def test_capture(name: str) -> None:
    """With the capacity that the host has counted; with lengths one is to be given."""
    size, block, lengths = (50, 90), (16, 32), torch.tensor([60, 30], device="cuda")
    given = [{"device": "cuda"}, {"lengths": lengths, "capacity": 24}]
    follows(lambda: [PATTERNS[name](size, block, **options).to_dense() for options in given], lengths)


@pytest.mark.native
@pytest.mark.parametrize("name", PATTERNS)
def test_compile(name: str, compiled, device: torch.device) -> None:
    def call(x: Tensor) -> Tensor:
        layout = PATTERNS[name]((50, 90), (16, 32), device=x.device)
        return blocksparse.from_dense(x, layout).to_dense()

    x = torch.randn(50, 90, device=device)
    assert torch.equal(compiled(call)(x), call(x))


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"blocksparse.global_tokens: tokens must be an int or a tensor of positions"):
        blocksparse.global_tokens((32, 32), 16, 1.5)
    with pytest.raises(ValueError, match=r"blocksparse.global_tokens: tokens must be at least 0 and finite, got -1"):
        blocksparse.global_tokens((32, 32), 16, -1)
    with pytest.raises(ValueError, match=r"blocksparse.sliding_window: dilation must be at least 1, got 0"):
        blocksparse.sliding_window((32, 32), 16, 3, dilation=0)
    with pytest.raises(ValueError, match=r"blocksparse.causal: block_size must be 16, 32, 64 or 128"):
        blocksparse.causal((32, 32), 8)
    with pytest.raises(TypeError, match=r"blocksparse.causal: lengths must be int32 or int64, got float32"):
        blocksparse.causal((32, 32), 16, lengths=torch.tensor([8.5]))
    with pytest.raises(TypeError, match=r"blocksparse.global_tokens: tokens must be int32 or int64, got float32"):
        blocksparse.global_tokens((32, 32), 16, torch.tensor([1.0]))
    for window in ((3, 0, 1), (3,)):
        with pytest.raises(
            ValueError, match=r"blocksparse.sliding_window: window must be a number of keys, or \(behind"
        ):
            blocksparse.sliding_window((32, 32), 16, window)


@pytest.mark.parametrize("size", [(-1, 32), (32.0, 32), (32, 32, 32), 32], ids=str)
def test_sizes_are_two_ints(size: Any) -> None:
    with pytest.raises(ValueError, match=r"blocksparse\.causal: size must be \(M, N\), two ints of at least 0, got"):
        blocksparse.causal(size, 16)
    with pytest.raises(ValueError, match=r"from_mask: size must be \(M, N\), two ints of at least 0, got"):
        blocksparse.Layout.from_mask(torch.ones(2, 2).bool(), 16, size=size)

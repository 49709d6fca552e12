"""Equal calls of an operator repeat the launches of the second one, of whatever operands they are given."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from gossamer import attention as attend
from gossamer import blocksparse, gemm, rowsparse, sae
from gossamer._core import launch, replay
from gossamer._core.operator import OPERATORS, forget

pytestmark = pytest.mark.kernels
Call = Callable[[Tensor, Tensor, Tensor], Any]
NAMES = [name for name, operator in OPERATORS.items() if operator.repeated is not None]


def known(name: str) -> dict[Any, Any]:
    repeated = OPERATORS[name].repeated
    assert repeated is not None
    return repeated._known


def recordings() -> int:
    return sum(type(found) is replay.Recording for name in NAMES for found in known(name).values())


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on no launcher may be asked."""

    def refuse(call: Any) -> Any:
        raise AssertionError(f"the launcher of {type(call).__name__} was asked")

    return lambda: [monkeypatch.setattr(OPERATORS[name].repeated, "_run", refuse) for name in NAMES] and None


def qkv(device: torch.device, seed: int, dtype: torch.dtype, tq: int = 32) -> list[Tensor]:
    """q, k and v, all of them contiguous `[1, 2, T, 16]`: by `seed` k is v, or each is a tensor of its own, or k and v
    are views of one tensor."""
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = (torch.randn(1, 2, t, 16, device=device, generator=generator).to(dtype) for t in (tq, 32, 32))
    if seed == 1:
        v = k
    if seed == 3:
        k, v = torch.stack((k, v)).unbind()
    return [q, k, v]


def layouts(device: torch.device) -> list[blocksparse.Layout]:
    """Layouts of one form that list other blocks."""
    generator = torch.Generator(device).manual_seed(0)
    masks = [torch.rand(2, 2, 2, device=device, generator=generator).argsort(-1) < 1 for _ in range(4)]
    return [blocksparse.Layout.from_mask(mask, 16) for mask in masks]


def blocks(device: torch.device) -> list[Call]:
    """blocksparse.attention with each layout."""

    def call(layout: blocksparse.Layout) -> Call:
        return lambda q, k, v: blocksparse.attention(q, k, v, layout, causal=True, return_lse=True)

    return [call(layout) for layout in layouts(device)]


def gradients(device: torch.device) -> list[Call]:
    """Its gradients."""

    def call(layout: blocksparse.Layout) -> Call:
        def run(*given: Tensor) -> Any:
            q, k, v = (x.detach().requires_grad_() for x in given)
            out = blocksparse.attention(q, k, v, layout)
            return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        return run

    return [call(layout) for layout in layouts(device)]


def moved(device: torch.device) -> list[Call]:
    """Products, softmax, and moves of the blocks of each layout."""

    def call(layout: blocksparse.Layout) -> Call:
        def run(*given: Tensor) -> Any:
            q, k, v = (x[0] for x in given)
            x, y = q @ k.mT, v @ q.mT
            a, b = (blocksparse.from_dense(each, layout) for each in (x, y))
            index = blocksparse.from_dense((8 * x).long() % 32, layout)
            made = [
                blocksparse.matmul(a, b, layout), blocksparse.matmul(a, b, transpose_a=True), blocksparse.matmul(a, v),
                blocksparse.matmul(x, y, layout), blocksparse.softmax(a), blocksparse.softmax(a, mask=x > 0), a.mT,
                blocksparse.gather(a, 1, index), blocksparse.scatter(a, 1, index, b, "sum"),
                blocksparse.scatter(layout, 2, index, b, "amax"), blocksparse.repeat(a, (1, 1, 2)), a.to_dense(),
            ]  # fmt: skip
            return [each if isinstance(each, Tensor) else each.values for each in made]

        return run

    return [call(layout) for layout in layouts(device)]


def selected(device: torch.device, **options: Any) -> list[Call]:
    """sparse_attention with other selections."""

    def call(seed: int) -> Call:
        generator = torch.Generator(device).manual_seed(seed)
        mask = torch.rand(1, 1, 32, 32, device=device, generator=generator) < 0.3
        whole = attend.Selection.from_mask(mask)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
            chosen = whole if q.shape[2] == 32 else attend.Selection.from_mask(mask[:, :, -q.shape[2] :])
            return attend.sparse_attention(q, k, v, chosen, causal=True, return_lse=True, **options)

        return run

    return [call(seed) for seed in range(4)]


def scores(device: torch.device) -> list[Call]:
    """indexer_scores, and on a GPU the selection that they make, which the interpreter takes long for."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        given = q, k[:, 0].contiguous(), v[:, 0, :, :2].contiguous()
        found = attend.select_topk(*given, None, 5, causal=True).words if q.is_cuda else q
        return attend.indexer_scores(*given, causal=True), found

    return [call] * 4


def rows(device: torch.device) -> list[Call]:
    """Products of a few rows, and a kernel whose programs signal each other by flags with an epoch."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        x, weight, up = q.flatten(0, 2)[:32], k.flatten(0, 2), v.flatten(0, 2)
        # A GPU multiplies few rows of 16 bits by a kernel, and others by the library.
        half = [each.to(torch.bfloat16) if q.is_cuda else each for each in (x, weight, up)]
        return gemm.linear_glu(*half), sae.decode(x[:4].relu(), weight[:16], capacity=9)

    return [call] * 4


def entries(device: torch.device) -> list[Call]:
    """Operators of rows, of which some overflow, and their gradients."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        x, weight, bias = q.flatten(0, 2)[:32], k.flatten(0, 2), v.flatten()[:64]
        dense, w = x.relu().requires_grad_(), weight[:16].clone().requires_grad_()
        rows = rowsparse.pack(dense, capacity=9)
        out, smooth = rowsparse.matmul(rows, w), sae.tanh_l0(rows, bias[:16])
        made = [out, rows.to_dense(), smooth, rowsparse.transpose(rows).packed.values, sae.count_fired(rows)]
        made += torch.autograd.grad(out.sum() + smooth.sum(), (dense, w))
        made += rowsparse.sampled_matmul(x, w.detach(), rows.detach()).packed[:3]
        made += gemm.linear_pack(x, weight, bias, "relu2", capacity=20).packed[:3]
        # So many that their rows are filled up to whole 16 numbers.
        wide = torch.cat([weight] * 17).t()[:, :1087]
        threshold = bias.abs().repeat(17)[:1087].requires_grad_()
        kept = sae.encode(x, wide, bias.repeat(17)[:1087], gemm.JumpReLU(threshold, 0.1), b_dec=bias[:16])
        made += [*kept.packed[:3], *torch.autograd.grad(kept.l0.sum() + sae.decode(kept, wide.t()).sum(), threshold)]
        return [each.detach() for each in made]

    return [call] * 4


CASES: dict[str, tuple[Callable[[torch.device], Sequence[Call]], int]] = {
    "blocks": (blocks, 32),
    "gradients": (gradients, 32),
    "moved": (moved, 32),
    "tiles": (lambda device: selected(device, path="tiles"), 32),
    "lists": (lambda device: selected(device, path="lists"), 32),
    "decode": (selected, 3),
    "scores": (scores, 32),
    "rows": (rows, 32),
    "entries": (entries, 32),
}


def test_steps_by_pytorch(device: torch.device) -> None:
    """A function that can write its result where it is told is repeated, in whatever form it is called."""
    asked = []

    def run(call: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        asked.append(call)
        x, y = call
        held = torch.where(x > 0, x - 2 * y, x.cumsum(0, dtype=torch.float64).float())
        whole = (x + 3).floor_divide(2).sum(1, keepdim=True).to(torch.int64)
        return x @ y, held, whole, y.mul(2).add_(x, alpha=3), x.clamp(min=0).amax(1), torch.add(x, y, alpha=2)

    repeated = replay.Repeated(run, lambda call: call, [0, 1], lambda call: ())
    for _ in range(4):
        given = torch.randn(5, 5, device=device), torch.randn(5, 5, device=device)
        for a, b in zip(run(given), repeated(given), strict=True):
            assert a.stride() == b.stride() and a.dtype is b.dtype and torch.equal(a, b)
    assert len(asked) == 6


@pytest.mark.parametrize("case", CASES)
def test_other_operands(
    case: str, device: torch.device, stopped: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third call and the fourth ask no launcher, and have the bits of calls that were never recorded."""
    make, tq = CASES[case]
    calls, operands = make(device), [qkv(device, seed, torch.float32, tq) for seed in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(replay, "walking", {0})
        plain = [call(*given) for call, given in zip(calls, operands)]
    for call, given in zip(calls[:2], operands):
        call(*given)
    assert recordings()
    stopped()
    for wanted, call, given in zip(plain[2:], calls[2:], operands[2:]):
        for a, b in zip(wanted, call(*given), strict=True):
            assert a.stride() == b.stride() and torch.equal(a.nan_to_num(-7), b.nan_to_num(-7))


def test_other_keys(device: torch.device) -> None:
    """Strides, options and the precision of products belong to the key; a tensor off 16 bytes is not repeated."""
    call, given = blocks(device)[0], qkv(device, 0, torch.float32)
    for _ in range(3):
        call(*given)
    (before,) = known("blocksparse_attention")
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kept == "highest" else "highest")
    try:
        call(*given)
    finally:
        torch.set_float32_matmul_precision(kept)
    call(given[0].transpose(2, 3).contiguous().transpose(2, 3), *given[1:])
    blocksparse.attention(*given, layouts(device)[0], causal=False)
    seen = OPERATORS["blocksparse_attention"].repeated._seen
    assert len(seen) == 4 and before in known("blocksparse_attention")
    off = torch.empty(given[0].numel() + 1, device=device)[1:].view_as(given[0]).copy_(given[0])
    for a, b in zip(call(off, *given[1:]), call(*given), strict=True):
        torch.testing.assert_close(a, b)
    assert len(seen) == 4


def test_copies_are_repeated(device: torch.device, stopped: Callable[[], None]) -> None:
    """Operands that a launcher copies are copied in each call, and so is memory that a launcher zeroes."""
    calls, (given, other) = blocks(device), (qkv(device, seed, torch.float32) for seed in (0, 2))
    wanted = calls[1](*other)
    crooked, others = ([x.transpose(2, 3).contiguous().transpose(2, 3) for x in xs] for xs in (given, other))
    forget()
    for _ in range(2):
        calls[0](*crooked)
    stopped()
    for a, b in zip(wanted, calls[1](*others), strict=True):
        assert torch.equal(a, b)


def test_other_steps_are_not_repeated(device: torch.device) -> None:
    """A launcher whose step by PyTorch cannot write where it is told, or draws numbers, or that reads a tensor of its
    own, is asked each time."""
    own, asked = torch.ones(4, device=device), []

    def sums(call: tuple[Tensor]) -> Tensor:
        asked.append(call)
        return call[0].new_empty(4).copy_(call[0].sum())

    def draws(call: tuple[Tensor]) -> Tensor:
        asked.append(call)
        return call[0].new_empty(4).bernoulli_(1.0)

    def reads(call: tuple[Tensor]) -> Tensor:
        asked.append(call)
        return call[0].new_empty(4).copy_(own)

    def gives(call: tuple[Tensor]) -> Tensor:
        asked.append(call)
        return call[0].view(2, 2)

    for run in (sums, draws, reads, gives):
        asked.clear()
        repeated = replay.Repeated(run, lambda call: call, [0], lambda call: ())
        for at in range(4):
            x, wanted = torch.full((4,), at, device=device), run((torch.full((4,), at, device=device),))
            assert torch.equal(repeated((x,)), wanted)
        assert len(asked) == 8 and list(repeated._known.values()) == [None]


def test_nothing_is_held(device: torch.device) -> None:
    """Neither operands nor results nor what lies between."""
    call, given = selected(device, path="lists")[0], qkv(device, 0, torch.float32)
    for _ in range(3):
        results = call(*given)
    assert recordings()
    alive = [weakref.ref(x) for x in (*given, *results)]
    del given, results
    gc.collect()
    assert not any(x() is not None for x in alive)


@pytest.mark.gpu
def test_descriptors_hold_nothing(device: torch.device) -> None:
    """Hopper's kernels read by descriptors, each of which has its tensor as the base."""
    q, k, v = (torch.randn(1, 2, 128, 64, device=device).bfloat16() for _ in range(3))
    layout = blocksparse.Layout.full((2, 2), 64, device=device)
    for _ in range(2):
        out = blocksparse.attention(q, k, v, layout)
    assert recordings()
    alive = [weakref.ref(x) for x in (q, k, v, out)]
    del q, k, v, out
    gc.collect()
    assert not any(x() is not None for x in alive)


def test_products_of_the_library(
    device: torch.device, stopped: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bias of another dtype, and of rows that are unpacked for them."""
    from gossamer.rowsparse._triton import matmul as product

    monkeypatch.setattr(product, "choose_path", lambda *_: "dense")
    generator = torch.Generator(device).manual_seed(0)
    draw = lambda *size: torch.randn(*size, device=device, generator=generator)  # noqa: E731
    gate, up, bias, weight = draw(40, 32).half(), draw(40, 32).half(), draw(40), draw(32, 48).half()
    inputs = [draw(70, 32).half() for _ in range(4)]
    calls = (
        lambda x: gemm.linear_glu(x, gate, up, gate_bias=bias),
        lambda x: rowsparse.matmul(rowsparse.pack(x * (x > 1), capacity=32), weight),
    )
    with torch.no_grad():
        wanted = [[call(x) for x in inputs] for call in calls]
        forget()
        for call in calls:
            for x in inputs[:2]:
                call(x)
        stopped()
        for call, results in zip(calls, wanted):
            assert all(torch.equal(call(x), result) for x, result in zip(inputs[2:], results[2:]))


def test_a_refused_launcher_and_a_failing_one(device: torch.device) -> None:
    """Neither is recorded again, and of the first nothing is held beyond the step that cannot be repeated."""
    held, asked = [], []

    def large(call: tuple[Tensor]) -> Tensor:
        asked.append(call)
        found = call[0].sum()
        for _ in range(3):
            held.append(weakref.ref(call[0].new_empty(100)))
        return found + 1

    def fails(call: tuple[Tensor]) -> Tensor:
        asked.append(call)
        raise ValueError("no")

    x = torch.ones(4, device=device)
    repeated = replay.Repeated(large, lambda call: call, [0], lambda call: ())
    for _ in range(2):
        repeated((x,))
    assert not any(reference() is not None for reference in held)
    repeated = replay.Repeated(fails, lambda call: call, [0], lambda call: ())
    for _ in range(4):
        with pytest.raises(ValueError, match="no"):
            repeated((x,))
    assert [call[0] is x for call in asked[2:]] == [True, False, True, True] and not replay.recorders


def test_shared_memory_is_asked_for_anew(device: torch.device) -> None:
    """Scratch and counters of a stream, twice in one call."""

    def run(call: tuple[Tensor]) -> Tensor:
        first, second = (launch.scratch.get(8, call[0].device)[:4] for _ in range(2))
        counts = launch.counters.get(8, call[0].device)
        first.copy_(call[0])
        second.copy_(call[0])
        return call[0].new_empty(4).copy_(first), call[0].new_empty(8, dtype=torch.int32).copy_(counts[:8])

    repeated = replay.Repeated(run, lambda call: call, [0], lambda call: ())
    for at in range(4):
        out, counts = repeated((torch.full((4,), float(at), device=device),))
        assert bool((out == at).all()) and not counts.any()
    assert [type(found) for found in repeated._known.values()] == [replay.Recording]


def test_no_step_of_python_for_an_argument(device: torch.device) -> None:
    """A launch of many arguments takes the host as many steps as one of few: C code picks them."""
    launched: list[tuple[Any, ...]] = []

    def steps(count: int) -> int:
        def run(call: tuple[Tensor]) -> Tensor:
            out, recorder = call[0].new_empty(4), replay.recorders.get(threading.get_ident())
            if recorder is not None:
                given = [*call, out, *[3, out] * count]
                recorder.add((lambda *args: launched.append(args), ()), (1, 1, 1), given, {}, views=False)
            return out

        found, x = 0, torch.ones(4, device=device)
        repeated = replay.Repeated(run, lambda call: call, [0], lambda call: ())
        for _ in range(3):
            repeated((x,))

        def count_lines(frame: Any, event: str, _: Any) -> Any:
            nonlocal found
            found += event == "line"
            return count_lines

        before = sys.gettrace()
        sys.settrace(count_lines)
        try:
            out = repeated((x,))
        finally:
            sys.settrace(before)
        assert launched[-1][4:] == (x.data_ptr(), out.data_ptr(), *[3, out.data_ptr()] * count)
        return found

    assert steps(20) == steps(1) > 0


def test_inference_mode(device: torch.device) -> None:
    """Functions that are made of others arrive whole there, and are taken apart."""

    def run(call: tuple[Tensor]) -> Tensor:
        return call[0].new_empty(6).copy_(call[0].t().contiguous().reshape(-1))

    repeated = replay.Repeated(run, lambda call: call, [0], lambda call: ())
    with torch.inference_mode():
        for at in range(4):
            x = torch.arange(6.0, device=device).view(2, 3) + at
            assert torch.equal(repeated((x,)), x.t().reshape(-1))
    assert [type(found) for found in repeated._known.values()] == [replay.Recording]


def test_calls_of_many_shapes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of recordings is bounded."""
    monkeypatch.setattr(replay.Repeated, "_MOST", 3)
    for keys in range(1, 8):
        q, k, v = (torch.ones(1, 1, 1, 16 * keys, device=device) for _ in range(3))
        for _ in range(2):
            attend.sparse_attention(q, k, v, attend.Selection.from_mask(torch.ones(1, 1, 1, device=device).bool()))
        assert len(known("sparse_attention")) <= 3 and len(OPERATORS["sparse_attention"].repeated._seen) <= 3


class Looks(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_modes(device: torch.device) -> None:
    """A mode that looks on gets the same results, and sees the operator alone."""
    call, given = blocks(device)[0], qkv(device, 0, torch.float32)
    for _ in range(3):
        wanted = call(*given)
    # The dispatcher hands lists to operators in place of tuples.
    with Looks():
        assert all(torch.equal(a, b) for a, b in zip(wanted, call(*given), strict=True))
    assert len(known("blocksparse_attention")) == 1


@pytest.mark.gpu
def test_threads(device: torch.device) -> None:
    """Threads that begin together record and repeat the same call."""
    calls, given = blocks(device), qkv(device, 0, torch.float32)
    wanted = [call(*given) for call in calls]
    forget()
    found: list[Any] = [None] * 4

    def run(at: int) -> None:
        for _ in range(20):
            found[at] = calls[at](*given)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(wanted, found, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.gpu
def test_captured_and_on_another_stream(stopped: Callable[[], None]) -> None:
    """A graph captures the launches of a recording, and its replay reads what stands in the operands by then."""
    device = torch.device("cuda")
    calls, given = blocks(device), qkv(device, 0, torch.float32)
    other = qkv(device, 2, torch.float32)
    wanted = [[x.clone() for x in calls[0](*operands)] for operands in (given, other)]
    stopped()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        beside = calls[0](*given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = calls[0](*given)
    graph.replay()
    for a, b, c in zip(wanted[0], beside, captured, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    for x, y in zip(given, other):
        x.copy_(y)
    graph.replay()
    for a, b in zip(wanted[1], captured, strict=True):
        assert torch.equal(a, b)

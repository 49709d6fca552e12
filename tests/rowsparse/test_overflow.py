"""Overflowed rows through dense tiles, forward and backward, beside rows that fit."""

import pytest
import torch

from gossamer.rowsparse import matmul, pack
from gossamer.testing import assert_close, assert_exact, random_rows


@pytest.mark.parametrize("m", [1, 16, 17, 33, 65, 200])
@pytest.mark.parametrize("n, d", [(90, 7), (1100, 72)])
def test_some_rows_of_a_tile(
    m: int, n: int, d: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator, mode: str
) -> None:
    if mode == "interpreter" and m > 65:
        pytest.skip("large for the interpreter")
    # Every third row overflows; from row 128 on none does.
    counts = [40 if row % 3 == 0 and row < 128 else 4 for row in range(m)]
    x = random_rows((m, n), l0=counts, dtype=dtype, device=device, generator=generator).requires_grad_()
    weight, grad = (torch.randn(shape, device=device, generator=generator).to(dtype) for shape in ((n, d), (m, d)))
    weight.requires_grad_()
    out = matmul(pack(x, capacity=8), weight)
    ours = torch.autograd.grad(out, (x, weight), grad)
    exact = [t.detach().double() for t in (x, weight, grad)]
    plain = x.detach() @ weight.detach(), grad @ weight.detach().t(), x.detach().t() @ grad
    wanted = exact[0] @ exact[1], exact[2] @ exact[1].t(), exact[0].t() @ exact[2]
    held = x.detach() != 0
    # Of sums so short the library's may be nearly exact by luck.
    squares = [t.square() for t in exact]
    sizes = squares[0] @ squares[1], squares[2] @ squares[1].t(), squares[0].t() @ squares[2]
    allowed = [{"length": k, "magnitude": size.sqrt()} for k, size in zip((n, d, m), sizes)]
    assert_close(out, reference64=wanted[0], plain=plain[0], **allowed[0])
    assert_close(ours[0], reference64=wanted[1] * held, plain=plain[1] * held, **allowed[1])
    assert_close(ours[1], reference64=wanted[2], plain=plain[2], **allowed[2])


@pytest.mark.kernels
def test_counters_are_left_at_0(
    device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that share a sum count on words that nothing clears between launches."""
    from gossamer._core import launch

    words = torch.zeros(64, dtype=torch.int32, device=device)
    asked: list[int] = []
    monkeypatch.setattr(launch.counters, "get", lambda size, device: (asked.append(size), words)[1])
    weight = torch.randn(1100, 40, device=device, generator=generator)
    for density in (0.5, 0.0, 0.5):
        x = random_rows((16, 1100), density=density, dtype=torch.float32, device=device, generator=generator)
        assert_close(matmul(pack(x, capacity=8), weight), reference64=x.double() @ weight.double(), plain=x @ weight)
        assert not words.any()
    assert asked


@pytest.mark.kernels
@pytest.mark.parametrize("m", [0, 1, 700, 9001])
def test_rows_that_overflowed_are_listed_in_order(m: int, device: torch.device, generator: torch.Generator) -> None:
    from gossamer.rowsparse._triton.overflow import list_overflowed

    spans = torch.randint(0, 5, (2, m), device=device, generator=generator)
    for room in (0, 6, 8):
        found = list_overflowed(spans, room)
        number = int(found[0])
        assert found[1 : number + 1].tolist() == (spans.sum(0) > room).nonzero()[:, 0].tolist()


@pytest.mark.kernels
@pytest.mark.parametrize("masked", [False, True])
def test_a_list_of_several_blocks(
    masked: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """On top of what is there already, of whole numbers; what the mask leaves out may be anything."""
    from gossamer.rowsparse._triton.overflow import Overflow, backward_weight

    m, n, d = 200, 20, 9
    x, grad, out = (
        random_rows(shape, density=0.7, dtype=dtype, device=device, generator=generator, integers=True)
        for shape in ((m, n), (m, d), (n, d))
    )
    spans = torch.randint(0, 3, (2, m), device=device, generator=generator)
    flagged = (spans.sum(0) > 2)[:, None].double()
    kept = (torch.rand(m, n, device=device, generator=generator) < 0.5).to(dtype) if masked else torch.ones_like(x)
    wanted = out.double() + (x.double() * kept.double() * flagged).t() @ grad.double()
    given = torch.where(kept != 0, x, float("nan"))
    backward_weight(Overflow(given, spans, 2), kept if masked else None, grad, out)
    assert_exact(out, wanted)


def test_full_rows_are_as_exact_as_a_dense_product(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator, scale: int
) -> None:
    x = random_rows((5 * scale, 1500 * scale), density=0.9, dtype=dtype, device=device, generator=generator)
    weight = torch.randn(1500 * scale, 40, device=device, generator=generator).to(dtype)
    assert_close(matmul(pack(x, capacity=1), weight), reference64=x.double() @ weight.double(), plain=x @ weight)


def test_special_values_stay_in_their_rows(dtype: torch.dtype, device: torch.device) -> None:
    """A tile multiplies its other rows as well, by zero: what an overflowed row holds must not reach them."""
    x = random_rows((20, 300), l0=3, dtype=dtype, device=device, integers=True)
    x[4, :50], x[4, 7] = 1, float("nan")
    out = matmul(pack(x, capacity=8), torch.ones(300, 6, dtype=dtype, device=device))
    assert out[4].isnan().all() and out.isnan().sum() == 6

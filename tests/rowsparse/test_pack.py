"""pack, and back again, against the definition of the formats."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer import gemm, sae
from gossamer.rowsparse import Rows, pack
from gossamer.rowsparse.pack import check_capacity
from gossamer.testing import assert_exact, dense64, random_rows
from tests import strategies

NAN, INF = math.nan, math.inf


def check(rows: Rows, x: torch.Tensor, capacity: int | None = None) -> None:
    """The invariants of a packed container of x, in `capacity` slots for each row or side by side."""
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_zeros(math.prod(x.shape[:-1]), x.shape[-1])
    counts = (flat != 0).sum(1)
    assert rows.shape == tuple(x.shape) and rows.dtype is x.dtype and rows.device == x.device
    assert rows.counts.tolist() == counts.tolist()
    values, indices, spans, source = rows.packed
    assert values.shape[0] == (int(counts.sum()) if capacity is None else len(flat) * capacity)
    assert (source is None) == (capacity is None or capacity == x.shape[-1])
    held = torch.zeros(values.shape, dtype=torch.bool, device=x.device)
    for row, (first, count) in enumerate(spans.t().tolist()):
        if capacity is not None:
            assert first == (row * capacity if count <= capacity else len(flat) * capacity)
        if first + count <= values.shape[0]:
            columns = flat[row].nonzero().squeeze(1)
            assert indices[first : first + count].tolist() == columns.tolist()
            assert_exact(values[first : first + count], flat[row, columns].double())
            held[first : first + count] = True
    over = bool((counts > capacity).any()) if capacity is not None else False
    if not over:
        assert (indices[~held] == -1).all() and (values[~held] == 0).all()
    assert rows.overflowed.shape == () and rows.overflowed.device == x.device and bool(rows.overflowed) == over


@given(data=st.data())
def test_pack_and_unpack(data: st.DataObject, dtype: torch.dtype, device: torch.device) -> None:
    x = data.draw(strategies.dense(dtype, device))
    n = x.shape[-1]
    for capacity in (None, data.draw(st.integers(1, 70)), "exact"):
        rows = pack(x, capacity=capacity)
        check(rows, x, check_capacity("", capacity, n))
        assert_exact(dense64(rows), x.double())
        assert_exact(rows.to_dense(), x.double())


@pytest.mark.parametrize("m, n", [(1, 1), (3, 2047), (3, 2049), (5, 5000), (600, 300), (33, 16384)])
@pytest.mark.parametrize("l0", [0, 1, 40])
def test_every_way_to_scan(
    m: int, n: int, l0: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator, mode: str
) -> None:
    if mode == "interpreter":
        m, n = min(m, 5), min(n, 5000)
    x = random_rows((m, n), l0=l0, dtype=dtype, device=device, generator=generator)
    x[m // 2] = 1
    for capacity in (1, n, None, "exact"):
        for part in (x, x[:, 1:]) if n > 1 else (x,):
            check(pack(part, capacity=capacity), part, check_capacity("", capacity, part.shape[1]))


@pytest.mark.parametrize("m, n", [(3, 1031), (40, 67), (2, 5001)])
@pytest.mark.parametrize("gap", [0, 3])
def test_rows_that_begin_anywhere(
    m: int, n: int, gap: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """What stands between rows shows nowhere."""
    x = torch.full((m, n + gap), NAN, dtype=dtype, device=device)[:, :n]
    x.copy_(random_rows((m, n), l0=9, dtype=dtype, device=device, generator=generator))
    x[:, 0], x[:, -1] = 1, -2
    for capacity in (16, 8, "exact"):
        rows = pack(x, capacity=capacity)
        check(rows, x, check_capacity("", capacity, n))
        assert_exact(rows.to_dense(), x.double())


@pytest.mark.parametrize("n", [17, 4100])
def test_special_values_are_kept_and_negative_zero_is_not(n: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.zeros(2, n, dtype=dtype, device=device)
    subnormal = torch.finfo(dtype).tiny / 4
    x[0, :8] = torch.tensor([-0.0, NAN, 0.0, INF, -INF, subnormal, -0.0, NAN])
    x[1, n - 1] = NAN
    for rows in (pack(x), pack(x, capacity=1), pack(x, capacity="exact")):
        assert rows.counts.tolist() == [5, 1]
        assert_exact(rows.to_dense(), x.double())
    assert pack(x, capacity=5).indices[:5].tolist() == [1, 3, 4, 5, 7]


@pytest.mark.native
def test_float64(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("float64 runs on the CPU only")
    x = random_rows((3, 50), l0=4, dtype=torch.float64)
    assert_exact(pack(x).to_dense(), x)
    assert_exact(pack(x, capacity="exact").to_dense(), x)


@pytest.mark.native
def test_gradcheck() -> None:
    x = random_rows((4, 9), l0=[0, 2, 9, 3], dtype=torch.float64)
    held = x != 0

    def entries(v: torch.Tensor, **options: int | str) -> torch.Tensor:
        return strategies.pack_as(x.masked_scatter(held, v), **options).packed.values

    values = x[held].requires_grad_()
    # A slot of a row that overflowed has no gradient: the source has it.
    for options in ({"capacity": 9}, {"capacity": "exact"}):
        torch.autograd.gradcheck(lambda v, o=options: entries(v, **o), values)
    for options in ({"capacity": 9}, {"capacity": 2}, {"capacity": "exact"}, {"room": 3}):
        torch.autograd.gradcheck(
            lambda v, o=options: strategies.pack_as(x.masked_scatter(held, v), **o).to_dense(), values
        )


@pytest.mark.parametrize(
    "options",
    [{"capacity": 16}, {"capacity": 2}, {"capacity": 1}, {"capacity": "exact"}, {"room": 6}],
    ids=str,
)
def test_the_gradient_lives_at_stored_entries(
    options: dict[str, int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Whatever the capacity: a gradient that depends on whether a row overflowed would be one that nobody can trust."""
    x = random_rows((2, 3, 16), l0=[0, 1, 2, 3, 9, 16], dtype=dtype, device=device, generator=generator)
    grad = random_rows(x.shape, l0=16, dtype=dtype, device=device, generator=generator)
    leaf = x.requires_grad_()
    strategies.pack_as(leaf, **options).to_dense().backward(grad)
    assert_exact(leaf.grad, grad.double() * (x != 0))


@pytest.mark.native
def test_deterministic(dtype: torch.dtype, device: torch.device, generator: torch.Generator, scale: int) -> None:
    x = random_rows((4 * scale, 3000), density=0.02, dtype=dtype, device=device, generator=generator)
    first, second = pack(x, capacity=40).packed, pack(x, capacity=40).packed
    assert torch.equal(first.indices, second.indices) and torch.equal(first.values, second.values)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: pack([1.0]), TypeError, "rowsparse.pack: x must be a torch.Tensor, got list"),
        (lambda: pack(torch.ones(3).int()), TypeError, r"rowsparse.pack: x must be float32.* got int32"),
        (lambda: pack(torch.tensor(1.0)), ValueError, r"x must have shape \[..., N\], got a scalar"),
        (lambda: pack(torch.ones(1, 2**31, device="meta")), ValueError, "x must have at most 2\\^31 - 1 columns"),
        (lambda: pack(torch.eye(3).to_sparse_csr()), TypeError, "x must be a strided tensor, got layout sparse_csr"),
        (lambda: pack(torch.ones(3), capacity="all"), ValueError, 'capacity must be an int, None or "exact", got'),
        (lambda: pack(torch.ones(3), capacity=0), ValueError, "capacity must be at least 1, got 0"),
        (lambda: pack(torch.ones(3), capacity=-1), ValueError, "capacity must be at least 1, got -1"),
        (lambda: pack(torch.ones(3), capacity=2.0), TypeError, "capacity must be an int, got float"),
    ],
)
def test_errors(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_slots_that_no_key_could_name_are_refused(device: torch.device) -> None:
    """2^32 slots or more, by every function that gives rows slots. Expanded tensors take no memory."""
    m, n = 1 << 26, 64
    many, weight = torch.zeros(1, 1, device=device).expand(m, n), torch.zeros(n, n, device=device)
    calls = {
        "rowsparse.pack": lambda: pack(many, capacity=n),
        "sae.encode": lambda: sae.encode(many, weight, capacity=n),
        "gemm.linear_pack": lambda: gemm.linear_pack(many, weight, capacity=n),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"{name}: .* fewer than 2\^32, got 67108864 rows of 64"):
            call()
    with pytest.raises(ValueError, match=r"sae.encode: .* fewer than 2\^32, got 67108864 rows of 64"):
        sae.encode(many, weight, None, gemm.TopK(n))


@pytest.mark.gpu
def test_many_programs_agree(device: torch.device, generator: torch.Generator) -> None:
    """Thousands of programs that wait for each other give the same bits again."""
    x = random_rows((20000, 704), density=0.02, dtype=torch.bfloat16, device=device, generator=generator)
    column = x.nonzero()[:, 1]
    for _ in range(20):
        rows = pack(x, capacity="exact")
        assert torch.equal(rows.indices.long(), column) and torch.equal(rows.values, x[x != 0])
        assert torch.equal(rows.counts, (x != 0).sum(1)) and torch.equal(
            rows.starts, rows.counts.cumsum(0) - rows.counts
        )

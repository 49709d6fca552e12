"""gossamer.testing: the error budget judges rightly, and random matrices are what they say."""

import math

import pytest
import torch

from gossamer import testing
from gossamer.rowsparse import Rows, pack


def test_budget() -> None:
    want = torch.tensor([1.0, 2.0, 1000.0], dtype=torch.float64)
    plain = torch.tensor([1.0, 2.01, 1000.0])
    testing.assert_close(plain, reference64=want, plain=plain)
    # Twice plain's largest error anywhere, and a rounding step of the element itself.
    testing.assert_close(torch.tensor([1.0199, 1.9801, 1000.0199]), reference64=want, plain=plain)
    # The distance between float32 numbers is 2**-14 at 1000.
    testing.assert_close(torch.tensor([1.0, 2.0, 1000 + 2**-14]), reference64=want, plain=want)
    with pytest.raises(AssertionError):
        testing.assert_close(torch.tensor([1.0, 2.0, 1000 + 2**-13]), reference64=want, plain=want)
    with pytest.raises(AssertionError):
        testing.assert_close(torch.tensor([1.0199, 2.0, 1000.0]), reference64=want, plain=plain, factor=1)


def test_budget_of_a_sum() -> None:
    """Where plain PyTorch is exact by luck, what a good order of 16 additions may leave is allowed."""
    want = torch.tensor([0.0, 0.0], dtype=torch.float64)
    plain = want.float()
    magnitude = torch.tensor([1.0, 0.5])
    testing.assert_close(torch.tensor([2**-20, 2**-21]), reference64=want, plain=plain, length=16, magnitude=magnitude)
    with pytest.raises(AssertionError, match=r"worst is at \(1,\)(.|\n)*\(a sum of 16\)"):
        off = torch.tensor([2**-20, 2**-20])
        testing.assert_close(off, reference64=want, plain=plain, length=16, magnitude=magnitude)
    with pytest.raises(AssertionError):
        testing.assert_close(off.double(), reference64=want, plain=plain, length=16, magnitude=magnitude)
    with pytest.raises(ValueError, match="length and magnitude belong together"):
        testing.assert_close(plain, reference64=want, plain=plain, length=16)


def test_the_message_shows_the_worst_place() -> None:
    want = torch.ones(2, 3, dtype=torch.float64)
    actual, plain = want.float(), want.float()
    actual[0, 1], actual[1, 2], plain[0, 0] = 1.5, 4.0, 1.125
    with pytest.raises(AssertionError) as caught:
        testing.assert_close(actual, reference64=want, plain=plain, name="product")
    message = str(caught.value)
    assert message.startswith("product: 2 of 6 elements exceed their budget; the worst is at (1, 2).")
    assert "got 4.0, float64 gives 1.0, plain PyTorch 1.0" in message
    assert "error 3.000e+00, budget 2.500e-01 = 2 x 1.250e-01" in message and "torch.float32" in message


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("got, want, agree", [
    (NAN, NAN, True), (INF, INF, True), (-INF, -INF, True), (INF, 1e300, True),
    (0.0, NAN, False), (NAN, 0.0, False), (INF, -INF, False), (INF, 0.0, False), (0.0, INF, False), (NAN, INF, False),
])  # fmt: skip
def test_what_is_not_finite_must_be_the_same(got: float, want: float, agree: bool) -> None:
    actual = torch.tensor([got, 1.0])
    reference = torch.tensor([want, 1.0], dtype=torch.float64)
    plain = torch.tensor([NAN, 1.0])
    if agree:
        testing.assert_close(actual, reference64=reference, plain=plain)
    else:
        with pytest.raises(AssertionError, match=r"the worst is at \(0,\)"):
            testing.assert_close(actual, reference64=reference, plain=plain)


def test_arguments_of_assert_close() -> None:
    ones = torch.ones(2)
    with pytest.raises(TypeError, match=r"reference64 must be float64, got torch.float32"):
        testing.assert_close(ones, reference64=ones, plain=ones)
    with pytest.raises(AssertionError, match=r"got shape \[2\], but reference64 has \[3\]"):
        testing.assert_close(ones, reference64=torch.ones(3).double(), plain=ones)
    with pytest.raises(AssertionError, match=r"but plain has \[1\]"):
        testing.assert_close(ones, reference64=ones.double(), plain=torch.ones(1))
    testing.assert_close(torch.ones(0, 2), reference64=torch.ones(0, 2).double(), plain=torch.ones(0, 2))


def test_assert_exact() -> None:
    third = torch.tensor([1 / 3], dtype=torch.float64)
    testing.assert_exact(third.float(), third)
    testing.assert_exact(torch.tensor([NAN]), torch.tensor([NAN]).double())
    with pytest.raises(AssertionError, match=r"sum: .*not equal"):
        testing.assert_exact(torch.tensor([1 / 3 + 1e-7]), third, name="sum")
    with pytest.raises(AssertionError):
        testing.assert_exact(torch.ones(2), third)


def test_random_rows(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    options = {"dtype": dtype, "device": device, "generator": generator}
    x = testing.random_rows((2, 3, 40), l0=7, **options)
    assert x.shape == (2, 3, 40) and x.dtype is dtype and x.device.type == device.type and x.is_contiguous()
    assert (x != 0).sum(-1).unique().tolist() == [7] and (x < 0).any() and (x[x != 0].abs() > 0.09).all()
    counts = [0, 1, 40, 99]
    assert (testing.random_rows((4, 40), l0=counts, **options) != 0).sum(1).tolist() == [0, 1, 40, 40]
    assert (testing.random_rows((40,), l0=3, positive=True, **options) >= 0).all()
    whole = testing.random_rows((4, 40), l0=40, integers=True, **options)
    assert set(whole.abs().flatten().tolist()) == {1, 2, 3}
    few = (testing.random_rows((50, 10), l0=8, distinct=False, **options) != 0).sum(1)
    assert few.max() <= 8 and few.unique().numel() > 1
    density = (testing.random_rows((100, 100), density=0.3, **options) != 0).float().mean().item()
    assert 0.25 < density < 0.35
    for shape in ((0, 5), (3, 0), (2, 0, 4)):
        assert testing.random_rows(shape, l0=2, **options).shape == shape
    for wrong in ({}, {"l0": 1, "density": 0.5}, {"l0": [1, 2, 3]}):
        with pytest.raises(ValueError, match=r"testing\.random_rows: "):
            testing.random_rows((2, 5), **wrong)


def test_short_rows_are_spread_like_long_ones(device: torch.device, generator: torch.Generator) -> None:
    rows = testing.random_rows((200, 1000), l0=[10] * 100 + [500] * 100, device=device, generator=generator)
    for part in rows.split(100):
        assert 450 < part.nonzero()[:, 1].double().mean() < 550


@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_random_containers(packed: bool, distinct: bool, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(1)
    options = {"dtype": dtype, "device": device, "generator": generator, "distinct": distinct}
    rows = testing.random_slots((10, 3, 12), 8, packed=packed, padding=3, **options).validate()
    assert len(rows.values) == (int(rows.counts.sum()) if packed else 240) + 3
    assert rows.shape == (10, 3, 12) and rows.dtype is dtype and not rows.overflowed
    repeated, holes = 0, 0
    for first, count in rows.spans.t().tolist():
        indices, values = rows.indices[first : first + count], rows.values[first : first + count]
        held = indices[indices >= 0]
        assert (held.diff() >= 0).all() and values[indices >= 0].isfinite().all() and values[indices < 0].isnan().all()
        repeated += len(held) - len(held.unique())
        holes += count - len(held)
    assert holes > 0 and (repeated == 0) == distinct
    assert rows.counts.unique().numel() > 3


def test_dense64_follows_the_definition() -> None:
    INT = torch.int32
    values = torch.tensor([1.0, 2.0, NAN, 4.0])
    indices, spans = torch.tensor([1, 1, -1, 2], dtype=INT), torch.tensor([[0, 3], [3, 4]])
    rows = Rows(values, indices, spans, (2, 1, 3), torch.tensor([[9.0] * 3, [8.0] * 3]))
    assert testing.dense64(rows).tolist() == [[[0, 3, 0]], [[8, 8, 8]]]
    assert testing.dense64(rows).dtype is torch.float64
    x = testing.random_rows((3, 20), l0=4)
    assert torch.equal(testing.dense64(pack(x, capacity=2)), x.double())


@pytest.mark.parametrize("counts", [12, [3, 12, 0, 7] * 4])
def test_neighbours_share_entries(counts: int | list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = testing.random_rows((16, 400), l0=counts, group=8, shared=0.5, generator=generator) != 0
    each = [counts] * 16 if isinstance(counts, int) else counts
    assert rows.sum(1).tolist() == each
    for first in (0, 8):
        group, alike = rows[first : first + 8], [c // 2 for c in each[first : first + 8]]
        for i in range(8):
            for j in range(i):
                both = int((group[i] & group[j]).sum())
                assert min(alike[i], alike[j]) <= both < min(alike[i], alike[j]) + 4


@pytest.mark.parametrize("layer, n, shared", [(26, 2048, 2.8), (39, 5632, 1.8), (57, 5632, 2.3)])
def test_rows_of_a_trained_layer(layer: int, n: int, shared: float) -> None:
    """Hot neurons, heavy rows, and neighbours that share; the tokens come again after 1,024."""
    options = {"layer": layer, "dtype": torch.bfloat16}
    x = testing.trained_rows((2, 1024, n), generator=torch.Generator().manual_seed(0), **options)
    held = x[0] != 0
    assert torch.equal(held, x[1] != 0) and x.dtype is torch.bfloat16 and float(x[x != 0].min()) >= 0.1
    counts, fired = held.sum(1).double(), held.sum(0).sort(descending=True).values.double()
    assert abs(counts.mean() - layer) < 0.5 and counts.quantile(0.99) > 2.9 * counts.mean()
    assert fired[: n // 8].sum() > 0.67 * fired.sum() and 0.29 < (fired == 0).double().mean() < 0.44
    groups = held.view(-1, 32, n)
    assert abs(float(groups.sum() / groups.any(1).sum()) - shared) < 0.1
    # Tiles of 256 neighbouring neurons have alike shares of the entries.
    assert held.view(1024, -1, 256).sum((0, 2)).max() < 4 * held.sum() * 256 / n
    for other in (40, float(layer), "39"):
        with pytest.raises(ValueError, match=f"layer must be one of 26, 39 and 57, got {other!r}"):
            testing.trained_rows((8, n), layer=other)
    for shape in ((8, 100), ()):
        with pytest.raises(ValueError, match=f"end with the {n} neurons, got"):
            testing.trained_rows(shape, **options)

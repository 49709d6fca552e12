"""Testing sparse operators: an error budget against float64, random matrices with few entries a row.

>>> generator = torch.Generator().manual_seed(0)
>>> x, w = random_rows((8, 100), l0=5, generator=generator), torch.randn(100, 16, generator=generator)
>>> assert_close(matmul(pack(x), w), reference64=x.double() @ w.double(), plain=x @ w)
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gossamer._core import dropout as _dropout
from gossamer.rowsparse import Rows
from gossamer.rowsparse.linear_source import LinearSource

__all__ = [
    "assert_close",
    "assert_exact",
    "dense64",
    "dropout_mask",
    "random_rows",
    "random_slots",
    "trained_rows",
]


def assert_close(
    actual: Tensor,
    *,
    reference64: Tensor,
    plain: Tensor,
    factor: float = 2.0,
    length: int | None = None,
    magnitude: Tensor | None = None,
    name: str = "",
) -> None:
    """Asserts that a result is hardly less exact than plain PyTorch's in the same dtype.

    An element may be off the float64 reference by `factor` times the largest error that `plain` makes anywhere, plus
    the distance between neighbouring numbers of the result's dtype at that element. An element that is NaN or
    infinite in the reference, after rounding to the result's dtype, must be the same in the result.

    Of few elements plain PyTorch's may all be nearly exact by luck. `length` and `magnitude` allow a sum the error of
    any good order of addition, where that is more: 4 log2(length) 2^-24 magnitude (2^-53 in float64).

    Args:
        actual: the result to judge, floating, any shape.
        reference64: the same in float64, by dense PyTorch.
        plain: the same by plain PyTorch from the same inputs in the same dtype; its own dtype may be wider.
        factor: how many times the error of `plain` is allowed.
        length: how many products are added up for an element.
        magnitude: the root of the sum of their squares, `(x.square() @ w.square()).sqrt()`, broadcasting to the result.
        name: of the result in the message.

    Raises:
        AssertionError: shapes differ, or an element exceeds its budget. The message shows the worst element.
        TypeError: `reference64` is not float64.
        ValueError: one of `length` and `magnitude` without the other.

    Source: the error rule of attention-gym's tests, with the rounding step added.

    >>> third = torch.tensor([1.0]) / 3
    >>> assert_close(third, reference64=torch.tensor([1.0], dtype=torch.float64) / 3, plain=third)
    """
    if reference64.dtype is not torch.float64:
        raise TypeError(f"testing.assert_close: reference64 must be float64, got {reference64.dtype}.")
    if (length is None) != (magnitude is None):
        raise ValueError("testing.assert_close: length and magnitude belong together: give both or neither.")
    label = f"{name}: " if name else ""
    for what, other in (("reference64", reference64), ("plain", plain)):
        if actual.shape != other.shape:
            raise AssertionError(f"{label}got shape {list(actual.shape)}, but {what} has {list(other.shape)}.")
    if actual.numel() == 0:
        return
    got, want, usual = (x.detach().to(actual.device, torch.float64) for x in (actual, reference64, plain))
    rounded = want.to(actual.dtype).double()
    finite = rounded.isfinite()
    plain_error = (usual - want).abs()[finite & usual.isfinite()]
    info = torch.finfo(actual.dtype)
    allowed = want.new_full((), factor * float(plain_error.max()) if plain_error.numel() else 0.0)
    if length is not None and magnitude is not None:
        wide = torch.finfo(torch.promote_types(actual.dtype, torch.float32)).eps / 2
        scale = magnitude.detach().to(want.device, torch.float64)
        allowed = allowed.maximum(4 * math.log2(max(length, 2)) * wide * scale.nan_to_num(nan=0.0, posinf=0.0))
    allowed = allowed.expand(want.shape)
    step = info.eps * torch.exp2(want.abs().clamp(min=info.tiny).frexp().exponent.double() - 1)
    excess = torch.where(finite, (got - want).abs() - (allowed + step), 0.0)
    # A NaN in the result compares false with everything; a non-finite reference asks for the very same value.
    same = (got == rounded) | (got.isnan() & rounded.isnan())
    excess = torch.where(excess.isnan() | (~finite & ~same), math.inf, excess)
    count = int((excess > 0).sum())
    if not count:
        return
    at = int(excess.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), actual.shape))
    g, w, u, s, a = (float(x.reshape(-1)[at]) for x in (got, want, usual, step, allowed))
    most = float(plain_error.max()) if plain_error.numel() else 0.0
    why = f"{factor:g} x {most:.3e} (largest error of plain PyTorch)"
    if a > factor * most:
        why = f"{a:.3e} (a sum of {length})"
    raise AssertionError(
        f"{label}{count} of {actual.numel()} elements exceed their budget; the worst is at {place}.\n"
        f"  got {g!r}, float64 gives {w!r}, plain PyTorch {u!r}\n"
        f"  error {abs(g - w):.3e}, budget {a + s:.3e} = {why} + {s:.3e} (a rounding step of {actual.dtype})"
    )


def assert_exact(actual: Tensor, reference64: Tensor, *, name: str = "") -> None:
    """Asserts that a result equals the float64 reference rounded to the result's dtype; NaN equals NaN.

    For inputs whose products and sums no dtype rounds, such as the small integers of `random_rows`: then no order of
    addition can excuse a difference.

    Args:
        actual: the result to judge, any shape.
        reference64: the same in float64.
        name: of the result in the message.

    Raises:
        AssertionError: shapes or any element differ.

    >>> assert_exact(torch.tensor([2.0]), torch.tensor([2.0], dtype=torch.float64))
    """
    expected = reference64.detach().to(actual.device, actual.dtype)

    def message(text: str) -> str:
        return f"{name}: {text}" if name else text

    torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=0, equal_nan=True, msg=message)


def dropout_mask(
    dropout: float, seed: int | Tensor, shape: tuple[int, int, int, int], device: torch.device | str | None = None
) -> Tensor:
    """bool `[B, H, Tq, Tk]`, the shape: True where attention with this dropout and seed keeps a probability.

    >>> dropout_mask(0.25, 7, (1, 1, 2, 4)).tolist()
    [[[[True, True, True, True], [False, True, True, True]]]]
    """
    device = torch.device(device or (seed.device if isinstance(seed, Tensor) else "cpu"))
    drop, settled = _dropout.settled("testing.dropout_mask", dropout, seed, device)
    b, h, tq, tk = shape
    if settled is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    pairs, queries, keys = (torch.arange(n, device=device) for n in (b * h, tq, tk))
    kept = _dropout.kept(settled, pairs[:, None, None], queries[:, None], keys, drop)
    return kept.view(shape)


def dense64(rows: Rows) -> Tensor:
    """A container's dense `[..., N]` in float64, entry by entry from the definition of `Rows`.

    An oracle for tests that shares no code with `Rows.to_dense`: repeated indices add up, an index of -1 is no entry,
    and rows that overflowed come from the source.

    Args:
        rows: the container.

    Returns:
        `[..., N]`, float64, on the device of rows, without a gradient.

    >>> dense64(random_slots((2, 5), capacity=3)).shape
    torch.Size([2, 5])
    """
    out = torch.zeros(rows.num_rows, rows.num_columns, dtype=torch.float64)
    values, indices, spans, kept = rows.packed
    source = _source64(kept)
    indices, values = indices.cpu(), values.detach().cpu().double()
    for row, (start, count) in enumerate(spans.t().tolist()):
        if start + count > values.shape[0] and source is not None:
            out[row] = source[row]
        else:
            columns, entries = indices[start : start + count], values[start : start + count]
            held = columns >= 0
            out[row].index_add_(0, columns[held], entries[held])
    return out.to(rows.device).reshape(rows.shape)


def _source64(source: Tensor | LinearSource | None) -> Tensor | None:
    if not isinstance(source, LinearSource):
        return None if source is None else source.detach().cpu().double()
    given = (source.x, source.weight, source.bias, source.threshold)
    x, weight, bias, threshold = (None if t is None else t.detach().cpu().double() for t in given)
    assert x is not None and weight is not None
    z = x @ weight.t() + (0 if bias is None else bias)
    kept = torch.where(z <= (0 if threshold is None else threshold.clamp(min=0)), 0, z)
    return kept * kept if source.squared else kept


def random_rows(
    shape: Sequence[int],
    *,
    l0: int | Sequence[int] | None = None,
    density: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
    positive: bool = False,
    integers: bool = False,
    distinct: bool = True,
    group: int = 1,
    shared: float = 0.0,
) -> Tensor:
    """A dense `[..., N]` tensor that is zero but for a few random entries per row.

    Args:
        shape: `(..., N)`; the leading dimensions together hold M rows.
        l0: entries per row, or one count for each of the M rows. Counts above N are taken as N.
        density: the probability of an entry, instead of `l0`.
        dtype, device, generator: as in `torch.randn`; the generator must be on `device`.
        positive: True draws entries above 0 only, as a ReLU gives them.
        integers: True draws entries of magnitude 1, 2 or 3. Products and sums of such numbers are exact in every
            dtype, so that results can be compared for equality.
        distinct: False draws columns with replacement: a row has at most `l0` entries, which is cheap in wide rows.
        group, shared: every `group` neighbouring rows have this share of their entries in the same columns, drawn for
            the group, as neighbouring tokens do; with `l0`. Of rows with different counts the shorter one's are among
            the longer one's.

    Returns:
        `[..., N]`, contiguous. No entry is smaller than 0.1 in magnitude.

    Raises:
        ValueError: neither or both of `l0` and `density`, or as many counts as there are not rows.

    >>> (random_rows((2, 3, 50), l0=7) != 0).sum(-1).tolist()
    [[7, 7, 7], [7, 7, 7]]
    """
    if (l0 is None) == (density is None):
        raise ValueError("testing.random_rows: give either l0 or density.")
    m, n = math.prod(shape[:-1]), shape[-1]
    if density is not None:
        kept = torch.rand(m, n, device=device, generator=generator) < density
        drawn = _values((m, n), dtype, device, generator, positive, integers)
        return torch.where(kept, drawn, 0).reshape(tuple(shape))
    counts = [l0] * m if isinstance(l0, int) else list(l0 or ())
    if len(counts) != m:
        raise ValueError(f"testing.random_rows: l0 must have one count for each of {m} rows, got {len(counts)}.")
    most = min(n, max(counts, default=0))
    columns = _columns(m, n, most, distinct, device, generator)
    if shared:
        alike = (torch.tensor(counts, device=device).clamp(max=n) * shared).long()[:, None]
        common = _columns(-(-m // group), n, most, True, device, generator).repeat_interleave(group, 0)[:m]
        keys = torch.rand(m, n, device=device, generator=generator)
        slots = torch.arange(most, device=device)
        # A row's own columns are none of those that it shares.
        keys.scatter_(1, torch.where(slots < alike, common, common[:, :1]), -1.0)
        own = keys.topk(most, 1).indices
        columns = torch.where(slots < alike, common, own.gather(1, (slots - alike).clamp(min=0)))
    held = torch.arange(most, device=device) < torch.tensor(counts, device=device, dtype=torch.int64)[:, None]
    drawn = _values((m, most), dtype, device, generator, positive, integers)
    # One column more than N takes what a row does not hold.
    out = torch.zeros(m, n + 1, dtype=dtype, device=device)
    out.scatter_(1, torch.where(held, columns, n), drawn)
    return out[:, :n].reshape(tuple(shape)).contiguous()


def trained_rows(
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
    layer: int = 39,
) -> Tensor:
    """A dense `[..., N]` tensor with entries above 0 where a trained feed-forward layer had active neurons, for 1,024
    neighbouring tokens of a text, again and again.

    More than two thirds of the entries belong to an eighth of the neurons, and 29% to 43% of the neurons have none. One
    row in a hundred has three times as many entries as the mean row. Neighbours share 17% to 26% of their entries.

    Args:
        shape: `(..., N)`; N is the layer's: 2,048 of layer 26, and 5,632 of the others.
        dtype, device, generator: as in `random_rows`.
        layer: one of three, named by its entries of a row on average: 26, in a model with 104 million parameters, and
            39 and 57, in one with 204 million. Both were trained with L1 by `gossamer.train`.

    Returns:
        `[..., N]`, contiguous. No entry is smaller than 0.1.

    Raises:
        ValueError: another layer, or another N than the layer's.

    >>> trained_rows((1024, 5632)).count_nonzero(1).float().mean().round()
    tensor(39.)
    """
    widths = {26: 2048, 39: 5632, 57: 5632}
    if not isinstance(layer, int) or layer not in widths:
        raise ValueError(f"testing.trained_rows: layer must be one of 26, 39 and 57, got {layer!r}.")
    if not shape or shape[-1] != widths[layer]:
        raise ValueError(f"testing.trained_rows: shape must end with the {widths[layer]} neurons, got {list(shape)}.")
    # The steps from entry to entry, neuron by neuron, the most frequent first; 255 is 254 without an entry.
    steps = torch.from_numpy(np.load(Path(__file__).with_name("trained_rows.npz"))[str(layer)])
    at = steps.clamp(max=254).cumsum(0)[steps < 255] - 1
    pattern = torch.zeros(shape[-1], 1024, dtype=torch.bool)
    pattern.view(-1)[at] = True
    # As in a model, hot neurons stand anywhere.
    order = torch.randperm(shape[-1], generator=torch.Generator().manual_seed(0))
    m = math.prod(shape[:-1])
    held = pattern[order].t().to(device)[torch.arange(m, device=device) % 1024]
    drawn = _values((m, shape[-1]), dtype, device, generator, True, False)
    return torch.where(held, drawn, 0).reshape(tuple(shape))


def random_slots(
    shape: Sequence[int],
    capacity: int,
    *,
    packed: bool = False,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
    integers: bool = False,
    distinct: bool = False,
    holes: float = 0.25,
) -> Rows:
    """Random `Rows` as users may build them: rows of different length, repeated columns, slots without an entry.

    Args:
        shape: `(..., N)`.
        capacity: every row holds 0 to `capacity` entries, in as many slots.
        packed: True leaves no slots between rows, which then follow each other.
        padding: how much longer the buffers are than the slots of rows.
        dtype, device, generator, integers: as in `random_rows`.
        distinct: True repeats no column within a row; then a row holds at most N entries.
        holes: the share of the entries whose index is -1, which means "no entry".

    Returns:
        `Rows` of that shape without a source. A number that no operator may read is NaN.

    >>> rows = random_slots((4, 100), capacity=6)
    >>> bool((rows.counts <= 6).all())
    True
    """
    m, n = math.prod(shape[:-1]), shape[-1]
    most = min(capacity, n) if distinct or n == 0 else capacity
    slots = torch.arange(capacity, device=device)
    counts = torch.randint(most + 1, (m,), device=device, generator=generator)
    held = slots < counts[:, None]
    columns = torch.full((m, capacity), n, dtype=torch.int64, device=device)
    columns[:, :most] = _columns(m, n, most, distinct, device, generator)
    indices = torch.where(held, columns, n).sort(1).values
    hole = torch.rand(m, capacity, device=device, generator=generator) < holes
    valid = held & ~hole & (indices < n)
    values = _values((m, capacity), dtype, device, generator, False, integers)
    values, indices = torch.where(valid, values, math.nan), torch.where(valid, indices, -1).int()
    first = counts.cumsum(0) - counts if packed else torch.arange(m, device=device) * capacity
    values, indices = (part[held] if packed else part.flatten() for part in (values, indices))
    values = torch.nn.functional.pad(values, (0, padding), value=math.nan)
    indices = torch.nn.functional.pad(indices, (0, padding), value=-1)
    return Rows(values, indices, torch.stack([first, counts]), tuple(shape))


def _columns(
    m: int, n: int, count: int, distinct: bool, device: torch.device | str | None, generator: torch.Generator | None
) -> Tensor:
    """Random columns, int64 [m, count] in [0, n)."""
    if not distinct:
        return torch.randint(max(n, 1), (m, count), device=device, generator=generator)
    # Sorted by what was drawn: unsorted, a GPU gives columns in ascending order, and the first few lie side by side.
    return torch.rand(m, n, device=device, generator=generator).topk(count, 1).indices


def _values(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device | str | None,
    generator: torch.Generator | None,
    positive: bool,
    integers: bool,
) -> Tensor:
    """Random numbers that differ from 0."""
    if integers:
        drawn = torch.randint(1, 4, shape, device=device, generator=generator).to(dtype)
    else:
        drawn = (torch.randn(shape, device=device, generator=generator).abs() + 0.1).to(dtype)
    if positive:
        return drawn
    return torch.where(torch.rand(shape, device=device, generator=generator) < 0.5, -drawn, drawn)

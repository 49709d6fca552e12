"""What the ways of a sparse feed-forward block cost, and which costs the least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gossamer._core import tuning
from gossamer._core.ops import INTERPRET
from gossamer.ffn.tracker import Known
from gossamer.rowsparse.dense_product import odd_rate

Path = Literal["gather", "union", "fused", "dense"]
GROUP = 32
"""Neighbouring rows that may share the union of their entries on a GPU."""
SAMPLE = 8
"""Groups whose unions are counted, at least, where they are not needed and there are as many."""
PRICE = 2.0
"""Entries that are gathered one by one in the time that a column of a union of GROUP rows takes."""
MANY = 4096
"""Rows from which on a sample of them, or a copy of those that are heavy, takes little of the time that it may save."""
FEW = 16
"""Rows up to which the time goes into reading weights: a sparse block reads no more than a dense one at any density."""

HOPPER = 770e12, 815e12, 660e12, 8.5e12
"""FLOP/s of a gate that is packed, of the fused and the dense block, bytes/s of gathered weights: H200, bfloat16,
16,384 rows of K = D = 2,048 and N = 5,632, where that is 0.49, 1.39, 1.72 and 0.50 ms (29 entries a row)."""
HOST: dict[Path, float] = {"dense": 30e-6, "fused": 150e-6, "gather": 160e-6, "union": 360e-6}
"""Seconds in which a host launches a way, eager: that of an H200, PyTorch 2.11. A graph and a compiled region need
next to none."""
HOST_FEW: dict[Path, float] = {"dense": 35e-6, "fused": 95e-6, "gather": 75e-6}
"""The same with up to FEW rows."""
PRODUCT = 27e-6
"""What each of the dense way's products takes beside that, and what follows it."""
STARTS: dict[Path, float] = {"dense": 5e-6, "fused": 9.5e-6, "gather": 9e-6}
"""Seconds that up to FEW rows take on the device beside reading weights: launches, and waiting for what is read. H200,
K and N from 200 to 25,000."""
SEVERAL = 3.5e-6
"""What gathering takes beside that of more than one row, with tensor cores."""
PIECES = 6.0, 2.0
"""How many times as long as whole rows of as many bytes it takes to read what is gathered, in pieces of 32 bytes: for
one row, of which few are on their way at one time, and for several. H100: some 200 entries of one row take 4.7 us more
than a single one with K = D = 2,048, and 8.8 with 4,096, where 3.3 and 6.1 are foreseen."""
DENSE_PRODUCT = 3.5e-6
"""What each of the dense way's products takes beside that."""
ODD_PRODUCT = 2e-6
"""What each of the library's products of several rows takes beside that where rows of 16 bits are no multiple of 8
elements."""
UNALIGNED, UNALIGNED_START = 2.0, 4.5e-6
"""How much longer it takes few rows of float32 to gather from weights whose rows are no multiple of 8 elements, and
what that takes beside."""
ONE_BY_ONE = 0.42e12, 1.1e12
"""Bytes/s at which 16-bit elements of such rows are loaded for one row, and for several: as fast as loads are issued,
whatever memory is. H100, K = D = 1,100 and 2,242, N = 3,004 and 11,620."""
COLUMNS = 64
"""Of the gate, for which a program of `_triton/few.py` reads all rows of x with tensor cores: one by one, too, then."""
LATE = 9e-6
"""What listed rows of up take then, beside their bytes, from LATE_FROM on: one program's pass over K."""
LATE_FROM = 16
FURTHER = 0.12, 0.075
"""Shares of the rate of float32 products that the library reaches with up to FEW rows, and gathering, for each row
beyond the first; that one waits for weights. H100, K = D = 2,048, N = 5,632, M = 2 to 16: 151 and 73 us are foreseen
with eight rows that have next to nothing active, 150 and 68 measured."""
FURTHER_COLUMNS, FURTHER_LEAST = 4, 12
"""Columns that a program then multiplies together, if any of them is active, and those that a multiprocessor has in all
at one time: fewer take no less."""
SEPARATE = 1e-6
"""What the fused way of float32 spares of the dense one with several rows: the same products, one kernel less."""
UNALIGNED_EXACT = 1.4, 1.5
"""How much longer the gate, and what is gathered, take many rows of float32 then."""
LINE = 64
"""Bytes of a row of W_down that memory reads for whichever of their columns is wanted, where W_down lies by rows as in
`nn.Linear`: H200, 29 entries of 5,632, where 1, 4 and 16 rows take 1.4, 3.6 and 4.7 us more than by columns, and such
lines 0.8, 2.7 and 5.1."""
LEAST = 512
"""Columns from which on the gate's weight is copied where its rows do not begin on 16 bytes."""


@dataclass(frozen=True)
class Costs:
    """Seconds that a row takes through the gate alone, an entry that is gathered, a row in dense tiles after its gate,
    a row of the fused block and of the dense one, and a sparse way's launches on the device; to read the gate's weight,
    and a column of the other weights, of which there are n; how many products the dense block has. How many times as
    long as reading takes one row and several, in the library's products (`product`) and to gather (`load`); what each
    row beyond the first takes in these products (`further`) and in the gate of those that gather (`further_gate`),
    where products are those of float32, without tensor cores. Whether the fused product and the packed gate of many
    rows come near their speed, whether elements have 32 bits, how many are a line, whether W_down lies by rows, and the
    elements of a column of up and down, on the CPU alone, where nothing else counts."""

    gate: float
    entry: float
    heavy: float
    fused: float
    dense: float
    start: float = 25e-6
    read: float = 0.0
    column: float = 0.0
    n: int = 0
    products: int = 3
    product: tuple[float, float] = (1.0, 1.0)
    load: tuple[float, float] = (1.0, 1.0)
    further: float = 0.0
    further_gate: float = 0.0
    fuses: bool = True
    packs: bool = True
    wide: bool = False
    line: int = LINE // 2
    strided: bool = False
    width: int = 0

    def break_even(self, m: int) -> float:
        """Entries of a row, on average, from which on the fused block takes less time than gathering for m rows."""
        return (self.fused - self.gate - self.start / m) / self.entry

    @property
    def limit(self) -> int:
        """Entries of a row from which on dense tiles take less time than gathering."""
        return max(1, int(self.heavy / self.entry))


def costs_of(n: int, k: int, d: int, gated: bool, x: Tensor) -> Costs:
    """From bytes and operations over what the device sustains, for K = k, intermediate size n and D = d."""
    inner = k if gated else 0
    if INTERPRET or not x.is_cuda:
        return Costs(1.0, 8.0 / max(n, 1), 1.0, 1.0, 1.0, n=n, width=inner + d)
    rates, size = tuning.rates(x.get_device()), x.element_size()
    half = size == 2
    if half and tuning.hopper(x.device):
        packing, fused, dense, gathers = HOPPER
        if not gated:
            # There is nothing to fuse.
            fused = dense
    else:
        packing = fused = dense = rates.half if half else rates.tf32 if tuning.tf32() else rates.ieee
        gathers = rates.gather
    work = 2 * n * (k + inner + d)
    entry = (inner + d) * size
    slower, slowest = (1.0, 1.0) if half or k % 16 == 0 else UNALIGNED_EXACT
    times = slower * 2 * n * k / packing, slowest * entry / gathers, 1.3 * work / fused, work / fused, work / dense
    product = load = (1.0, 1.0)
    if half and not n % 8 == k % 8 == d % 8 == 0:
        even = n % 2 == k % 2 == d % 2 == 0
        product = longer(rates.copy, *(odd_rate(single, even, rates.copy) for single in (True, False)))
    if not k % 8 == d % 8 == 0:
        load = longer(rates.copy, *ONE_BY_ONE) if half else (UNALIGNED, UNALIGNED)
    further = further_gate = 0.0
    if not half and not tuning.tf32():
        further = work / (FURTHER[0] * rates.ieee)
        further_gate = 2 * max(n, FURTHER_LEAST * rates.programs) * k / (FURTHER[1] * rates.ieee)
    # A weight whose rows do not begin on 16 bytes is copied where it is large enough.
    packs = not half or k % 8 == 0 or n >= LEAST
    fuses = packs and (not half or n % 8 == 0)
    return Costs(
        *times,
        read=n * k * size / rates.copy,
        column=entry / rates.copy,
        n=n,
        products=3 if gated else 2,
        product=product,
        load=load,
        further=further,
        further_gate=further_gate,
        fuses=fuses,
        packs=packs,
        wide=not half,
        line=LINE // size,
    )


def longer(copy: float, single: float, several: float) -> tuple[float, float]:
    """How many times as long as at the rate of copies it takes to read at these rates."""
    return max(1.0, copy / single), max(1.0, copy / several)


def choose_path(known: Known | None, m: int, cost: Costs, eager: bool = False) -> Path:
    """How m rows go where no gradient is needed: the way that takes the least time by what is known, on the device, or
    on the host that launches it, where that takes longer and the call is `eager`."""
    if cost.width:
        return on_cpu(known, m, cost.n, cost.width)
    ways: dict[Path, float]
    if m <= FEW:
        ways = few_rows(known, m, cost)
    else:
        ways = {"fused": m * cost.fused, "dense": m * cost.dense}
        if m >= MANY and not cost.fuses:
            ways.pop("fused")
    if known is not None and m > FEW and (m < MANY or cost.packs):
        light = known.rows.light / max(known.rows.rows, 1)
        sparse = cost.gate + known.rows.over / max(known.rows.rows, 1) * cost.heavy
        ways["gather"] = m * (sparse + light * cost.entry) + cost.start
        if known.unions is not None and known.unions.rows:
            union = known.unions.mean / GROUP * PRICE
            ways["union"] = m * (sparse + min(light, union) * cost.entry) + 2 * cost.start
    if eager:
        host: dict[Path, float] = dict(HOST_FEW if m <= FEW else HOST)
        host["dense"] += cost.products * PRODUCT
        ways = {name: max(time, host[name]) for name, time in ways.items()}
    return min(ways, key=ways.__getitem__)


def few_rows(known: Known | None, m: int, cost: Costs) -> dict[Path, float]:
    """Seconds of the ways of up to FEW rows: of reading weights, and of what does not wait for memory."""
    several = m > 1
    whole = (cost.read + cost.n * cost.column) * cost.product[several] + (m - 1) * cost.further
    ways = {path: start + whole for path, start in STARTS.items()}
    ways["gather"] = STARTS["gather"] + _gathered(known, m, cost)
    ways["dense"] += cost.products * DENSE_PRODUCT
    if several and cost.product[1] > 1:
        ways["dense"] += cost.products * ODD_PRODUCT
        ways["fused"] += (cost.products - 1) * ODD_PRODUCT
    if cost.products == 2:
        # There is nothing to fuse.
        ways["fused"] = ways["dense"]
    elif several and cost.wide:
        ways["fused"] = ways["dense"] - SEPARATE
    return ways


def _gathered(known: Known | None, m: int, cost: Costs) -> float:
    """What gathering takes beside its launches."""
    union = cost.n if known is None else min(cost.n, m * known.rows.mean)
    free = 1 - union / max(cost.n, 1)
    load, pieces = cost.load[m > 1], PIECES[m > 1]
    down = union * cost.column / (cost.products - 1)
    up = (cost.products - 2) * down
    read = cost.read
    if load > 1 and m > 1 and not cost.wide:
        read *= 1 + m / COLUMNS
    # Columns of W_down by rows are read one by one in any case.
    listed = pieces * (load * up + down * (1 if cost.strided else load))
    if cost.further_gate:
        # Others are on their way while these are multiplied.
        active = (cost.products - 1) * (1 - free**FURTHER_COLUMNS)
        listed = max(listed, (m - 1) * cost.further_gate * active)
    seconds = load * read + listed + (m - 1) * cost.further_gate
    if cost.strided:
        seconds += (1 - free**cost.line) * cost.n * cost.column / (cost.products - 1)
    if m > 1 and not cost.further_gate:
        seconds += SEVERAL
    if load > 1:
        seconds += UNALIGNED_START if cost.wide else LATE * min(1.0, union / LATE_FROM)
    return seconds


CPU_RATES = 60e9, 30e9, 1.7e-9
"""FLOP/s of a product, bytes/s of one that reads its weights, seconds for an element of a weight that is gathered."""
CPU_STARTS = 60e-6, 40e-6
"""Seconds that gathering takes for a call, and for a group of CPU_GROUP rows, whatever there is to gather. These and
the rates: float32 on an x86 core, K = D and N from 64 and 176 to 2,048 and 5,632, M from 1 to 256."""
CPU_GROUP = 16
"""Rows that share a union on the CPU: weights are copied for a product once a group, and one of few rows is slow."""
CPU_DENSE = 0.25
"""Share of the columns from which on nothing is gathered."""


def on_cpu(known: Known | None, m: int, n: int, width: int) -> Path:
    """The same on the CPU, by what up and down take, `width` elements a column; the gate is computed in any way. Where
    nothing is known one column of 16 is taken for active."""
    flops, read, element = CPU_RATES
    call, group = CPU_STARTS
    rows = min(m, CPU_GROUP)
    union = n / 16 if known is None else min(n, rows * known.rows.mean)
    dense = width * n * max(2 * m / flops, 4 / read)
    gather = call + -(-m // CPU_GROUP) * (group + width * union * (element + 2 * rows / flops))
    if gather < dense and union <= CPU_DENSE * n:
        return "gather"
    # Where little is to be computed plain PyTorch takes the fewest steps.
    return "dense" if dense < 1e-3 else "fused"


def sample_step(m: int) -> int:
    """Of how many groups of m rows one is counted where unions are not needed: 8 to 19 are of 256 to a million rows.

    No power of two from 8 on, because lengths of sequences are: the groups that are looked at would all be beginnings.
    """
    step = min(2048, 1 << (m // (GROUP * SAMPLE) | 1).bit_length() - 1)
    return step - step // 8


def sampled_groups(m: int, step: int) -> int:
    """How many groups of m rows are looked at where one of every `step` is; with 0 none is."""
    return 0 if step == 0 else (m + GROUP * step - 1) // (GROUP * step)

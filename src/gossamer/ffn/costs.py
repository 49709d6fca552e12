"""The costs of the paths of a sparse feed-forward block, and the choice of the cheapest.

A sparse block reads and multiplies its whole gate, and the rows of its other weights that belong to entries.
`choose_path` compares its time with that of a dense block. Both times come from rates that were measured once per
family of GPUs, and from nothing else. The more entries there are, the sooner a dense block is faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gossamer._core import tuning
from gossamer._core.ops import INTERPRET
from gossamer.rowsparse import Density

Path = Literal["gather", "fused", "dense"]
PATHS: dict[Path, str] = {
    "gather": "a density that is known, and at which gathering takes the least time: the gate, and the weights of its "
    "entries",
    "fused": "all other gated blocks with ReLU or its square: gate and up by `gemm.linear_glu`",
    "dense": "all other blocks, and eager ones in which another path adds more time to the host than it saves the "
    "device: plain PyTorch",
}
TILE, SLOTS = 256, 16
"""Columns of a tile of the packed gate, and slots that a row has for its entries."""
SAMPLE = 256
"""Rows that are counted, at least, of a block that computes all of them."""
MANY = 4096
"""Rows from which on counts are recorded more often, and programs are given fewer registers."""
FEW = 16
"""Rows up to which the time goes into reading weights."""
WAITING = 512
"""Rows up to which an eager block waits for the host, which a call that counts takes several times as long."""


class _Rates(NamedTuple):
    """FLOP/s of a gate that is packed, of the fused and of the dense block; bytes/s of gathered weights."""

    packed: float
    fused: float
    dense: float
    gathered: float


HOPPER = _Rates(770e12, 815e12, 660e12, 8.5e12)
"""H200, bfloat16, 16,384 rows of K = D = 2,048 and N = 5,632."""
HEAVY, HEAVY_IEEE = 1.7, 7.0
"""Times a row of the fused block that a heavy row takes, in Triton's tiles; in float32 without TF32."""
START = 25e-6
"""Seconds of a sparse path's launches on the device, of more than FEW rows."""
FILL = 512
"""Rows that keep all programs of a gather at work: fewer take as long."""
FEW_STARTS: dict[Path, float] = {"dense": 15e-6, "fused": 9.5e-6, "gather": 9e-6}
"""The same of up to FEW rows, with the wait for what is read first."""
SEVERAL = 3.5e-6
"""Seconds that gathering takes beside that for more than one row, with tensor cores."""
PIECES = 6.0, 2.0
"""How many times as long as whole rows it takes to read as many bytes of gathered weights, for one row, of which few
are on their way at one time, and for several."""
LINE = 64
"""Bytes of a row of W_down that memory reads for whichever of their columns is wanted, where W_down lies by rows."""
ADDED = 30e-6
"""Seconds of the host by which an eager call of another path takes longer than the layers that it replaces."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a row through the packed gate, of an entry that is gathered, of a row in dense tiles, of a row of the
    fused and of the dense block; to read the gate's weight, and a column of the other weights. Then the number of
    columns; of products of the dense block; of elements in a LINE; whether W_down lies by rows, whether rows of weights
    can be gathered at speed, and whether few rows can; on the CPU, where the times do not count, the elements of a
    column of up and down."""

    gate: float
    entry: float
    heavy: float
    fused: float
    dense: float
    read: float = 0.0
    column: float = 0.0
    n: int = 0
    products: int = 3
    line: int = LINE // 2
    by_rows: bool = False
    gathers: bool = True
    few_gather: bool = True
    width: int = 0

    @property
    def limit(self) -> int:
        """Entries of a row from which on dense tiles take less time than gathering."""
        return max(1, int(self.heavy / self.entry))


def costs_of(n: int, k: int, d: int, gated: bool, x: Tensor) -> Costs:
    """From bytes and operations over what the device sustains, for K = k, intermediate size n and D = d."""
    inner, products = (k, 3) if gated else (0, 2)
    if INTERPRET or not x.is_cuda:
        return Costs(1.0, 8.0 / max(n, 1), 1.0, 1.0, 1.0, n=n, products=products, width=inner + d)
    rates, size = tuning.rates(x.get_device()), x.element_size()
    half, even = size == 2, (n | k | d) * size % 16 == 0
    if half and tuning.hopper(x.device):
        speed = HOPPER
    else:
        product = rates.half if half else rates.tf32 if tuning.tf32() else rates.ieee
        speed = _Rates(product, product, product, rates.gather)
    work, entry = 2 * n * (k + inner + d), (inner + d) * size
    fused = work / (speed.fused if gated else speed.dense)
    return Costs(
        gate=2 * n * k / speed.packed,
        entry=entry / speed.gathered,
        heavy=(HEAVY if half or tuning.tf32() else HEAVY_IEEE) * fused,
        fused=fused,
        dense=work / speed.dense,
        read=n * k * size / rates.copy,
        column=entry / rates.copy,
        n=n,
        products=products,
        line=LINE // size,
        gathers=even or not half,
        few_gather=even,
    )


def choose_path(known: Density | None, m: int, cost: Costs, eager: bool = False, repeats: bool = False) -> Path:
    """How m rows go where no gradient is needed: the path that takes the device the least time by what is known; in an
    `eager` call the time counts as well that a path adds to the host. Where a module `repeats` the two launches by
    which few rows are gathered, without a check, they add nothing."""
    if cost.width:
        return on_cpu(known, m, cost.n, cost.width)
    times = dense_seconds(m, cost)
    if cost.few_gather if m <= FEW else cost.gathers and known is not None:
        light, over = (cost.n, 0.0) if known is None else (known.mean, known.over / max(known.rows, 1))
        if m > FEW and known is not None:
            light = known.light / max(known.rows, 1)
        times["gather"] = sparse_seconds(m, cost, light, over)
    if eager:
        free = ("dense", "gather") if repeats and m <= FEW else ("dense",)
        times = {path: time if path in free else time + ADDED for path, time in times.items()}
    return min(times, key=times.__getitem__)


def dense_seconds(m: int, cost: Costs) -> dict[Path, float]:
    """Seconds on the device of the paths that compute every column."""
    if m > FEW:
        return {"fused": m * cost.fused, "dense": m * cost.dense}
    whole = cost.read + cost.n * cost.column
    return {path: FEW_STARTS[path] + whole for path in ("fused", "dense")}


def sparse_seconds(m: int, cost: Costs, nnz: float, over: float = 0.0) -> float:
    """Seconds on the device of gathering nnz entries of each row, and of the share `over` of rows that are heavy; it
    grows with both."""
    if m > FEW:
        over = min(1.0, over + overflowing(nnz, cost.n))
        return START + max(m * cost.gate, cost.read) + max(m, FILL) * nnz * cost.entry + m * over * cost.heavy
    union = min(cost.n, m * nnz)
    down = cost.n * cost.column / (cost.products - 1)
    listed = PIECES[m > 1] * union * cost.column
    # By rows, a line is read for whichever of its columns is wanted.
    lines = (1 - (1 - union / max(cost.n, 1)) ** cost.line) * down if cost.by_rows else 0.0
    return FEW_STARTS["gather"] + (SEVERAL if m > 1 else 0.0) + cost.read + listed + lines


def overflowing(nnz: float, n: int) -> float:
    """The share of rows with more entries in a tile than it has slots, and so heavy, if entries stand at random: their
    numbers are then Poisson's."""
    mean = nnz * min(1.0, TILE / n) if n else 0.0
    fits = math.exp(-mean) * sum(mean**k / math.factorial(k) for k in range(SLOTS + 1))
    return max(1.0, n / TILE) * max(0.0, 1 - fits)


HOT_SHARE = 1 / 64
"""Of the rows: a neuron that more of them have takes less time as a column of dense products than entry by entry, where
it is trained in 16 bits (H200)."""


def hot_bound(rows: int, size: int, device: torch.device) -> float:
    """Of so many rows, how many have a neuron at least that is hot, where an element has `size` bytes: with a margin
    for the error of a small sample. In float32 dense products are slower beside gathered weights."""
    expected = rows * HOT_SHARE
    if device.type == "cuda" and size > 2:
        rates = tuning.rates(device.index or 0)
        expected *= 2 * rates.half / ((rates.tf32 if tuning.tf32() else rates.ieee) * size)
    return expected + 2 * expected**0.5


CPU_RATES = 60e9, 30e9, 1.7e-9
"""FLOP/s of a product, bytes/s of one that reads its weights, seconds for an element of a weight that is gathered."""
CPU_STARTS = 60e-6, 40e-6
"""Seconds that gathering takes for a call, and for a group of CPU_GROUP rows, whatever there is to gather. These and
the rates: float32 on an x86 core, K = D and N from 64 and 176 to 2,048 and 5,632, M from 1 to 256."""
CPU_GROUP = 16
"""Rows that share a union on the CPU: weights are copied for a product once a group, and one of few rows is slow."""
CPU_DENSE = 0.25
"""Share of the columns from which on nothing is gathered."""


def on_cpu(known: Density | None, m: int, n: int, width: int) -> Path:
    """The same on the CPU, by what up and down take, `width` elements a column; the gate is computed in any case. Where
    nothing is known one column of 16 is taken for active."""
    flops, read, element = CPU_RATES
    call, group = CPU_STARTS
    rows = min(m, CPU_GROUP)
    union = n / 16 if known is None else min(n, rows * known.mean)
    dense = width * n * max(2 * m / flops, 4 / read)
    gather = call + -(-m // CPU_GROUP) * (group + width * union * (element + 2 * rows / flops))
    if gather < dense and union <= CPU_DENSE * n:
        return "gather"
    # Where little is to be computed plain PyTorch takes the fewest steps.
    return "dense" if dense < 1e-3 else "fused"


def sample_step(m: int) -> int:
    """Of how many rows one is counted. The number is odd: lengths of sequences are even, and rows that a step with a
    common factor meets would all stand at few places of their sequences."""
    return m // SAMPLE | 1

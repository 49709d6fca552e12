"""Calls of the operators of all rooms with operands that a `Case` draws, for `tests/neighbours.py`."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer import ffn, gemm, rowsparse, sae
from gossamer.rowsparse import Rows
from gossamer.sae.encode_dense import encode_dense
from gossamer.testing import random_slots
from tests.neighbour_attention import attended, gates, indexed, indexer_trained
from tests.neighbour_blocks import block_attention, block_moves, block_products, compressed, normed
from tests.neighbours import Case, Results, Scenario
from tests.sae.dense import selected


def packed(case: Case) -> Scenario:
    lead, n, d = case.leading(), case.size(), case.size(33)
    case.give("x", case.draw(*lead, n) * case.chance(*lead, n, share=case.pick(0.05, 0.3, 1.0)))
    case.give("W", case.draw(n, d))
    capacity = case.pick(None, "exact", 1, 2, 5, 40)

    def call(x: Tensor, W: Tensor) -> Results:
        rows = rowsparse.pack(x, capacity=capacity)
        return [rows.to_dense(), rowsparse.matmul(rows, W), rows.complete().to_dense()]

    def reference(x: Tensor, W: Tensor) -> Results:
        # The gradient lives at the entries.
        x = torch.where(x != 0, x, 0)
        return [x, x @ W, x]

    return Scenario(call, reference)


def foreign(case: Case) -> Scenario:
    """Containers that users build: repeated columns, slots without an entry that hold NaN, counts in any memory."""
    shape, capacity, d = (*case.leading(), case.size()), case.pick(0, 1, 3, 8), case.size(17)
    options: dict[str, Any] = {"dtype": case.dtype, "generator": case.generator, "integers": True}
    made = random_slots(shape, capacity, packed=case.pick(True, False), padding=case.pick(0, 3), **options)
    values, indices, spans, _ = made.packed
    case.give("values", values, values.isnan())
    case.give("indices", indices)
    case.give("spans", spans)
    m = math.prod(shape[:-1])
    case.give("W", case.draw(shape[-1], d))
    case.maybe("b", d)
    case.give("scale", case.draw(shape[-1]).abs() + 0.5)
    case.give("y", case.draw(*shape[:-1], d))
    what = case.pick("product", "sampled", "rest")

    def call(values: Tensor, indices: Tensor, spans: Tensor, W: Tensor, b: Any, scale: Tensor, y: Tensor) -> Results:
        rows = Rows(values, indices, spans, shape)
        if what == "product":
            return [rows.to_dense(), rowsparse.matmul(rows, W), sae.decode(rows, W, b)]
        if what == "sampled":
            return [rowsparse.sampled_matmul(y, W, rows).to_dense()]
        return [rowsparse.transpose(rows).to_dense(), sae.count_fired(rows), sae.tanh_l0(rows, scale)]

    def dense(values: Tensor, indices: Tensor, spans: Tensor) -> Tensor:
        flat = values.new_zeros(m, shape[-1] + 1)
        starts, counts = spans
        row = torch.repeat_interleave(torch.arange(m), counts)
        slots = starts[row] + torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
        columns = torch.where(indices[slots] >= 0, indices[slots].long(), shape[-1])
        flat = flat.index_put((row, columns), values[slots], accumulate=True)
        return flat[:, :-1].view(shape)

    def reference(
        values: Tensor, indices: Tensor, spans: Tensor, W: Tensor, b: Any, scale: Tensor, y: Tensor
    ) -> Results:
        x = dense(values, indices, spans)
        if what == "product":
            return [x, x @ W, x @ W + (0 if b is None else b)]
        if what == "sampled":
            return [None]
        return [x.view(m, shape[-1]).t(), None, None]

    return Scenario(call, reference)


def _activation(case: Case, name: str, threshold: Any, scale: Any, k: int) -> Any:
    return {
        "relu": lambda: "relu",
        "relu2": lambda: "relu2",
        "jumprelu": lambda: gemm.JumpReLU(threshold),
        "topk": lambda: gemm.TopK(k, scale),
        "batchtopk": lambda: gemm.BatchTopK(k, scale),
        "groupmax": lambda: gemm.GroupMax(k),
    }[name]()


def encoded(case: Case) -> Scenario:
    lead, d, n = case.leading(), case.size(33), case.size()
    case.give("x", case.draw(*lead, d))
    case.give("W", case.draw(d, n, limit=1))
    case.maybe("b", n)
    case.maybe("b_dec", d, limit=1)
    case.give("threshold", case.draw(n).float() + 0.5)
    if case.dtype is torch.float64:
        case.clean["threshold"] = case.clean["threshold"].double()
    name = case.pick("relu", "jumprelu", "topk", "batchtopk", "groupmax")
    k, plain = min(case.pick(1, 3, 8), n), case.pick(True, False) and name != "groupmax"
    if name == "groupmax":
        k = math.gcd(k, n)
    options: dict[str, Any] = case.pick({}, {"capacity": case.pick(1, 4, 90, "exact")})
    keeps_a_number = name not in ("relu", "jumprelu")
    if keeps_a_number:
        options = {}

    def call(x: Tensor, W: Tensor, b: Any, b_dec: Any, threshold: Tensor) -> Results:
        activation = _activation(case, name, threshold.detach(), None, k)
        if plain:
            acts, _, _, nnz = encode_dense(x, W, b, activation, b_dec=b_dec)
            return [acts, nnz]
        rows = sae.encode(x, W, b, activation, b_dec=b_dec, **options)
        return [rows.to_dense(), rows.l0.detach()]

    def reference(x: Tensor, W: Tensor, b: Any, b_dec: Any, threshold: Tensor) -> Results:
        z = (x if b_dec is None else x - b_dec) @ W + (0 if b is None else b)
        kept = selected(
            z.detach(),
            name,
            k if keeps_a_number else None,
            threshold.detach() if name == "jumprelu" else None,
        )
        return [torch.where(kept & (z != 0), z, 0), kept.sum(-1)]

    return Scenario(call, reference)


def decoded(case: Case) -> Scenario:
    lead, n, d = case.leading(), case.size(), case.size(33)
    case.give("x", case.draw(*lead, n) * case.chance(*lead, n, share=case.pick(0.05, 0.3, 1.0)))
    case.give("W", case.draw(n, d))
    case.maybe("b", d)
    options: dict[str, Any] = case.pick({}, {"capacity": case.pick(1, 4, 90)})

    def call(x: Tensor, W: Tensor, b: Any) -> Results:
        return [sae.decode(x, W, b, **options)]

    return Scenario(call, lambda x, W, b: [torch.where(x != 0, x, 0) @ W + (0 if b is None else b)])


def glu(case: Case) -> Scenario:
    lead, k, n, d = case.leading(), case.size(33), case.size(33), case.size(17)
    case.give("x", case.draw(*lead, k, step=0.25))
    for name, shape in (("gate", (n, k)), ("up", (n, k)), ("down", (d, n))):
        case.give(name, case.draw(*shape, step=0.25))
    for name, size in (("gb", n), ("ub", n), ("db", d)):
        case.maybe(name, size, step=0.25)
    recompute, whole, act = case.pick(True, False), case.pick(True, False), case.pick("silu", "gelu", "relu", "sigmoid")

    def call(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, gb: Any, ub: Any, db: Any) -> Results:
        given: dict[str, Any] = {"gate_bias": gb, "up_bias": ub, "recompute": recompute, "activation": act}
        if whole:
            return [gemm.gated_mlp(x, gate, up, down, down_bias=db, **given)]
        return [gemm.linear_glu(x, gate, up, **given)]

    def reference(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, gb: Any, ub: Any, db: Any) -> Results:
        function: Any = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "sigmoid": torch.sigmoid}[act]
        h = function(F.linear(x, gate, gb)) * F.linear(x, up, ub)
        return [F.linear(h, down, db) if whole else h]

    return Scenario(call, reference)


def linear_packed(case: Case) -> Scenario:
    lead, k, n, d = case.leading(), case.size(33), case.size(), case.size(17)
    case.give("x", case.draw(*lead, k, step=0.25))
    case.give("weight", case.draw(n, k, step=0.25))
    case.maybe("b", n, step=0.25)
    case.give("W", case.draw(n, d))
    case.give("threshold", (case.draw(n).to(torch.promote_types(case.dtype, torch.float32)) + 2.5) / 3)
    name = case.pick("relu", "relu2", "jumprelu")
    options = case.pick({}, {"capacity": case.pick(1, 5, 70)})

    def call(x: Tensor, weight: Tensor, b: Any, W: Tensor, threshold: Tensor) -> Results:
        rows = gemm.linear_pack(x, weight, b, _activation(case, name, threshold.detach(), None, 0), **options)
        return [rows.to_dense(), rowsparse.matmul(rows, W), rows.counts.view(x.shape[:-1])]

    def reference(x: Tensor, weight: Tensor, b: Any, W: Tensor, threshold: Tensor) -> Results:
        z = F.linear(x, weight, b)
        kept = torch.where(z > (threshold.detach() if name == "jumprelu" else 0), z, 0)
        acts = kept * kept if name == "relu2" else kept
        return [acts, acts @ W, (acts != 0).sum(-1)]

    return Scenario(call, reference)


def feed_forward(case: Case) -> Scenario:
    lead, k, n, d = case.leading(), case.size(33), case.size(), case.size(17)
    case.give("x", case.draw(*lead, k, step=0.25))
    for name, shape in (("gate", (n, k)), ("up", (n, k)), ("down", (d, n))):
        case.give(name, case.draw(*shape, step=0.25))
    for name, size in (("gb", n), ("ub", n), ("db", d)):
        case.maybe(name, size, step=0.25)
    if case.clean["gb"] is not None and case.pick(True, False):
        case.clean["gb"] = case.clean["gb"] - case.pick(1, 2)
    gated, method = case.pick(True, False), case.pick("auto", "gather", "dense")
    act = case.pick("relu", "relu2")

    def call(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, gb: Any, ub: Any, db: Any) -> Results:
        given: dict[str, Any] = {"activation": act, "method": method, "down_bias": db}
        if gated:
            out: Any = ffn.gated(x, gate, up, down, gate_bias=gb, up_bias=ub, **given)
        else:
            out = ffn.plain(x, gate, down, up_bias=gb, **given)
        return [out]

    def reference(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, gb: Any, ub: Any, db: Any) -> Results:
        h = F.relu(F.linear(x, gate, gb))
        h = h * h if act == "relu2" else h
        return [F.linear(h * F.linear(x, up, ub) if gated else h, down, db)]

    return Scenario(call, reference)


SCENARIOS = (
    packed,
    foreign,
    encoded,
    decoded,
    glu,
    linear_packed,
    feed_forward,
    attended,
    indexed,
    gates,
    block_products,
    block_moves,
    block_attention,
    compressed,
    normed,
    indexer_trained,
)

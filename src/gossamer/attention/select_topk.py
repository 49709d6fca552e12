"""Exact top-k of the indexer's scores, without the matrix of scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from gossamer._core import autocast, checks
from gossamer._core.operator import register
from gossamer.attention._torch import select_topk as _cpu
from gossamer.attention.indexer_scores import IndexerActivation, check_inputs, scale_of
from gossamer.attention.levels import RULES
from gossamer.attention.records import QUERIES, SelectTopk
from gossamer.attention.selection import Selection

WORKSPACE = 256 << 20
"""Bytes of scores at a time by default: 4,096 rows at 32,768 keys. Fewer rows do not fill a GPU."""


@dataclass(frozen=True, eq=False)
class AdaptiveK:
    """How many keys a query takes, from its own visible scores: k_min to k_max, and k_base where they are usual.

    With s the query's scores of the n keys it sees, before the always-kept ones are marked:

    - `"variance"`: k_base * (0.5 + 1 / (1 + temperature * var(s) / mean)).
    - `"entropy"`: k_base * (0.5 + temperature * entropy(softmax(s)) / log(n + 1)).
    - `"learned"`: k_min + (k_max - k_min) * sigmoid(v . relu(U [mean(s), std(s), max(s)] + b) + mean).

    Rounded down, and clamped. The published rule divides the variance by its mean over batch and queries, which looks
    into the future and cannot decode; `mean` is a constant here, for instance a running mean of training.

    Args:
        rule: `"variance"`, `"entropy"` or `"learned"`.
        k_min, k_base, k_max: 1 <= k_min <= k_base <= k_max.
        temperature: a number above 0.
        mean: float32 tensor of one element: the usual variance, or for `"learned"` the output's bias.
        predictor: float32 `[hidden, 5]`, hidden a power of two, for `"learned"`: U in columns 0 to 2, b in 3, v in 4.

    Raises:
        ValueError: an unknown rule, bounds out of order, or a tensor that a rule needs and has not.

    Source: Gated Sparse Attention (arXiv 2601.15305), its adaptive selector; the constant mean is this package's.

    >>> AdaptiveK("entropy", k_min=256, k_base=2048, k_max=4096).k_base
    2048
    """

    rule: str
    k_min: int = 256
    k_base: int = 2048
    k_max: int = 4096
    temperature: float = 1.0
    mean: Tensor | None = None
    predictor: Tensor | None = None

    def __post_init__(self) -> None:
        operator = "attention.AdaptiveK"
        if self.rule not in RULES:
            raise ValueError(f"{operator}: rule must be one of {', '.join(RULES)}, got {self.rule!r}.")
        checks.positive(operator, "k_min", self.k_min, "It is the fewest keys that a query takes.")
        if not self.k_min <= self.k_base <= self.k_max:
            raise ValueError(
                f"{operator}: k_min <= k_base <= k_max must hold, got {self.k_min}, {self.k_base}, {self.k_max}."
            )
        checks.number(operator, "temperature", self.temperature, "1.0 is the published one.")
        if self.rule != "entropy" and self.mean is None:
            raise ValueError(f"{operator}: the rule {self.rule!r} needs mean, a float32 tensor of one element.")
        if (self.rule == "learned") != (self.predictor is not None):
            raise ValueError(f"{operator}: predictor is for the rule 'learned', and needed there; got {self.rule!r}.")
        for name, tensor in (("mean", self.mean), ("predictor", self.predictor)):
            if isinstance(tensor, Tensor) and tensor.dtype is not torch.float32:
                raise TypeError(f"{operator}: {name} must be float32, got {checks.name_of(tensor.dtype)}.")
        if isinstance(self.mean, Tensor) and self.mean.numel() != 1:
            raise ValueError(f"{operator}: mean must have one element, got {list(self.mean.shape)}.")
        if isinstance(self.predictor, Tensor):
            hidden = self.predictor.shape[0] if self.predictor.dim() == 2 else 0
            if hidden < 1 or hidden & (hidden - 1) or self.predictor.shape[1] != 5:
                raise ValueError(
                    f"{operator}: predictor must have shape [hidden, 5] with hidden a power of two, got "
                    f"{list(self.predictor.shape)}. Pad it with rows of zeros."
                )


torch.serialization.add_safe_globals([AdaptiveK])

_pytree.register_pytree_node(
    AdaptiveK,
    lambda a: ([a.mean, a.predictor], (a.rule, a.k_min, a.k_base, a.k_max, a.temperature)),
    lambda tensors, given: AdaptiveK(*given, *tensors),
    serialized_type_name="gossamer.attention.AdaptiveK",
)


def select_topk(
    q_idx: Tensor,
    k_idx: Tensor,
    w: Tensor,
    bias: Tensor | None,
    k: int | AdaptiveK,
    *,
    scale: float | None = None,
    causal: bool = False,
    lengths: Tensor | None = None,
    window: int = 0,
    sinks: int = 0,
    activation: IndexerActivation = "sigmoid",
    workspace: int | None = None,
    granularity: int = 1,
) -> Selection:
    """The k keys of highest `indexer_scores` for each query; the scores exist only in slabs of `workspace` bytes.

    Exact: the selection is that of a stable descending sort of the stored scores, ties to the lowest index, whatever
    the workspace, the batch and the run. So of two keys whose scores differ by less than a step of these, either may be
    taken. Scores are stored as integers that divide the range from 0 to the sum of the
    query's gates, sigmoid(w), into 31,741 equal steps; NaN ranks highest. With the activation `"relu"`, where x is a
    score divided by the query's sum of |w|, a step is at most 1/512 of |x| + 1/512, and beyond 4 million scores of one
    sign are equal.

    Args:
        q_idx, k_idx, w, bias, scale, causal, lengths, activation: as in `indexer_scores`. No gradient passes.
        k: how many keys a query takes, if it sees as many; or an `AdaptiveK`, which finds k query by query from scores
            of the activation `"sigmoid"`.
        window: the most recent keys that a query always takes, itself among them. They count among the k.
        sinks: the first keys that a query always takes. window + sinks may be at most k, or k_min.
        workspace: bytes for scores; None for 256 MiB, or the need of one block of 64 queries, which is the least: 128 *
            Tk bytes, Tk rounded up to 128.
        granularity: 1, or 4 to select units of four neighbouring keys, 4 u to 4 u + 3, by the highest score that the
            query sees in them: k / 4 units, of which it takes the keys that it sees. k, or k_min, k_base and k_max, are
            multiples of 4; an adaptive k follows from the units' scores. A unit with a key of the window or of the
            sinks is always taken. Finding the highest is a quarter of the work, and attention reads four rows
            beside each other.

    Returns:
        A `Selection` of one scope, for all heads.

    Raises:
        ValueError: shapes or devices do not fit; k, window, sinks or workspace out of range; an unknown activation.
        TypeError: dtypes differ or are not floating, or k is neither an int nor an `AdaptiveK`.
        NotImplementedError: an `AdaptiveK` with `"relu"`, or on the GPU, Di above 1,024 (512 for float32).

    Source: Gated Sparse Attention (arXiv 2601.15305), its top-k selector; this package's own algorithm.

    >>> one = torch.ones(1, 1, 3, 1)
    >>> select_topk(one, one[0], one[0], None, 2, causal=True).to_indices()[0].tolist()
    [[[[0, -1], [0, 1], [0, 1]]]]
    """
    operator = "attention.select_topk"
    check_inputs(operator, q_idx, k_idx, w, bias, lengths, causal, activation)
    if autocast.enabled(q_idx.device):
        q_idx, k_idx = autocast.cast(q_idx, k_idx)  # type: ignore[assignment]
    checks.same_dtype(operator, "q_idx", q_idx, k_idx=k_idx)
    if isinstance(k, AdaptiveK) and activation == "relu":
        raise NotImplementedError(f'{operator}: an AdaptiveK with activation="relu" is not implemented. Give k as int.')
    rule = _rule(operator, k, q_idx.device)
    _, _, base, least, most, *_ = rule
    _check_granularity(operator, granularity, (least, base, most))
    _check_kept(operator, window, sinks, least, granularity)
    tk = k_idx.shape[1]
    bias = None if bias is None else bias.detach().float()
    options = (causal, window, sinks, workspace_of(operator, workspace, tk), granularity, activation)
    scale = scale_of(operator, scale, q_idx.shape[3])
    call = SelectTopk(q_idx.detach(), k_idx.detach(), w.detach(), bias, lengths, *rule, scale, *options)
    return Selection(_select_topk(call), q_idx.shape[2])


def _rule(
    operator: str, k: int | AdaptiveK, device: torch.device
) -> tuple[Tensor | None, Tensor | None, int, int, int, str, float]:
    """mean, predictor, k, k_min, k_max, rule and temperature."""
    if not isinstance(k, AdaptiveK):
        checks.positive(operator, "k", k, "It is how many keys a query takes, or an AdaptiveK.")
        return None, None, k, k, k, "", 1.0
    checks.same_device(operator, "q_idx", device, mean=k.mean, predictor=k.predictor)
    tensors = (k.mean, k.predictor)
    mean, predictor = (None if t is None else t.detach().contiguous() for t in tensors)
    bounds = (k.k_base, k.k_min, k.k_max)
    return mean, predictor, *bounds, k.rule, float(k.temperature)


def _check_granularity(operator: str, granularity: int, numbers: tuple[int, int, int]) -> None:
    if granularity not in (1, 4) or isinstance(granularity, bool):
        raise ValueError(
            f"{operator}: granularity must be 1 or 4, got {granularity!r}. For blocks of 64 or 128 keys there is "
            "blocksparse.select_blocks."
        )
    if any(number % granularity for number in numbers):
        raise ValueError(
            f"{operator}: with granularity={granularity}, k, or k_min, k_base and k_max, must be multiples of it, got "
            f"{', '.join(map(str, dict.fromkeys(numbers)))}."
        )


def _check_kept(operator: str, window: int, sinks: int, least: int, granularity: int) -> None:
    for name, value in (("window", window), ("sinks", sinks)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{operator}: {name} must be an int of at least 0, got {value!r}.")
    # A window may begin and end within a unit.
    units = -(-sinks // granularity) + (-(-(window - 1) // granularity) + 1 if window else 0)
    if granularity > 1 and units > least // granularity:
        raise ValueError(
            f"{operator}: window and sinks may reach into at most k / {granularity} units of {granularity} keys, "
            f"{least // granularity}, got {window} and {sinks}, which may reach into {units}."
        )
    if granularity == 1 and units > least:
        raise ValueError(
            f"{operator}: window + sinks must be at most k (k_min where it is adaptive), for they count among the k, "
            f"got {window} + {sinks} and {least}."
        )


def workspace_of(operator: str, workspace: int | None, tk: int) -> int:
    least = QUERIES * 2 * (-(-tk // 128) * 128)
    if workspace is None:
        return max(WORKSPACE, least)
    checks.positive(operator, "workspace", workspace, "It is bytes; None for 256 MiB.")
    if workspace < least:
        raise ValueError(
            f"{operator}: workspace must be at least {least} bytes, the scores of {QUERIES} queries by {tk} keys, got "
            f"{workspace}."
        )
    return workspace


def _fake(call: SelectTopk) -> Tensor:
    q, k = call.q, call.k
    return q.new_empty((q.shape[0], 1, -(-q.shape[2] // QUERIES), k.shape[1]), dtype=torch.int64)


@register(SelectTopk, cpu=_cpu.select_topk, fake=_fake, repeats=True)
def _select_topk() -> Any:
    from gossamer.attention._triton.select_topk import select_topk

    return select_topk

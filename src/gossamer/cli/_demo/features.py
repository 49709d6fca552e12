"""Which features are worth a look, and the places of the text that fire them most."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer import rowsparse
from gossamer.cli._demo.model import ByteModel
from gossamer.cli._demo.train import Clock, Show
from gossamer.nn import JumpReLUSAE
from gossamer.rowsparse import CSR
from gossamer.rowsparse.formats import Rows

LOWEST_RATE, HIGHEST_RATE = 1e-4, 2e-2
LEAST_FIRINGS = 12
CONTEXTS = 8
BEFORE, AFTER = 48, 24
SAME_BEFORE = 16
CHUNK = 16


@dataclass(frozen=True)
class Firings:
    """Where each feature fired on tokens `[n, T]`: one CSR `[d_sae, positions]` for each chunk of windows."""

    tokens: Tensor
    chunks: list[CSR]
    positions_per_chunk: int

    @property
    def counts(self) -> Tensor:
        """How often each feature fired: int64 `[d_sae]`."""
        return torch.stack([chunk.nnz_per_row for chunk in self.chunks]).sum(0)

    def of(self, feature: int) -> tuple[Tensor, Tensor]:
        """Positions in the flattened tokens and values, `[n_firings]` each."""
        positions, values = [], []
        for number, chunk in enumerate(self.chunks):
            start, end = chunk.row_offsets[feature : feature + 2].tolist()
            positions.append(chunk.indices[start:end].long() + number * self.positions_per_chunk)
            values.append(chunk.values[start:end])
        return torch.cat(positions), torch.cat(values)


@torch.inference_mode()
def collect(model: ByteModel, sae: JumpReLUSAE, scale: float, tokens: Tensor, *, seconds: float, show: Show) -> Firings:
    """Run the SAE over tokens `[n, T]`, or as many of them as the time allows."""
    clock, n = Clock(seconds), 0
    chunks: list[CSR] = []
    while n < len(tokens) and (not chunks or clock.share() < 1):
        window = tokens[n : n + CHUNK]
        rows: Rows = sae.encode(model.residual(window).flatten(0, 1) * scale)
        if rows.overflowed:
            rows = rowsparse.pack(rows.to_dense(), format="csr")
        by_feature = rowsparse.transpose(rows)
        held = int(by_feature.row_offsets[-1])
        chunks.append(
            CSR(
                by_feature.row_offsets.cpu(),
                by_feature.indices[:held].cpu(),
                by_feature.values[:held].cpu(),
                by_feature.shape,
            )
        )
        n += len(window)
        show(max(clock.share(), n / len(tokens)), f"{n * tokens.shape[1]:,} bytes read")
    return Firings(tokens[:n].cpu(), chunks, CHUNK * tokens.shape[1])


def top_features(firings: Firings, n_features: int) -> list[dict[str, Any]]:
    """The most interesting features, each with the contexts that fire it most.

    Candidates fire on 0.01% to 2% of the bytes. Their score is the length of the text that two of their strongest
    contexts share up to and including the firing byte, white space not counted: the mean over all pairs of contexts
    (no two with the same run-up). A feature whose shared text lies within that of a better one is left out.
    """
    counts = firings.counts
    rates = counts.double() / firings.tokens.numel()
    wanted = (rates >= LOWEST_RATE) & (rates <= HIGHEST_RATE) & (counts >= LEAST_FIRINGS)
    described = [_describe(firings, feature) for feature in wanted.nonzero().flatten().tolist()]
    kept: list[dict[str, Any]] = []
    for candidate in sorted((d for d in described if d is not None), key=lambda d: -d["score"]):
        shared = candidate["shared_text"].strip()
        if len(kept) < n_features and not any(_same(shared, other["shared_text"].strip()) for other in kept):
            kept.append(candidate)
    return kept


def _same(first: str, second: str) -> bool:
    shorter, longer = sorted((first, second), key=len)
    return shorter in longer if len(shorter) > 1 else shorter == longer


def _describe(firings: Firings, feature: int) -> dict[str, Any] | None:
    positions, values = firings.of(feature)
    order = values.argsort(descending=True, stable=True)[: 8 * CONTEXTS]
    contexts: list[dict[str, Any]] = []
    run_ups: list[bytes] = []
    for position, value in zip(positions[order].tolist(), values[order].tolist(), strict=True):
        window, t = divmod(position, firings.tokens.shape[1])
        text = bytes(firings.tokens[window].tolist())
        run_up = text[: t + 1]
        if all(run_up[-SAME_BEFORE:] != other[-SAME_BEFORE:] for other in run_ups):
            run_ups.append(run_up)
            contexts.append({**_around(text, t), "value": value})
        if len(contexts) == CONTEXTS:
            break
    if len(contexts) < CONTEXTS // 2:
        return None
    shared = [_common_suffix(a, b) for i, a in enumerate(run_ups) for b in run_ups[:i]]
    fired_on = Counter(firings.tokens.flatten()[positions].tolist()).most_common(4)
    return {
        "feature": feature,
        "score": sum(len(b"".join(text.split())) for text in shared) / len(shared),
        "firing_rate": len(positions) / firings.tokens.numel(),
        "firings": len(positions),
        "largest_value": values.max().item(),
        "fires_on": [{"byte": _decode(bytes([byte])), "share": n / len(positions)} for byte, n in fired_on],
        "shared_text": _decode(sorted(shared, key=len)[len(shared) // 2]),
        "contexts": contexts,
    }


def _common_suffix(first: bytes, second: bytes) -> bytes:
    length = 0
    for a, b in zip(reversed(first), reversed(second), strict=False):
        if a != b:
            break
        length += 1
    return first[len(first) - length :]


def _around(text: bytes, t: int) -> dict[str, str]:
    """The character that byte t belongs to, and what stands before and after it."""
    start, end = _character_start(text, t), _character_end(text, t + 1)
    try:
        character = text[start:end].decode()
    except UnicodeDecodeError:
        start, end = t, t + 1
        character = _decode(text[start:end])
    first = _character_start(text, max(0, start - BEFORE))
    last = _character_end(text, min(len(text), end + AFTER))
    return {"before": _decode(text[first:start]), "character": character, "after": _decode(text[end:last])}


def _character_start(text: bytes, i: int) -> int:
    while 0 < i < len(text) and text[i] & 0xC0 == 0x80:
        i -= 1
    return i


def _character_end(text: bytes, i: int) -> int:
    while i < len(text) and text[i] & 0xC0 == 0x80:
        i += 1
    return i


def _decode(text: bytes) -> str:
    return text.decode(errors="backslashreplace")

"""Which features are worth a look, and the places of the text that fire them most: read from an extraction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from demo.model import N_BYTES, ByteModel
from gossamer.extract import Extraction
from gossamer.integrations.transformers import Activations

LOWEST_RATE, HIGHEST_RATE = 1e-4, 2e-2
LEAST_FIRINGS = 12
CONTEXTS = 8
# Of each latent; many of its strongest contexts may be copies of one another.
TOP = 8 * CONTEXTS
BEFORE, AFTER = 48, 24
SAME_BEFORE = 16
WINDOWS_AT_ONCE = 16


class ByteTokenizer:
    """A byte a token, as `Activations` asks a tokenizer; bytes that are no character are lone surrogates."""

    bos_token_id = None

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode(errors="surrogateescape")) for text in texts]}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"<0x{i:02X}>" for i in ids]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def residual_source(model: ByteModel, windows: Tensor) -> Activations:
    """The residual stream after the middle block for windows `[n, context]` of bytes: a source for `extract`."""
    texts = [bytes(window).decode(errors="surrogateescape") for window in windows.tolist()]
    return Activations(
        model,
        ByteTokenizer(),
        texts,
        f"blocks.{model.middle - 1}",
        context_size=windows.shape[1],
        batch_size=WINDOWS_AT_ONCE,
    )


def top_features(found: Extraction, n_features: int) -> list[dict[str, Any]]:
    """The most interesting features of an extraction of bytes, each with the contexts that fire it most.

    Candidates fire on 0.01% to 2% of the bytes. Their score is the length of the text that two of their strongest
    contexts share up to and including the firing byte, white space not counted: the mean over all pairs of contexts
    (no two with the same run-up). A feature whose shared text lies within that of a better one is left out.
    """
    rates = found.firing_counts.double() / max(found.rows, 1)
    wanted = (rates >= LOWEST_RATE) & (rates <= HIGHEST_RATE) & (found.firing_counts >= LEAST_FIRINGS)
    described = [_describe(found, feature) for feature in wanted.nonzero().flatten().tolist()]
    kept: list[dict[str, Any]] = []
    for candidate in sorted((d for d in described if d is not None), key=lambda d: -d["score"]):
        shared = candidate["shared_text"].strip()
        if len(kept) < n_features and not any(_same(shared, other["shared_text"].strip()) for other in kept):
            kept.append(candidate)
    for candidate, counts in zip(kept, _fired_on(found, [k["feature"] for k in kept]), strict=True):
        most = counts.argsort(descending=True, stable=True)[:4].tolist()
        shares = (counts / counts.sum()).tolist()
        named = {byte: bytes([byte]).decode(errors="backslashreplace") for byte in most}
        candidate["fires_on"] = [{"byte": named[byte], "share": shares[byte]} for byte in most if shares[byte]]
    return kept


def _same(first: str, second: str) -> bool:
    shorter, longer = sorted((first, second), key=len)
    return shorter in longer if len(shorter) > 1 else shorter == longer


def _describe(found: Extraction, feature: int) -> dict[str, Any] | None:
    contexts: list[dict[str, Any]] = []
    run_ups: list[str] = []
    for row, value in zip(found.top_positions[feature].tolist(), found.top_values[feature].tolist(), strict=True):
        if row < 0 or len(contexts) == CONTEXTS:
            break
        before, character, after = found.context(row, BEFORE, AFTER)
        run_up = before + character
        if all(run_up[-SAME_BEFORE:] != other[-SAME_BEFORE:] for other in run_ups):
            run_ups.append(run_up)
            contexts.append({"before": before, "character": character, "after": after, "value": value})
    if len(contexts) < CONTEXTS // 2:
        return None
    shared = [_common_suffix(a, b) for i, a in enumerate(run_ups) for b in run_ups[:i]]
    firings = int(found.firing_counts[feature])
    return {
        "feature": feature,
        "score": sum(len("".join(text.split())) for text in shared) / len(shared),
        "firing_rate": firings / found.rows,
        "firings": firings,
        "largest_value": float(found.maximum[feature]),
        "shared_text": sorted(shared, key=len)[len(shared) // 2],
        "contexts": contexts,
    }


def _common_suffix(first: str, second: str) -> str:
    length = 0
    for a, b in zip(reversed(first), reversed(second), strict=False):
        if a != b:
            break
        length += 1
    return first[len(first) - length :]


def _fired_on(found: Extraction, features: list[int]) -> Tensor:
    """How often each feature fired on each byte: int64 `[n_features, 256]`."""
    counts = torch.zeros(len(features) * N_BYTES, dtype=torch.int64)
    place = torch.full((found.d_sae,), -1)
    place[features] = torch.arange(len(features))
    for shard, rows in enumerate(found):
        places = place[rows.indices]
        held = places >= 0
        row = torch.repeat_interleave(rows.counts)[held]
        counts += (places[held] * N_BYTES + found.tokens(shard)[row]).bincount(minlength=len(counts))
    return counts.view(-1, N_BYTES)

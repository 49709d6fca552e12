"""Attention over selected keys: a small model that looks for a needle, and the time of attention alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.inputs import random_selection
from demo.measure import interleaved
from demo.train import Clock, Show
from gossamer import attention
from gossamer.nn import GatedSparseAttention

VOCABULARY, LENGTH, KEYS, HIDDEN = 16, 64, 8, 64
TRIED = (1, 2, 4, 8, 16, 32)
"""Keys of a query for which the trained model is asked."""
QUESTIONS = 128
LONG, LONG_HEADS, LONG_WIDTH, LONG_KEYS = 4096, 8, 64, 128
Task = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
# Share of the time, learning rate, questions a step, whether every key is attended to, and whether the indexer learns.
_STAGES = ((0.5, 3e-3, 32, True, False), (0.3, 3e-3, 8, True, True), (0.2, 1e-3, 8, False, True))
_WARM_UP = 0.3


def needle(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Among 62 tokens of hay one needle, of eight kinds; asked at the end, the model names it. -100 is no answer."""
    tokens = torch.randint(VOCABULARY - 8, (batch, LENGTH), generator=generator)
    kind = torch.randint(VOCABULARY - 8, VOCABULARY, (batch, 1), generator=generator)
    tokens.scatter_(1, torch.randint(LENGTH - 1, (batch, 1), generator=generator), kind)
    tokens[:, -1] = VOCABULARY
    answers = torch.full_like(tokens, -100)
    answers[:, -1:] = kind
    return tokens, answers


class NeedleModel(nn.Module):
    """Two layers of attention and of feed-forward; positions are learned too, for an indexer has no rotary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY + 1, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList(
            GatedSparseAttention(HIDDEN, 4, k_base=KEYS, k_min=1, k_max=LENGTH, d_indexer=16, n_idx_heads=4)
            for _ in range(2)
        )
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(5))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(
        self, tokens: Tensor, learn: bool = False, selection: attention.Selection | None = None
    ) -> tuple[Tensor, Tensor]:
        """(logits `[B, T, VOCABULARY]`, the indexers' loss, or 0); a given selection is used instead of theirs."""
        x, loss = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]], tokens.new_zeros(()).float()
        for i, (layer, mlp) in enumerate(zip(self.layers, self.mlps, strict=True)):
            assert isinstance(layer, GatedSparseAttention)
            y = self.norms[2 * i](x)
            x = x + layer(y, selection=selection)
            if learn:
                loss = loss + indexer_loss(layer, y.detach())
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[4](x)), loss

    def attend(self, keys: int | None) -> NeedleModel:
        """Every query takes so many keys, or all that it sees."""
        for layer in self.layers:
            assert isinstance(layer, GatedSparseAttention)
            layer.dense = keys is None
            layer.k_base = layer.k_base if keys is None else keys
        return self


def indexer_loss(layer: GatedSparseAttention, x: Tensor) -> Tensor:
    """Over all keys while the layer is dense, then over those that it selects."""
    q, k, _, _, index = layer.project(x)
    selection = None if layer.selects_all(x.shape[1]) else layer.select(*index)
    return attention.indexer_loss(q, k, *index, layer.indexer.idx_bias, selection=selection, causal=True)


def train_needle(model: NeedleModel, task: Task, clock: Clock, generator: torch.Generator, show: Show) -> None:
    """Trains densely, then with the indexers, and then with what they select, until the clock has run down."""
    device = next(model.parameters()).device
    done, begun, step = 0.0, 0.0, -1
    for share, rate, batch, dense, learn in _STAGES:
        model.attend(None if dense else KEYS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        while done < begun + share - 1e-9:
            step += 1
            done = clock.share(step)
            within = min(max((done - begun) / share, 0.0), 1.0)
            for group in optimizer.param_groups:
                # Up, and down again, as in a "one-cycle" schedule.
                group["lr"] = rate * max(min(within / _WARM_UP, (1 - within) / (1 - _WARM_UP)), 0.01)
            tokens, answers = (t.to(device) for t in task(batch, generator))
            logits, loss = model(tokens, learn)
            loss = loss + F.cross_entropy(logits.flatten(0, 1), answers.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 10 == 0:
                show(done, "all keys" if dense else f"{KEYS} keys")
        begun += share
    model.attend(KEYS)


@torch.no_grad()
def accuracy(model: NeedleModel, task: Task, selection: attention.Selection | None = None) -> float:
    """The share of the answers to new questions that are right."""
    tokens, answers = task(QUESTIONS, torch.Generator().manual_seed(99))
    device = next(model.parameters()).device
    right = model(tokens.to(device), selection=selection)[0].argmax(-1).cpu() == answers
    return (right.sum() / (answers >= 0).sum()).item()


def recent(keys: int, device: torch.device) -> attention.Selection:
    """The last so many keys of each query, for every question."""
    near = torch.arange(LENGTH, device=device)[:, None] - torch.arange(LENGTH, device=device)
    return attention.Selection.from_mask(((near >= 0) & (near < keys)).expand(QUESTIONS, -1, -1))


def needle_stage(
    device: torch.device, seed: int, clock: Clock, *, seconds: float, show: Show, length: int = LONG
) -> dict[str, Any]:
    """How often the needle is found with all keys, with those that the indexer selects, and with the last ones; and
    the time of attention alone, over `length` keys, for `seconds`."""
    torch.manual_seed(seed)
    model = NeedleModel().to(device)
    train_needle(model, needle, clock, torch.Generator().manual_seed(seed), show)
    whole = accuracy(model.attend(None), needle)
    by_keys = [
        {
            "keys": keys,
            "selected": accuracy(model.attend(keys), needle),
            "recent": accuracy(model, needle, recent(keys, device)),
        }
        for keys in TRIED
    ]
    found = next(row["selected"] for row in by_keys if row["keys"] == KEYS)
    show(1.0, f"{found:.0%} found with {KEYS} of {LENGTH} keys, {whole:.0%} with all")
    return {
        "length": LENGTH,
        "keys": KEYS,
        "questions": QUESTIONS,
        "accuracy_all": whole,
        "accuracy_selected": found,
        "by_keys": by_keys,
        "time": attention_times(device, seed, length, seconds),
    }


@torch.inference_mode()
def attention_times(device: torch.device, seed: int, length: int, seconds: float) -> dict[str, Any]:
    """Causal attention over all keys beside that over selected ones, without what selects them."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(seed)
    size = (1, LONG_HEADS, length, LONG_WIDTH)
    q, k, v = (torch.randn(size, device=device, dtype=dtype, generator=generator) for _ in range(3))
    keys = min(LONG_KEYS, length)
    selection = random_selection(length, keys, device=device, generator=generator)
    calls = (
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda: attention.sparse_attention(q, k, v, selection, causal=True),
    )
    masked = F.scaled_dot_product_attention(q, k, v, attn_mask=selection.to_mask())
    difference = (calls[1]().float() - masked.float()).abs().max().item()
    dense, sparse = interleaved(calls, device, seconds)
    return {
        "length": length,
        "keys": keys,
        "heads": LONG_HEADS,
        "head_dim": LONG_WIDTH,
        "dtype": str(dtype).removeprefix("torch."),
        "dense_seconds": dense.median,
        "sparse_seconds": sparse.median,
        "speed_up": dense.median / sparse.median,
        "largest_difference": difference,
    }

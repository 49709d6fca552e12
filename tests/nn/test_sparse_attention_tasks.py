"""Small tasks that need a distant token: a layer that selects 8 keys does as well as one that attends to all."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer import attention
from gossamer.nn import GatedSparseAttention

VOCABULARY, KEYS, HIDDEN = 16, 8, 64
Task = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


def needle(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Among 62 tokens of hay one needle, of eight kinds; asked at the end, the model names it. -100 is no answer."""
    tokens = torch.randint(VOCABULARY - 8, (batch, 64), generator=generator)
    kind = torch.randint(VOCABULARY - 8, VOCABULARY, (batch, 1), generator=generator)
    tokens.scatter_(1, torch.randint(63, (batch, 1), generator=generator), kind)
    tokens[:, -1] = VOCABULARY
    answers = torch.full_like(tokens, -100)
    answers[:, -1:] = kind
    return tokens, answers


def copying(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """20 tokens, a sign, and the same tokens again: each of them is told from those before it."""
    word = torch.randint(VOCABULARY, (batch, 20), generator=generator)
    tokens = torch.cat([word, torch.full((batch, 1), VOCABULARY), word[:, :-1]], 1)
    answers = torch.full_like(tokens, -100)
    answers[:, 20:] = word
    return tokens, answers


class Model(nn.Module):
    """Two layers of attention and of feed-forward; positions are learned too, for an indexer has no rotary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY + 1, HIDDEN), nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList(
            GatedSparseAttention(HIDDEN, 4, k_base=KEYS, k_min=KEYS, k_max=KEYS, d_indexer=16, n_idx_heads=4)
            for _ in range(2)
        )
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(5))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor, learn: bool = False) -> tuple[Tensor, Tensor]:
        """(logits, the indexers' loss, or 0)."""
        x, loss = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]], torch.zeros(())
        for i, (layer, mlp) in enumerate(zip(self.layers, self.mlps)):
            y = self.norms[2 * i](x)
            x = x + layer(y)
            if learn:
                loss = loss + indexer_loss(layer, y.detach())
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[4](x)), loss


def indexer_loss(layer: GatedSparseAttention, x: Tensor) -> Tensor:
    """Over all keys while the layer is dense, then over those that it selects."""
    q, k, _, _, index = layer.project(x)
    selection = None if layer.selects_all(x.shape[1]) else layer.select(*index)
    return attention.indexer_loss(q, k, *index, layer.indexer.idx_bias, selection=selection)


def train(model: Model, task: Task, steps: int, batch: int, seed: int, rate: float, learn: bool = False) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    for _ in range(steps):
        tokens, answers = task(batch, generator)
        logits, loss = model(tokens, learn)
        loss = loss + F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: Model, task: Task) -> float:
    tokens, answers = task(256, torch.Generator().manual_seed(99))
    right = model(tokens)[0].argmax(-1) == answers
    return (right.sum() / (answers >= 0).sum()).item()


def dense(model: Model, on: bool) -> Model:
    for layer in model.layers:
        layer.dense = on
    return model


@pytest.mark.native
@pytest.mark.full
@pytest.mark.parametrize("task, steps", [(needle, 120), (copying, 400)], ids=["needle", "copy"])
def test_as_good_as_dense(task: Task, steps: int) -> None:
    """Trained densely, then with its indexers, and then a little with what they select."""
    torch.manual_seed(0)
    model = dense(Model(), True)
    train(model, task, steps, 32, 0, 3e-3)
    whole = accuracy(model, task)
    assert whole > 0.95
    train(model, task, 100, 8, 1, 3e-3, learn=True)
    train(dense(model, False), task, 30, 8, 2, 3e-4, learn=True)
    assert accuracy(model, task) >= whole - 0.01
